"""Names of dims from Flax metadata and from rules on paths; which parameters belong to equal layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import AXIS_BY_LOGICAL_NAME, Axis
from resilient_jax.planning.transformer import TransformerShape
from resilient_jax.program_analysis.abstract_program import make_abstract_program
from resilient_jax.sharding.layer_stacks import find_layer_positions
from resilient_jax.sharding.logical_axes import (
    LogicalAxisRules,
    get_linen_names,
    get_max_shards,
    get_nnx_names,
    name_dims,
)
from tests.support.decoder import Decoder, LoopedDecoder

SHAPE = TransformerShape(
    layers=2,
    width=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    feed_forward=24,
    vocabulary_tokens=32,
    sequence_tokens=8,
)
TOKENS = jax.ShapeDtypeStruct((2, 8), jnp.int32)


def test_names_are_read_from_the_metadata_of_nnx():
    with nnx.use_eager_sharding(False):
        state = nnx.state(nnx.eval_shape(lambda: Decoder(SHAPE, nnx.Rngs(0))), nnx.Param)
    names = get_nnx_names(state)
    assert names["layers/0/attention/query/kernel"] == ("embed", "heads", "head_dim")
    assert names["tokens/embedding"] == ("vocab", "embed")


def test_names_are_read_from_the_boxes_of_linen_with_the_dim_of_a_loop():
    program = make_abstract_program(LoopedDecoder(SHAPE), lambda model, x: model(x).mean(), TOKENS)
    assert program.names["layers/query/kernel"] == ("layers", "embed", "heads", "head_dim")
    assert program.params["layers"]["query"]["kernel"].shape == (2, 16, 2, 8)


def test_names_are_read_from_boxes_of_linen_that_name_mesh_axes():
    kernel = nn.with_partitioning(nn.initializers.ones, ("embed", "mlp"))
    module = nn.Dense(8, kernel_init=kernel)
    boxed = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 4))))["params"]
    assert get_linen_names(boxed) == {"kernel": ("embed", "mlp")}


@pytest.mark.parametrize(
    ("naming", "expected"),
    [
        (LogicalAxisRules(), ("embed", "mlp")),
        (LogicalAxisRules(names_by_path=[("*/kernel", ("mlp", None))]), ("mlp", None)),
        (
            LogicalAxisRules(names_by_path=[("*/bias", ("mlp",)), ("up/*", (None, "heads")), ("*", ())]),
            (None, "heads"),
        ),
        (LogicalAxisRules(names_by_path=[("*", ("embed",))]), ("embed", None)),
    ],
    ids=["metadata", "a rule comes before metadata", "the first rule that matches", "dims without a name"],
)
def test_the_dims_of_a_parameter_are_named(naming, expected):
    assert name_dims("up/kernel", (4, 8), {"up/kernel": ("embed", "mlp")}, naming) == expected


def test_more_names_than_dims_are_refused():
    naming = LogicalAxisRules(names_by_path=[("up/*", ("embed", "mlp"))])
    with pytest.raises(
        CallerError, match=r"up/bias: found 2 logical names .* of shape \(8,\).*Correct the rule"
    ):
        name_dims("up/bias", (8,), {}, naming)


def test_a_name_without_an_axis_is_refused_with_the_known_names():
    with pytest.raises(
        CallerError, match=r"up/kernel: found the logical name 'hidden', expected one of embed, .*vocab"
    ):
        name_dims("up/kernel", (4, 8), {"up/kernel": ("embed", "hidden")}, LogicalAxisRules())


def test_a_dim_of_a_custom_name_is_sharded_by_the_axis_given_for_it():
    naming = LogicalAxisRules(mesh_axes={**AXIS_BY_LOGICAL_NAME, "hidden": Axis.TENSOR})
    assert name_dims("up", (4, 8), {"up": ("embed", "hidden")}, naming) == ("embed", "hidden")


def test_a_dim_with_the_elements_of_several_heads_is_divided_between_heads():
    assert get_max_shards(("embed", "heads"), (48, 64), LogicalAxisRules(max_shards={"heads": 4})) == (48, 4)


LAYERINGS = {
    "a list of blocks": (
        {
            "blocks/0/up": (4, 8),
            "blocks/0/down": (8, 4),
            "blocks/1/up": (4, 8),
            "blocks/1/down": (8, 4),
            "head": (4,),
        },
        {},
        {"blocks/*/up": 2, "blocks/*/down": 2, "head": 1},
    ),
    "numbered modules of Linen": (
        {"Block_0/Dense_0": (4, 8), "Block_1/Dense_0": (4, 8), "Block_2/Dense_0": (4, 8), "Dense_0": (4, 2)},
        {},
        {"Block_*/Dense_0": 3, "Dense_0": 1},
    ),
    "numbered modules that differ": (
        {"Dense_0": (4, 8), "Dense_1": (8, 2)},
        {},
        {"Dense_0": 1, "Dense_1": 1},
    ),
    "stacked": (
        {"layers/up": (6, 4, 8), "norm": (4,)},
        {"layers/up": ("layers", "embed", "mlp")},
        {"layers/up": 6, "norm": 1},
    ),
    "two stacks, of which the longer one is meant": (
        {"a/0/w": (4,), "a/1/w": (4,), "b/0/w": (4,), "b/1/w": (4,), "b/2/w": (4,)},
        {},
        {"a/0/w": 1, "a/1/w": 1, "b/*/w": 3},
    ),
}


@pytest.mark.parametrize("case", LAYERINGS)
def test_equal_layers_are_found(case):
    shapes, names, expected = LAYERINGS[case]
    places = find_layer_positions(shapes, names)
    assert {place.path: place.copies for place in places.values()} == expected
