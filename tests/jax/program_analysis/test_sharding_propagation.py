"""The part and the sharding of each operation of a program follow from the names of its parameters."""

import collections

import jax
import jax.numpy as jnp
import pytest

from resilient_jax.planning.axes import AXIS_BY_LOGICAL_NAME, Axis
from resilient_jax.planning.program_cost import ModelPart
from resilient_jax.program_analysis.operations import trace_operations
from resilient_jax.program_analysis.program_parts import assign_parts
from resilient_jax.program_analysis.sharding_propagation import ShardingKind, propagate_sharding
from resilient_jax.sharding.layer_stacks import LayerPosition

BATCH, TOKENS, WIDTH = 2, 8, 16


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X = array(BATCH, TOKENS, WIDTH)


def follow(function, params, names, places=None):
    """Return FLOPs by part and kind, bytes sent forward and backward by axis, and the parts of the operations."""
    operations = trace_operations(function, params, X)
    values = dict(zip(params, operations.inputs, strict=False))  # sorted by key, as in a pytree
    batch = frozenset(operations.inputs[len(params) :])
    places = places or {name: LayerPosition(path=name) for name in params}
    where = assign_parts(operations, {values[name]: places[name] for name in params}, batch)
    parts = [step.part for step in where.positions]
    found = propagate_sharding(
        operations, parts, {values[name]: names[name] for name in params}, batch, AXIS_BY_LOGICAL_NAME
    )
    flops, sent = collections.defaultdict(float), collections.defaultdict(lambda: [0, 0])
    for step in found.operations:
        if step.matmul_flops:
            flops[step.part, step.kind] += step.matmul_flops
    for message in found.exchanges:
        sent[message.axis][0] += message.bytes * message.forward_count * message.iterations
        sent[message.axis][1] += message.bytes * message.backward_count * message.iterations
    return dict(flops), dict(sent), where


WIDTH_BYTES = BATCH * TOKENS * WIDTH * 4
UP_DOWN = {"down": array(24, WIDTH), "up": array(WIDTH, 24)}
NAMES = {"down": ("mlp", "embed"), "up": ("embed", "mlp")}
PRODUCT = 2 * BATCH * TOKENS * WIDTH * 24

FEED_FORWARDS = {
    "as it is": lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"],
    "in another type": lambda p, x: (x @ p["up"].astype(jnp.bfloat16).astype(jnp.float32)) @ p["down"],
    "transposed": lambda p, x: jnp.einsum("btd,fd->btf", x, p["up"].T) @ p["down"],
    "reshaped": lambda p, x: (
        jnp.einsum("btd,dhk->bthk", x, p["up"].reshape(16, 4, 6)).reshape(2, 8, 24) @ p["down"]
    ),
    "compiled apart": lambda p, x: jax.jit(lambda x: x @ p["up"])(x) @ p["down"],
    "remat": lambda p, x: jax.checkpoint(lambda x: (x @ p["up"]) @ p["down"])(x),
}


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_a_feed_forward_network_is_sharded_by_tensor_and_all_reduced_once_each_way(name):
    flops, sent, _ = follow(FEED_FORWARDS[name], UP_DOWN, NAMES)
    assert flops == {(ModelPart.LAYER, ShardingKind.TENSOR): 2 * PRODUCT}
    assert sent == {Axis.TENSOR: [WIDTH_BYTES, WIDTH_BYTES]}


def test_the_gradient_of_an_input_of_several_products_is_all_reduced_once():
    params = {**UP_DOWN, "gate": array(WIDTH, 24)}
    names = {**NAMES, "gate": ("embed", "mlp")}
    _, sent, _ = follow(lambda p, x: ((x @ p["gate"]) * (x @ p["up"])) @ p["down"], params, names)
    assert sent == {Axis.TENSOR: [WIDTH_BYTES, WIDTH_BYTES]}


