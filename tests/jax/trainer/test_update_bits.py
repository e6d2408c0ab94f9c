"""The next state has the same bits wherever it is computed: replicated or sharded, in ranges, on any devices."""

import functools
import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from resilient_jax.sharding.placements import ParameterPlacement, ReplicatedPlacement, fully_sharded
from resilient_jax.sharding.raveled_array import RaveledArray, compute_padded_size, is_raveled, ravel_leaves
from resilient_jax.trainer.loss_function import adapt_loss
from resilient_jax.trainer.model_adapters import adapt_model
from resilient_jax.trainer.numerics import Numerics
from resilient_jax.trainer.train_step import Recipe, TrainStep
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.full_only import full_but

SHAPES = {
    "two": {"w": (8, 16), "v": (16, 8)},
    "many": {"w": (8, 16), "v": (16, 8), "bias": (9,), "odd": (7, 11)},
}
"""XLA simplified the update of the first model in two ways, and that of the second in one."""
STEPS = 4
OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3, weight_decay=0.1),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9, centered=True),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
}
"""The last one has means over dims, which no device computes alone where they are sharded."""


def make_params(shapes, key):
    draw = np.random.default_rng(0).standard_normal
    return {name: jnp.asarray(draw(shape), jnp.float32) for name, shape in shapes.items()}


def loss_of(params, batch):
    error = batch["x"] @ params["w"] @ params["v"] - batch["y"]
    others = [jnp.sum(params[name]) for name in params if name not in "wv"]
    return sum(others, jnp.mean(error**2))


def weighted_loss_of(params, batch):
    return rj.WeightedMean(loss_of(params, batch), jnp.sum(batch["x"] > 0))


LOSSES = {"scalar": loss_of, "weighted": weighted_loss_of}


def build(model, optimizer, num_microbatches, clip_norm, loss="scalar", *, is_mesh_free=False):
    recipe = Recipe(
        model=adapt_model(functools.partial(make_params, SHAPES[model])),
        optimizer=optimizer,
        loss_fn=adapt_loss(LOSSES[loss]),
        num_microbatches=num_microbatches,
        seed=0,
        numerics=Numerics(clip_norm=clip_norm),
        early_stopping=(),
        is_mesh_free=is_mesh_free,
    )
    return TrainStep(recipe, {name: jax.ShapeDtypeStruct((2, 8), jnp.float32) for name in "xy"})


def make_sums(programs, step):
    """Return the sums of a step, on the host."""
    draw = np.random.default_rng((1, step)).standard_normal
    sums = jax.tree.map(
        lambda leaf: (
            (0.3 * draw(leaf.shape)).astype(leaf.dtype)
            if jnp.issubdtype(leaf.dtype, jnp.inexact)
            else np.zeros(leaf.shape, leaf.dtype)
        ),
        programs.abstract_sums._replace(non_finite=np.zeros(programs.abstract_sums.non_finite.shape)),
    )
    if isinstance(sums.loss, rj.WeightedMean):
        sums = sums._replace(loss=rj.WeightedMean(sums.loss.total, np.float32(37 + 6 * step)))
    return sums


def place(tree, placement, raveled):
    """Return a tree of host arrays on the devices of a placement, some of them raveled."""

    def put(path, leaf):
        where = placement(jax.tree_util.keystr(path), leaf)
        if not is_raveled(leaf):
            return jax.device_put(leaf, where)
        padding = compute_padded_size(leaf.shape, placement.mesh.size) - leaf.size
        # What is in the padding is unspecified.
        vector = np.pad(leaf.vector, (0, padding), constant_values=np.nan if leaf.dtype == np.float32 else 7)
        return RaveledArray(jax.device_put(vector, where), leaf.shape)

    return jax.tree_util.tree_map_with_path(put, ravel_leaves(tree, raveled), is_leaf=is_raveled)


