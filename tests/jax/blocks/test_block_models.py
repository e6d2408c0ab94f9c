"""Blocks of models as the trainer has them, and on a mesh with tensor parallelism."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from resilient_jax.blocks.cut_model import cut_model
from resilient_jax.blocks.layer_marks import mark_layers
from resilient_jax.sharding.stage_sharding import (
    EXAMPLE_AXES,
    StageSharding,
    make_abstract_stage_mesh,
    make_stage_mesh,
)
from resilient_jax.trainer.model_adapters import Variables, adapt_model
from resilient_jax.trainer.train_step import cast_parameters
from tests.support.cut_variables import find_shared_weights, join_results, split_variables
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture for all tests of the module

ROWS, WIDTH, LAYERS = 8, 8, 3
BATCH = {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)}
KEY = jax.eval_shape(lambda: jax.random.key(0))


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.norm(self.up(x))))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(LAYERS)])
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False)(nn.Dense(4 * WIDTH)(x))
        return x + nn.Dense(WIDTH)(nn.relu(h))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        for _ in range(LAYERS):
            x = LinenLayer()(x)
        return nn.Dense(1)(x)


def nnx_loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def make_model(kind) -> tuple[Any, Variables]:
    """Return a loss of variables, and the variables."""
    is_nnx = kind == "nnx"
    adapter = adapt_model(NnxNet if is_nnx else LinenNet())

    def use(model, batch):
        return nnx_loss(mark_layers(model) if is_nnx else model, batch)

    def loss(variables, batch, key):
        value, after = adapter.apply(
            cast_parameters(variables, jnp.bfloat16), key, lambda model: use(model, batch), training=True
        )
        return value.astype(jnp.float32), after.collections

    init = jax.jit(lambda: adapter.init(jax.random.key(0), lambda model: use(model, BATCH)))
    return loss, init()


def is_parameter(path, leaf):
    return path.startswith("params/")


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_of_the_trainers_models_each_layer_has_its_parameters_and_makes_its_batch_statistics(kind):
    loss, variables = make_model(kind)
    cut = cut_model(loss, variables, BATCH, KEY, is_trained=is_parameter)
    assert [block.kind for block in cut.blocks] == [0, 1, 1, 1, 2]
    assert find_shared_weights(cut) == {}
    weights, results = split_variables(cut, variables), []
    x: tuple[Any, ...] = ()
    for block in cut.blocks:
        x, made, _ = block.programs.forward(weights[block.number], x, BATCH, jax.random.key(0))
        assert len(made) == (2 if 0 < block.number <= LAYERS else 0), "mean and variance"
        results.append(made)
    expected, after = jax.jit(loss)(variables, BATCH, jax.random.key(0))
    assert float(x[0]) == pytest.approx(float(expected), rel=0.02)
    found = join_results(cut, results)
    assert jax.tree.structure(found) == jax.tree.structure(after)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.02)


def run_sharded(cut, weights, batch, crossing):
    """Return what the last block returns, and the gradients by block; check how what crosses cuts is sharded."""
    x: tuple[Any, ...] = ()
    residuals, gradients = [], {}
    for block, own in zip(cut.blocks, weights, strict=True):
        x, _, kept = block.programs.forward(own, x, batch, jax.random.key(0))
        assert all(array.sharding.is_equivalent_to(crossing, array.ndim) for array in x if array.ndim)
        residuals.append(kept)
    g = cut.loss_gradient
    for block in reversed(cut.blocks):
        number = block.number
        gradients[number], g = block.programs.backward(weights[number], residuals[number], g)
        assert all(array.sharding.is_equivalent_to(crossing, array.ndim) for array in g)
    return x, gradients


SPECS = {
    "tensor": {"up/kernel": P(None, "tensor"), "down/kernel": P("tensor")},
    "fsdp": {"up/kernel": P("fsdp"), "down/kernel": P("fsdp")},
}


@pytest.mark.parametrize("axis", SPECS)
def test_a_block_computes_over_all_devices_of_a_host(axis, eight_devices):  # noqa: F811
    loss, variables = make_model("nnx")
    cut = cut_model(loss, variables, BATCH, KEY, is_trained=is_parameter)
    specs = {
        weight.name: spec
        for weight in cut.trace.table.weights
        for end, spec in SPECS[axis].items()
        if weight.name.endswith(end)
    }
    rows = jax.tree.leaves(BATCH)[0].shape[0]
    abstract = StageSharding(mesh=make_abstract_stage_mesh({axis: 2}), weight_specs=specs, num_examples=rows)
    cut = cut.with_sharding(abstract)
    here = abstract.with_mesh(make_stage_mesh(abstract.mesh, eight_devices[:2]))
    weights = [
        {name: jax.device_put(leaf, here.place(here.find_weight_spec(name))) for name, leaf in own.items()}
        for own in split_variables(cut, variables)
    ]
    batch = here.place_values(BATCH)
    crossing = here.shard(P(EXAMPLE_AXES) if axis == "fsdp" else P())
    run_sharded(cut, weights, batch, crossing)
    (value,), gradients = run_sharded(cut, weights, batch, crossing)
    for number, found in gradients.items():
        for name, gradient in found.items():
            assert gradient.sharding.is_equivalent_to(weights[number][name].sharding, gradient.ndim), name
    expected, _ = jax.jit(loss)(variables, BATCH, jax.random.key(0))
    assert float(value) == pytest.approx(float(expected), rel=0.02)
    compiled = [getattr(kind.backward_input, "_cache_size")() for kind in cut.kinds]  # noqa: B009
    assert compiled == [1, 1, 1]