def test_without_names_nothing_is_sharded_and_nothing_is_sent():
    none = {"up": (None, None), "down": (None, None)}
    flops, sent, _ = follow(FEED_FORWARDS["as it is"], UP_DOWN, none)
    assert flops == {(ModelPart.LAYER, ShardingKind.REPLICATED): 2 * PRODUCT}
    assert sent == {}


def test_tokens_go_to_experts_and_back_each_way():
    def mixture(p, x):
        gates = jax.nn.softmax(x @ p["router"])
        chosen = jax.nn.one_hot(gates.argmax(-1), 4)
        sent = jnp.einsum("btd,bte->ebtd", x, chosen)
        hidden = jax.nn.relu(jnp.einsum("ebtd,edf->ebtf", sent, p["up"]))
        made = jnp.einsum("ebtf,efd->ebtd", hidden, p["down"])
        return x + jnp.einsum("ebtd,bte->btd", made, gates * chosen)

    params = {"down": array(4, 24, WIDTH), "router": array(WIDTH, 4), "up": array(4, WIDTH, 24)}
    names = {
        "down": ("experts", "mlp", "embed"),
        "router": ("embed", None),
        "up": ("experts", "embed", "mlp"),
    }
    flops, sent, _ = follow(mixture, params, names)
    assert flops[ModelPart.LAYER, ShardingKind.EXPERT] >= 2 * 4 * PRODUCT
    assert sent[Axis.EXPERT] == [2 * 4 * WIDTH_BYTES, 2 * 4 * WIDTH_BYTES]


def test_a_product_of_two_sharded_activations_is_attention():
    def attend(p, x):
        query, key, value = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in ("query", "key", "value"))
        scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", query, key))
        return jnp.einsum("bhts,bshk,hkd->btd", scores, value, p["output"])

    heads = array(WIDTH, 2, 4)
    params = {"key": heads, "output": array(2, 4, WIDTH), "query": heads, "value": heads}
    into = ("embed", "heads", "head_dim")
    names = {"key": into, "output": ("heads", "head_dim", "embed"), "query": into, "value": into}
    flops, sent, _ = follow(attend, params, names)
    scores = 2 * BATCH * TOKENS * TOKENS * 2 * 4
    assert flops == {
        (ModelPart.LAYER, ShardingKind.TENSOR): 4 * 2 * BATCH * TOKENS * WIDTH * 8,
        (ModelPart.LAYER, ShardingKind.ATTENTION): 2 * scores,
    }
    keys_and_values = 2 * BATCH * TOKENS * 8 * 4
    assert sent[Axis.SEQUENCE] == [keys_and_values, keys_and_values]


def test_the_boundary_between_layers_is_where_the_fewest_bytes_are_live():
    def program(p, x):
        x = x @ p["first"]
        for layer in ("up0", "up1"):
            mean = x.mean(-1, keepdims=True)
            x = x + jnp.tanh((x - mean) @ p[layer])
        return (x - x.mean()) @ p["last"]

    square = array(WIDTH, WIDTH)
    params = {"first": square, "last": square, "up0": square, "up1": square}
    places = {
        "first": LayerPosition(path="first"),
        "last": LayerPosition(path="last"),
        "up0": LayerPosition(path="up*", layer=0, copies=2),
        "up1": LayerPosition(path="up*", layer=1, copies=2),
    }
    flops, _, where = follow(program, params, dict.fromkeys(params, (None, None)), places)
    product = 2 * BATCH * TOKENS * WIDTH * WIDTH
    assert flops == {
        (ModelPart.EMBEDDING, ShardingKind.REPLICATED): product,
        (ModelPart.LAYER, ShardingKind.REPLICATED): 2 * product,
        (ModelPart.HEAD, ShardingKind.REPLICATED): product,
    }
    assert where.boundary_bytes == WIDTH_BYTES
    counts = collections.Counter(step.layer for step in where.positions)
    assert counts[0] == counts[1]  # each has its mean, its product, its addition
