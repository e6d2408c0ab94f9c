"""Model files: published shapes have the published parameters; invalid ones are refused by file and key."""

import re

import pytest

from resilient_jax.config import JobConfig, load_toml
from resilient_jax.errors import ConfigError
from resilient_jax.planning.model_file import load_model_shape
from resilient_jax.planning.transformer import count_parameters
from tests.support.paths import CONFIGS

PUBLISHED = {
    "gpt2": 124_439_808,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen25_7b": 7_615_616_512,
    "qwen25_14b": 14_770_033_664,
    "qwen25_32b": 32_763_876_352,
    "qwen25_72b": 72_706_203_648,
    "llama1_33b": 32_528_943_616,
    # No weights were released. V D + S D + L (12 D^2 + 13 D) + 2 D, with V = 50257, S = 2048.
    "gpt3_1b3": 1_315_723_264,
    "gpt3_7b": 6_658_404_352,
    "gpt3_13b": 12_853_386_240,
    "gpt3_70b": 76_041_082_880,
    "gpt3_175b": 174_604_259_328,
}

TINY = """
name = "tiny"
source = "nowhere"
[transformer]
layers = 2
width = 64
heads = 4
kv_heads = 2
head_dim = 16
feed_forward = 128
vocabulary_tokens = 256
sequence_tokens = 64
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_the_published_number_of_parameters(name):
    model = load_model_shape(CONFIGS / f"{name}.toml")
    assert count_parameters(model.transformer) == model.parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_a_source(name):
    assert re.search("20[12][0-9]", load_model_shape(CONFIGS / f"{name}.toml").source)


REFUSALS = {
    "an unknown key": ("heads = 4", "head = 4", "key 'transformer.head': found an unknown key.*mean 'heads'"),
    "a missing key": ("layers = 2", "", "key 'transformer.layers': found nothing, expected an integer >= 1"),
    "no layers": ("layers = 2", "layers = 0", "key 'transformer.layers': found 0 .int., expected an integer"),
    "a negative number": ("width = 64", "width = -64", "key 'transformer.width': found -64"),
    "a word": (
        "width = 64",
        'width = "wide"',
        "key 'transformer.width': found 'wide' .str., expected an integer",
    ),
    "heads that do not share keys": (
        "kv_heads = 2",
        "kv_heads = 3",
        "key 'transformer': found values that do not go together: kv_heads = 3 does not divide heads = 4",
    ),
    "more experts for a token than there are": (
        "layers = 2",
        "layers = 2\nexperts_per_token = 2",
        "experts_per_token = 2 is more than experts = 1",
    ),
    "another number of parameters": (
        'source = "nowhere"',
        'source = "nowhere"\nparameters = 5',
        r"parameters = 5, but the sizes in \[transformer\] give 106_816",
    ),
    "an unknown norm": (
        "layers = 2",
        'layers = 2\nnorm = "batch"',
        "'transformer.norm': found 'batch'.*'rms'",
    ),
    "no source": ('source = "nowhere"', "", "key 'source': found nothing, expected a string"),
    "no TOML": ("[transformer]", "[transformer", "found text that is not TOML"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_invalid_model_file_is_refused_by_file_and_key(case, tmp_path):
    old, new, said = REFUSALS[case]
    assert old in TINY
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace(old, new))
    with pytest.raises(ConfigError, match=f"tiny.toml: .*{said}"):
        load_model_shape(path)


def test_the_file_that_the_refusals_edit_is_valid(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    assert load_model_shape(path).name == "tiny"


@pytest.mark.parametrize("name", ["lm_tiny", "lm_tiny_fsdp"])
def test_settings_of_a_script_are_refused_as_a_model(name):
    said = r"found 'steps', 'seed'.* and no table \[transformer\], expected the shape of a model"
    with pytest.raises(ConfigError, match=f"{name}.toml: {said}"):
        load_model_shape(CONFIGS / f"{name}.toml")


def test_a_model_given_as_the_settings_of_a_job_is_refused_by_its_first_key():
    with pytest.raises(
        ConfigError, match=r"gpt2\.toml: key 'name': found an unknown key, expected one of lease_ttl_s"
    ):
        load_toml(CONFIGS / "gpt2.toml", JobConfig)


def test_a_file_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: found no such file"):
        load_model_shape(tmp_path / "none.toml")
