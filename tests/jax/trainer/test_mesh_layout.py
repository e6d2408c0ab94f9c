"""A trainer over axes, on the eight devices of one host: the mesh of a replica has all of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import resilient_jax as rj
from resilient_jax.errors import CallerError
from resilient_jax.step import reduction
from resilient_jax.trainer.training_state import TrainingState
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module

WIDTH, STEPS = 16, 3


@pytest.fixture(autouse=True)
def forget(eight_devices):  # noqa: F811 - that fixture
    yield
    reduction.clear_caches()


def make_linear(first: str, second: str, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (first, second))
    return nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)


class Net(nnx.Module):
    """Two layers with named dims."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = make_linear("embed", "mlp", rngs)
        self.down = make_linear("mlp", "embed", rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def read(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).normal(size=(8, WIDTH)).astype(np.float32)


def loss(model: Net, rows: jax.Array) -> jax.Array:
    return jnp.mean((model(rows) - jnp.roll(rows, 1, axis=1)) ** 2)


def fit(parallelism: rj.Parallelism, **changes: Any) -> tuple[rj.FitResult, list[rj.StepReport]]:
    reports: list[rj.StepReport] = []
    options = {
        "model": Net,
        "loss_fn": loss,
        "numerics": rj.Numerics(clip_norm=0.1),
        "evaluation": rj.Evaluation(data=read, interval_steps=2, num_microbatches=2),
        **changes,
    }
    trainer = rj.Trainer(
        optimizer=optax.adamw(0.01),
        data=read,
        batch_size=24,
        microbatch_size=8,
        parallelism=parallelism,
        callbacks=[reports.append],
        **options,
    )
    return trainer.fit(STEPS), reports


def fit_both(axes: dict[str, int], **changes: Any) -> tuple[rj.FitResult, TrainingState]:
    """Train over axes and with whole replicas, compare all metrics; return the result and the last state over axes."""
    result, reports = fit(rj.Parallelism(axes=axes), **changes)
    _, expected = fit(rj.Parallelism(), **changes)
    for found, whole in zip(reports, expected, strict=True):
        assert found.metrics.keys() == whole.metrics.keys()
        for name, value in found.metrics.items():
            assert value == pytest.approx(whole.metrics[name], rel=1e-4), name
    return result, reports[-1].state


def count_elements(leaf: jax.Array) -> set[int]:
    """Return the elements of the shards of an array over the mesh of all replicas."""
    assert leaf.sharding.mesh.shape["replica"] == 1
    return {shard.data.size for shard in leaf.addressable_shards}


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}])
def test_replicas_over_axes_train_as_whole_ones_do(axes: dict[str, int]) -> None:
    result, state = fit_both(axes)
    for leaf in (state.variables.params["up"]["kernel"], state.opt_state[0].mu["up"]["kernel"]):
        assert count_elements(leaf) == {WIDTH * WIDTH // 8}
    with pytest.raises(CallerError, match=r"over axes, of which no host has all.*It was not saved"):
        _ = result.variables


def test_frozen_parameters_are_in_shards_without_gradients_or_optimizer_state() -> None:
    _, state = fit_both({"fsdp": 2, "tensor": 4}, wrt=nnx.All(nnx.Param, nnx.PathContains("down")))
    assert state.variables.params.keys() == state.opt_state[0].mu.keys() == {"down"}
    assert count_elements(state.variables.collections["Param"]["up"]["kernel"]) == {WIDTH * WIDTH // 8}
    assert count_elements(state.opt_state[0].mu["down"]["kernel"]) == {WIDTH * WIDTH // 8}


def test_training_over_axes_ends_early_where_whole_replicas_do() -> None:
    result, state = fit_both(
        {"fsdp": 8},
        evaluation=rj.Evaluation(data=read, interval_steps=1, num_microbatches=2),
        early_stopping=rj.EarlyStopping(patience=1, min_delta=10.0),
    )
    assert (result.step, result.stop_reason) == (
        2,
        f"early stop: eval_loss has not improved on {float(state.early_stopping.best_metric):.6g} in 1 evaluations",
    )
    assert int(state.early_stopping.patience_count) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": {}}, r"found axes=\{\}, expected positive sizes of fsdp, expert, tensor"),
        ({"axes": {"data": 2}}, r"found axes=\{'data': 2\}, expected positive sizes"),
        ({"axes": {"fsdp": 0}}, r"found axes=\{'fsdp': 0\}, expected positive sizes"),
        (
            {"axes": {"fsdp": 2}, "state": "sharded"},
            r"with replica_shape, state or pipeline, expected axes alone",
        ),
    ],
)
def test_wrong_axes_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(CallerError, match=message):
        rj.Parallelism(**changes)


def test_axes_that_do_not_fit_the_devices_or_the_model_are_refused() -> None:
    with pytest.raises(
        CallerError, match=r"found axes \{'fsdp': 3\} for hosts of 8 devices, expected .*: 8, 16"
    ):
        fit(rj.Parallelism(axes={"fsdp": 3}))
    with pytest.raises(CallerError, match=r"found no array in the state that expert 8 shards"):
        fit(rj.Parallelism(axes={"expert": 8}))
