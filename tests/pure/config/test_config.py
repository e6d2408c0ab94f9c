"""Configuration: valid input becomes a frozen struct, invalid input is refused with what to do."""

import enum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from resilient_jax.config import JobConfig, decode_toml, load_toml, override_values
from resilient_jax.errors import ConfigError, ExitCode


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A struct that does not forbid unknown fields itself: `decode_toml` has to."""

    width: Annotated[int, Meta(ge=8, le=4096)] = 64
    heads: Annotated[int, Meta(ge=1)] = 4
    kind: Literal["decoder", "encoder"] = "decoder"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads = {self.heads} does not divide width = {self.width}")


class Ring(msgspec.Struct, frozen=True, kw_only=True, tag="ring"):
    size: int


class Star(msgspec.Struct, frozen=True, kw_only=True, tag="star"):
    centre: str


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    model: Model = Model()
    rate: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    colour: Colour = Colour.RED
    sizes: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    models: dict[str, Model] = {}
    list_of_models: list[Model] = []
    maybe: Model | None = None
    verbose: bool = False
    shape: Ring | Star | None = None


REFUSALS = {
    "unknown key, with the one that was meant": (
        'name = "a"\nrat = 0.5',
        "job.toml: key 'rat': found an unknown key, expected one of name, model, rate, colour, sizes, "
        "models, list_of_models, maybe, verbose, shape. Did you mean 'rate'?",
    ),
    "unknown key, unlike any": (
        'name = "a"\n[model]\nzzz = 1',
        "job.toml: key 'model.zzz': found an unknown key, expected one of width, heads, kind. Remove it.",
    ),
    "unknown key in an optional table": (
        'name = "a"\n[maybe]\nwith = 8',
        "job.toml: key 'maybe.with': found an unknown key, expected one of width, heads, kind. "
        "Did you mean 'width'?",
    ),
    "unknown key in an array of tables": (
        'name = "a"\n[[list_of_models]]\n[[list_of_models]]\nhead = 1',
        "job.toml: key 'list_of_models[1].head': found an unknown key, expected one of width, heads, kind. "
        "Did you mean 'heads'?",
    ),
    "unknown key in a table of tables": (
        'name = "a"\n[models.small]\nhead = 1',
        "job.toml: key 'models.small.head': found an unknown key, expected one of width, heads, kind. "
        "Did you mean 'heads'?",
    ),
    "unknown key in a tagged table": (
        'name = "a"\n[shape]\ntype = "ring"\nsize = 3\ncentre = "x"',
        "job.toml: key 'shape.centre': found an unknown key, expected one of size. Remove it.",
    ),
    "missing key": (
        "rate = 0.5",
        "job.toml: key 'name': found nothing, expected a string. Add the key.",
    ),
    "wrong type": (
        'name = "a"\n[model]\nwidth = "wide"',
        "job.toml: key 'model.width': found 'wide' (str), expected an integer >= 8 and <= 4_096. "
        "Change the value.",
    ),
    "true where a number is meant": (
        'name = "a"\nrate = true',
        "job.toml: key 'rate': found True (bool), expected a number > 0 and < 1. Change the value.",
    ),
    "number where a switch is meant": (
        'name = "a"\nverbose = 1',
        "job.toml: key 'verbose': found 1 (int), expected true or false. Change the value.",
    ),
    "below the range": (
        'name = "a"\n[model]\nwidth = 4',
        "job.toml: key 'model.width': found 4 (int), expected an integer >= 8 and <= 4_096. "
        "Change the value.",
    ),
    "not a number": (
        'name = "a"\nrate = nan',
        "job.toml: key 'rate': found nan (float), expected a number > 0 and < 1. Change the value.",
    ),
    "value of a closed set": (
        'name = "a"\n[model]\nkind = "both"',
        "job.toml: key 'model.kind': found 'both' (str), expected one of 'decoder', 'encoder'. "
        "Change the value.",
    ),
    "value of an enum": (
        'name = "a"\ncolour = "green"',
        "job.toml: key 'colour': found 'green' (str), expected one of 'red', 'blue'. Change the value.",
    ),
    "item of an array": (
        'name = "a"\nsizes = [1, 0]',
        "job.toml: key 'sizes[1]': found 0 (int), expected an integer >= 1. Change the value.",
    ),
    "value where a table is meant": (
        'name = "a"\nmodel = 3',
        "job.toml: key 'model': found 3 (int), expected a table with width, heads, kind. Change the value.",
    ),
    "value in a table of tables": (
        'name = "a"\n[models.small]\nwidth = 4',
        "job.toml: key 'models[...].width': Expected `int` >= 8. Correct the value.",
    ),
    "values that do not go together": (
        'name = "a"\n[model]\nwidth = 10\nheads = 4',
        "job.toml: key 'model': found values that do not go together: heads = 4 does not divide width = 10.",
    ),
    "not TOML": (
        "name = ",
        "job.toml: found text that is not TOML (Invalid value (at end of document)), expected TOML 1.0. "
        "Correct it at that place.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_error_names_the_source_the_key_what_was_found_what_was_expected_and_what_to_do(case):
    text, message = REFUSALS[case]
    with pytest.raises(ConfigError) as refusal:
        decode_toml(text, Job, source="job.toml")
    assert str(refusal.value) == message


def test_a_config_error_ends_a_command_with_the_exit_code_of_bad_input():
    with pytest.raises(ConfigError) as refusal:
        decode_toml("", Job, source="job.toml")
    assert refusal.value.exit_code is ExitCode.USAGE


def test_a_valid_file_is_decoded_with_defaults_for_missing_keys():
    job = decode_toml(
        'name = "a"\nrate = 0.25\nsizes = [1, 2]\n[shape]\ntype = "star"\ncentre = "x"',
        Job,
        source="job.toml",
    )
    assert job == Job(name="a", rate=0.25, sizes=(1, 2), shape=Star(centre="x"))


def test_a_missing_file_is_named_with_the_working_directory(tmp_path):
    path = tmp_path / "job.toml"
    with pytest.raises(ConfigError) as refusal:
        load_toml(path, Job)
    assert str(refusal.value) == (
        f"{path}: found no such file, expected a TOML file. "
        f"Check the path; it was looked for from {Path.cwd()}."
    )


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\), expected a TOML file"):
        load_toml(tmp_path, Job)


def test_a_file_that_is_not_text_is_refused_with_the_offset(tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8 at offset 8"):
        load_toml(path, Job)


def test_the_error_names_the_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("name = 3", encoding="utf-8")
    with pytest.raises(ConfigError) as refusal:
        load_toml(path, Job)
    assert str(refusal.value) == f"{path}: key 'name': found 3 (int), expected a string. Change the value."


def test_a_flag_replaces_one_value_and_keeps_the_others():
    job = Job(name="a", sizes=(3,), list_of_models=[Model(width=8)])
    changed = override_values(job, {"rate": 0.75}, source="command line")
    assert changed == msgspec.structs.replace(job, rate=0.75)


def test_a_flag_is_checked_like_a_value_in_the_file():
    with pytest.raises(ConfigError) as refusal:
        override_values(Job(name="a"), {"rate": 7.0}, source="command line")
    assert str(refusal.value) == (
        "command line: key 'rate': found 7.0 (float), expected a number > 0 and < 1. Change the value."
    )


def test_the_defaults_of_a_job_satisfy_its_own_ranges():
    assert decode_toml("", JobConfig, source="defaults") == JobConfig()


@pytest.mark.parametrize("key", [f for f in JobConfig.__struct_fields__ if f.endswith("_s")])
@pytest.mark.parametrize("value", ["-1.0", "inf", "nan", "1e9"])
def test_an_impossible_duration_of_a_job_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"^job.toml: key '{key}': found .* expected a number >"):
        decode_toml(f"{key} = {value}", JobConfig, source="job.toml")


def test_a_misspelled_key_of_a_job_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="Did you mean 'lease_ttl_s'"):
        decode_toml("lease_ttl = 3", JobConfig, source="job.toml")


toml_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(changes=st.dictionaries(st.sampled_from(Job.__struct_fields__) | st.text(), toml_values, max_size=3))
def test_any_values_give_a_job_config_or_a_config_error(changes):
    try:
        outcome = override_values(Job(name="a"), changes, source="flags")
    except ConfigError as refusal:
        outcome = refusal
    assert isinstance(outcome, Job) or str(outcome).startswith("flags: key '")


@pytest.mark.parametrize("text", ["a = " + "1" * 5000, "a = " + "[" * 3000])
def test_numbers_too_long_and_arrays_too_deep_to_parse_are_refused(text):
    with pytest.raises(ConfigError, match=r"^job\.toml: found text that is not TOML"):
        decode_toml(text, Job, source="job.toml")


def test_what_follows_from_other_settings_is_no_key_and_changes_with_them():
    config = JobConfig(lease_ttl_s=0.5, hang_timeout_s=7.0, quiesce_timeout_s=2.0)
    assert (JobConfig().store_timeout_s, config.store_timeout_s) == (60.0, 10.0)
    assert (JobConfig().heartbeat_timeout_s, config.heartbeat_timeout_s) == (65.0, 9.0)
    with pytest.raises(ConfigError, match="found an unknown key"):
        decode_toml("store_timeout_s = 5", JobConfig, source="job.toml")
