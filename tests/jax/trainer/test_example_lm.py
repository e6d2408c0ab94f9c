"""The example's pure parts: text, microbatches, network and settings."""

import math
import sys

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import train_lm
from byte_lm.model import ByteLM
from byte_lm.objective import loss
from byte_lm.settings import ModelSettings, Settings
from byte_lm.text import draw_microbatch, read_standard_library
from flax import nnx
from jax.sharding import AbstractMesh

from resilient_jax.config import decode_toml, load_toml, override_values
from resilient_jax.errors import ConfigError
from resilient_jax.sharding.placements import fully_sharded
from tests.support.paths import ROOT

TINY = load_toml(ROOT / "configs" / "lm_tiny.toml", Settings)
FSDP = load_toml(ROOT / "configs" / "lm_tiny_fsdp.toml", Settings)
SMALL = msgspec.structs.replace(
    TINY, microbatches=7, model=ModelSettings(width=32, layers=2, heads=2, context=16)
)
"""The same network, small enough that a test of arithmetic compiles in a second."""


@pytest.fixture(scope="module")
def text():
    return read_standard_library(TINY.text.max_bytes)


def microbatch(text, settings, step_number, index):
    return draw_microbatch(
        text,
        (settings.seed, step_number, index),
        sequences=settings.sequences,
        context=settings.model.context,
    )


def test_the_text_is_python_of_the_requested_length(text):
    assert (text.dtype, text.shape) == (np.uint8, (TINY.text.max_bytes,))
    assert b"import " in text.tobytes()


def test_the_text_is_the_same_each_time_and_a_shorter_text_is_its_prefix(text):
    shorter = read_standard_library(100_000)
    np.testing.assert_array_equal(shorter, text[:100_000])


def test_a_python_without_sources_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=f"{tmp_path}: found no Python sources, expected the standard"):
        read_standard_library(1_000)


def test_a_microbatch_is_a_pure_function_of_seed_step_and_index(text):
    np.testing.assert_array_equal(microbatch(text, TINY, 5, 3), microbatch(text, TINY, 5, 3))


def test_a_microbatch_never_changes_from_release_to_release():
    counting = np.arange(256, dtype=np.uint8).repeat(4)
    drawn = draw_microbatch(counting, (7, 1, 2), sequences=3, context=4)
    assert drawn.tolist() == [[180, 180, 181, 181, 181], [99, 99, 99, 99, 100], [59, 60, 60, 60, 60]]


def test_microbatches_of_other_seeds_steps_and_indexes_differ(text):
    keys = [(seed, step, index) for seed in range(3) for step in range(3) for index in range(3)]
    drawn = {draw_microbatch(text, key, sequences=4, context=64).tobytes() for key in keys}
    assert len(drawn) == len(keys)


def test_a_microbatch_has_slices_of_the_text_one_byte_longer_than_the_context(text):
    batch = microbatch(text, TINY, 0, 0)
    assert (batch.dtype, batch.shape) == (np.uint8, (TINY.sequences, TINY.model.context + 1))
    whole = text.tobytes()
    assert all(sequence.tobytes() in whole for sequence in batch)


def test_the_last_byte_of_the_text_can_be_a_target():
    shortest = np.arange(9, dtype=np.uint8)
    assert draw_microbatch(shortest, (0, 0, 0), sequences=1, context=8).tolist() == [list(range(9))]


def parameters_of(settings):
    return jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: ByteLM(settings.model, nnx.Rngs(0))), nnx.Param))


@pytest.mark.parametrize("settings", [TINY, FSDP], ids=["replicated", "fsdp"])
def test_the_network_has_between_one_and_three_million_parameters(settings):
    assert 1_000_000 <= sum(math.prod(leaf.shape) for leaf in parameters_of(settings)) <= 3_000_000


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 6])
def test_the_network_is_sharded_over_all_devices_of_any_number_of_hosts(hosts):
    """Leaves of at most a thousand elements may be replicated."""
    assert FSDP.state.parallelism == "sharded"
    place = fully_sharded(AbstractMesh((hosts, 2), ("host", "local")))
    sizes = {
        math.prod(leaf.shape): math.prod(place("", leaf).shard_shape(leaf.shape))
        for leaf in parameters_of(FSDP)
    }
    assert all(size in (whole, whole // (2 * hosts)) for whole, size in sizes.items())
    assert all(size < whole for whole, size in sizes.items() if whole > 1000)


def test_the_first_loss_is_that_of_a_uniform_guess_among_256_bytes(text):
    found = loss(ByteLM(SMALL.model, nnx.Rngs(0)), jnp.asarray(microbatch(text, SMALL, 0, 0)))
    assert float(found) == pytest.approx(math.log(256), abs=0.2)


def test_a_prediction_does_not_depend_on_its_target(text):
    model = ByteLM(SMALL.model, nnx.Rngs(0))
    one = microbatch(text, SMALL, 0, 0)[:1]
    other = one.copy()
    other[0, 10:] ^= 1
    logits = [model(jnp.asarray(batch[:, :-1]))[0] for batch in (one, other)]
    np.testing.assert_array_equal(logits[0][:10], logits[1][:10])
    assert not np.array_equal(logits[0][10:], logits[1][10:])


REFUSALS = {
    "width": (
        {"model": {"width": 100, "layers": 4, "heads": 3, "context": 64}},
        "flags: key 'model': found values that do not go together: "
        "width = 100 is not a multiple of heads = 3.",
    ),
    "steps": (
        {"steps": 0},
        "flags: key 'steps': found 0 (int), expected an integer >= 1 and <= 10_000_000. Change the value.",
    ),
    "state": (
        {"state": {"parallelism": "shared"}},
        "flags: key 'state.parallelism': found 'shared' (str), expected one of "
        "'replicated', 'sharded'. Change the value.",
    ),
    "seed": (
        {"seed": -1},
        "flags: key 'seed': found -1 (int), expected an integer >= 0 and < 4_294_967_296. Change the value.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_invalid_setting_is_refused_with_a_helpful_message(case):
    changes, message = REFUSALS[case]
    with pytest.raises(ConfigError) as refusal:
        override_values(TINY, changes, source="flags")
    assert str(refusal.value) == message


def test_a_misspelled_setting_is_refused_with_the_intended_name():
    text = (ROOT / "configs" / "lm_tiny.toml").read_text("utf-8").replace("layers =", "layer =")
    with pytest.raises(ConfigError) as refusal:
        decode_toml(text, Settings, source="lm_tiny.toml")
    assert str(refusal.value) == (
        "lm_tiny.toml: key 'model.layer': found an unknown key, expected one of width, layers, heads, "
        "context. Did you mean 'layers'?"
    )


def test_a_bad_configuration_ends_the_script_with_one_line_and_the_code_for_bad_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_lm.py", "--steps", "0"])
    assert train_lm.main() == 2
    assert capsys.readouterr().err == f"error: {REFUSALS['steps'][1].replace('flags', 'command line')}\n"