def train(programs, placement, raveled_state, raveled_sums):
    """Return a digest of the state after each step."""
    whole = ReplicatedPlacement(placement.mesh)
    state = place(jax.tree.map(np.asarray, programs.init()), placement, raveled_state)
    digests = []
    for step in range(STEPS):
        sums = make_sums(programs, step)
        summary, _ = programs.summarize(place(sums, whole, [False] * len(jax.tree.leaves(sums))))
        arguments = place(
            jax.tree.map(np.asarray, ((sums.gradients, sums.collections), summary)), placement, raveled_sums
        )
        state = programs.update(state, *arguments, placement=placement.with_abstract_mesh())
        found = hashlib.sha256()
        for leaf in jax.tree.leaves(state, is_leaf=is_raveled):
            value = np.asarray(leaf.vector)[: leaf.size] if is_raveled(leaf) else np.asarray(leaf)
            found.update(value.tobytes())
        digests.append(found.hexdigest())
    return digests


def list_layouts(programs, devices):
    """Yield (name, placement, which leaves of the state are raveled, which of the sums)."""
    raveled, no_state = programs.raveled_leaves, [False] * len(programs.raveled_leaves.state)
    no_sums = [False] * len(raveled.sums)
    for count in (1, 2, 3, 8):
        mesh = Mesh(np.array(devices[:count]).reshape(count, 1), ("host", "local"))
        yield f"replicated, {count}", ReplicatedPlacement(mesh), no_state, no_sums
        yield f"sharded, {count}", fully_sharded(mesh), raveled.state, raveled.sums
    for count in (2, 8):
        mesh = Mesh(np.array(devices[:count]).reshape(count, 1), ("fsdp", "tensor"))
        specs = tuple((f"['{one}']", SHAPES["two"][one], P("fsdp")) for one in ("w", "v"))
        yield f"a plan with fsdp {count}", ParameterPlacement(mesh, specs), no_state, no_sums


CASES = [
    *itertools.product(SHAPES, OPTIMIZERS, (6, 8), (None, 0.5), ("scalar",)),
    *itertools.product(SHAPES, OPTIMIZERS, (6,), (0.5,), ("weighted",)),
]
IN_MAKE_TEST = [
    ("two", "adam", 6, None, "scalar"),
    ("two", "lion", 6, 0.5, "scalar"),
    ("two", "adam", 6, 0.5, "weighted"),
]


@pytest.mark.parametrize(
    ("model", "name", "num_microbatches", "clip_norm", "loss"), full_but(CASES, IN_MAKE_TEST.__contains__)
)
def test_the_next_state_has_the_same_bits_in_each_layout(
    model,
    name,
    num_microbatches,
    clip_norm,
    loss,
    eight_devices,  # noqa: F811 - that fixture
):
    programs = build(model, OPTIMIZERS[name](), num_microbatches, clip_norm, loss)
    assert not programs.why_mesh_bound
    found = {
        layout: train(programs, placement, *raveled)
        for layout, placement, *raveled in list_layouts(programs, eight_devices)
    }
    expected = next(iter(found.values()))
    assert {layout for layout, digests in found.items() if digests != expected} == set()


def test_the_norm_of_a_gradient_with_a_weight_has_the_same_bits_on_each_mesh_of_a_plan(
    eight_devices,  # noqa: F811 - that fixture
):
    programs = build("two", OPTIMIZERS["adam"](), 6, 0.5, "weighted", is_mesh_free=True)
    sums, found = make_sums(programs, 1), set()
    for count in (1, 2, 4, 8):
        mesh = Mesh(np.array(eight_devices[:count]).reshape(count, 1), ("fsdp", "tensor"))
        specs = tuple((f"['{one}']", SHAPES["two"][one], P("fsdp")) for one in ("w", "v"))
        placed = place(sums, ParameterPlacement(mesh, specs), [False] * len(jax.tree.leaves(sums)))
        summary, metrics = programs.summarize(placed)
        found.add(tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((summary, metrics))))
    assert len(found) == 1
