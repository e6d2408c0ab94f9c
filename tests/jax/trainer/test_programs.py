"""The programs of a step compared with plain arithmetic, and their errors."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import CallerError, StateError
from resilient_jax.sharding.placements import ReplicatedPlacement
from resilient_jax.step.random_keys import KEY_NAMES, make_microbatch_id
from resilient_jax.trainer.loss_function import adapt_loss
from resilient_jax.trainer.model_adapters import adapt_model
from resilient_jax.trainer.numerics import Numerics
from resilient_jax.trainer.train_step import (
    Recipe,
    TrainStep,
    check_optimizer,
    make_zeros,
)

MICROBATCHES, ROWS = 4, 6
BATCHES = [
    {"x": x.astype(np.float32), "y": x.sum(1, keepdims=True).astype(np.float32)}
    for x in np.random.default_rng(0).normal(size=(MICROBATCHES, ROWS, 3))
]
EXAMPLE = jax.eval_shape(lambda tree: tree, BATCHES[0])


def linear(key):
    return {"w": jax.random.normal(key, (3, 1)), "b": jnp.zeros(1)}


def squared(params, batch):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}


def build(model=linear, loss=squared, optimizer=None, **numerics):
    recipe = Recipe(
        model=adapt_model(model),
        optimizer=optimizer or optax.adam(0.1),
        loss_fn=adapt_loss(loss),
        num_microbatches=MICROBATCHES,
        seed=0,
        numerics=Numerics(**numerics),
        early_stopping=(),
    )
    return TrainStep(recipe, EXAMPLE)


def test_an_update_is_described_by_what_it_computes():
    found = build().update_description
    assert build().update_description.digest == found.digest
    assert build(optimizer=optax.adam(0.2)).update_description.digest != found.digest
    assert build(clip_norm=1.0).update_description.digest != found.digest


def run_step(programs, state, batches=BATCHES, step=0):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    here = NamedSharding(mesh, P())
    state, total = jax.device_put(state, here), make_zeros(programs.abstract_sums, ReplicatedPlacement(mesh))
    for index, batch in enumerate(batches):
        placed = jax.device_put(batch, NamedSharding(mesh, P("data")))
        microbatch_id = make_microbatch_id(step, index)
        found = programs.compute(
            state.variables, placed, microbatch_id, placement=ReplicatedPlacement(mesh.abstract_mesh)
        )
        total = jax.tree.map(jnp.add, total, found)
    summary, metrics = programs.summarize(total)
    placement = ReplicatedPlacement(mesh.abstract_mesh)
    # *update* donates its argument, and the tests use the state again.
    copy = jax.tree.map(jnp.copy, state)
    after = programs.update(copy, (total.gradients, total.collections), summary, placement=placement)
    return total, after, metrics


def test_a_step_is_the_ordinary_step_on_the_full_batch():
    programs, optimizer = build(clip_norm=0.5), optax.adam(0.1)
    state = programs.init()
    whole = {name: np.concatenate([batch[name] for batch in BATCHES]) for name in ("x", "y")}
    params = state.variables.params
    (loss, aux), gradients = jax.value_and_grad(squared, has_aux=True)(params, whole)
    norm = float(optax.tree.norm(gradients))
    clipped = jax.tree.map(lambda g: g * min(1.0, 0.5 / norm), gradients)
    updates, _ = optimizer.update(clipped, optimizer.init(params), params)
    expected = optax.apply_updates(params, updates)
    _, after, metrics = run_step(programs, state)
    # Another order of addition: equal within a few roundings of float32.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), after.variables.params, expected)
    found = {name: float(value) for name, value in metrics.items()}
    assert found == pytest.approx(
        {"loss": float(loss), "mae": float(aux["mae"]), "grad_norm": norm}, rel=1e-5
    )
    assert int(after.step) == 1


def test_the_second_step_compiles_nothing():
    programs: Any = build()
    state = programs.init()
    for step in range(3):
        _, state, _ = run_step(programs, state, step=step)
    assert programs.compute._cache_size() == 1
    assert programs.summarize._cache_size() == 1
    assert programs.update._cache_size() == 1


def test_remat_changes_no_bit():
    results = [run_step(build(remat=remat), build().init())[1] for remat in (False, True)]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *results))


def test_a_narrow_compute_dtype_leaves_parameters_and_sums_in_float32():
    seen = []

    def loss(params, batch):
        seen.append(params["w"].dtype)
        return squared(params, batch)

    total, after, _ = run_step(build(loss=loss, compute_dtype=jnp.bfloat16), build().init())
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves((total, after.variables))} == {jnp.dtype(jnp.float32)}


def test_gradients_of_narrow_parameters_are_summed_in_float32():
    def narrow(key):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), linear(key))

    programs = build(model=narrow)
    total, after, _ = run_step(programs, programs.init())
    assert {leaf.dtype for leaf in jax.tree.leaves(total)} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(after.variables)} == {jnp.dtype(jnp.bfloat16)}


def spoil(*indexes):
    return [
        {**batch, "x": batch["x"] * (np.nan if i in indexes else 1)}.copy() for i, batch in enumerate(BATCHES)
    ]


@pytest.mark.parametrize("policy", ["stop", "skip", "warn"])
def test_a_non_finite_microbatch_is_marked(policy):
    programs = build(non_finite=policy)
    total, _, _ = run_step(programs, programs.init(), spoil(1, 3))
    assert np.asarray(total.non_finite).tolist() == [0, 1, 0, 1]


def test_a_skipped_microbatch_leaves_the_mean_of_the_others():
    programs = build(non_finite="skip")
    _, after, metrics = run_step(programs, programs.init(), spoil(1, 3))
    others = {name: np.concatenate([BATCHES[i][name] for i in (0, 2)]) for name in ("x", "y")}
    loss, _ = squared(programs.init().variables.params, others)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["skipped"]) == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.variables))


def test_new_batch_stats_are_the_mean_over_microbatches_that_each_update_the_committed_ones():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, momentum=0.0, rngs=rngs)

        def __call__(self, x):
            return self.norm(x).sum(1, keepdims=True)

    programs = build(model=Net, loss=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))
    _, after, _ = run_step(programs, programs.init())
    expected = np.mean([batch["x"].mean(0) for batch in BATCHES], axis=0)
    np.testing.assert_allclose(after.variables.batch_stats["norm"]["mean"], expected, rtol=1e-4, atol=1e-6)


def test_a_loss_may_take_a_key_that_depends_on_seed_step_and_index_alone():
    def loss(params, batch, key):
        return squared(params, batch)[0], {"drawn": jax.random.uniform(key)}

    programs = build(loss=loss)
    state = programs.init()
    one, same, other = (float(run_step(programs, state, step=step)[2]["drawn"]) for step in (5, 5, 6))
    assert one == same != other


def draw(params, batch, key):
    return squared(params, batch)[0], {"drawn": jax.random.uniform(key)}


LOSSES_WITH_KEYS = {
    "key": lambda p, b, key: draw(p, b, key),
    "rng": lambda p, b, rng: draw(p, b, rng),
    "dropout_rng": lambda p, b, *, dropout_rng=None: draw(p, b, dropout_rng),
    "rngs": lambda p, b, rngs: draw(p, b, rngs.dropout()),
}


@pytest.mark.parametrize("name", KEY_NAMES)
def test_the_key_of_a_loss_may_have_each_documented_name(name):
    def draw_once(**numerics):
        programs = build(loss=LOSSES_WITH_KEYS[name], **numerics)
        return float(run_step(programs, programs.init(), step=5)[2]["drawn"])

    assert draw_once() == draw_once(remat=True) > 0


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda p, x, y: 0.0, "found a function of (p, x, y), expected loss_fn(model, batch)"),
        (lambda p: 0.0, "found a function of (p), expected loss_fn(model, batch)"),
        (lambda p, rng, b: 0.0, "found a function of (p, rng, b), expected loss_fn(model, batch)"),
        (
            lambda p, b, prng_key: 0.0,
            "is the third, and is called key, rng, dropout_rng, rngs: the first three get",
        ),
        (lambda p, b, key, rngs: 0.0, "found the parameters key and rngs, expected one of them"),
    ],
    ids=["unpacked", "no batch", "the key second", "another name", "two keys"],
)
def test_a_loss_that_cannot_be_called_is_refused_before_it_is(loss, said):
    with pytest.raises(CallerError, match=re.escape(said)):
        adapt_loss(loss)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda p, b: (b["x"] @ p["w"])[:, 0], r"found an array of shape \(6,\), expected a scalar"),
        (lambda p, b: None, "found a NoneType, expected a scalar"),
        (lambda p, b: jnp.int32(1), "dtype int32"),
        (lambda p, b: (squared(p, b)[0], b["x"]), r"found an array of shape \(6, 3\) as the second result"),
        (
            lambda p, b: (squared(p, b)[0], nnx.MultiMetric(loss=nnx.metrics.Average("loss"))),
            "found a MultiMetric as the second result, .* such as nnx.MultiMetric and clu.metrics, are not needed",
        ),
        (
            lambda p, b: (squared(p, b)[0], {"x": b["x"]}),
            r"found an array of shape \(6, 3\) as the metric 'x'",
        ),
        (lambda p, b: (squared(p, b)[0], {"loss": 1.0}), "found the metric 'loss', expected a name other"),
        (lambda p, b: (squared(p, b)[0], {"eval_x": 1.0}), "without eval_ in front"),
    ],
    ids=[
        "an array",
        "nothing",
        "an integer",
        "no dict",
        "metric objects",
        "array metric",
        "our name",
        "our prefix",
    ],
)
def test_a_loss_that_returns_something_else_is_refused(loss, said):
    with pytest.raises(CallerError, match=said):
        build(loss=loss)


def test_an_exception_of_the_loss_passes_unchanged():
    error = ZeroDivisionError("mine")

    def loss(params, batch):
        raise error

    with pytest.raises(ZeroDivisionError) as found:
        build(loss=loss)
    assert found.value is error


def test_an_optimizer_whose_state_changes_its_dtype_is_refused():
    def update(updates, state, params=None):
        return updates, jnp.asarray(state) + 0.5

    drifting = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    with pytest.raises(CallerError, match=r"optimizer: .*leaf \.opt_state is int32\[\].*float32\[\]"):
        build(optimizer=drifting)


def test_an_object_that_is_no_optimizer_is_refused():
    with pytest.raises(CallerError, match=r"found 0\.1 \(float\), expected an optax\.GradientTransformation"):
        check_optimizer(0.1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clip_norm": 0.0}, "clip_norm: found 0.0"),
        ({"compute_dtype": jnp.int8}, "compute_dtype: found .*int8"),
        ({"non_finite": "ignore"}, "found 'ignore', expected one of stop, skip, warn"),
    ],
    ids=["clip", "dtype", "policy"],
)
def test_invalid_numerics_are_refused(wrong, said):
    with pytest.raises(CallerError, match=said):
        Numerics(**wrong)


def test_a_state_is_strongly_typed_before_and_after_each_step():
    """A checkpoint names no weak types, and programs for other hosts are compiled by dtypes alone."""

    def update(updates, state, params=None):
        return updates, {"scale": jnp.where(state["count"] > 0, 1.0, 0.5), "count": state["count"] + 1}

    weak = optax.GradientTransformation(lambda params: {"scale": jnp.asarray(1.0), "count": 0}, update)
    programs = build(optimizer=optax.chain(weak, optax.sgd(0.1)))
    state = programs.init()
    _, after, _ = run_step(programs, state)
    for tree in (programs.abstract_state, state, after):
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(tree))
    wide = optax.GradientTransformation(lambda params: {"scale": np.ones(2)}, update)
    with pytest.raises(StateError, match=r"leaf \.opt_state\['scale'\] is a NumPy array of float64\[2\]"):
        build(optimizer=wide)
