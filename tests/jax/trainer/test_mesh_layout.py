"""A trainer over axes, on the eight devices of one host: the mesh of a replica has all of them."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis
from resilient_jax.step import reduction
from resilient_jax.trainer.step_programs import find_likely_replicas
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.scripts.experts import Experts, compute_experts_loss

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
        "data": read,
        "batch_size": 24,
        "microbatch_size": 8,
        "optimizer": optax.adamw(0.01),
        "loss_fn": loss,
        "numerics": rj.Numerics(clip_norm=0.1),
        "evaluation": rj.Evaluation(data=read, interval_steps=2, num_microbatches=2),
        **changes,
    }
    trainer = rj.Trainer(
        parallelism=parallelism,
        callbacks=[reports.append],
        **options,
    )
    return trainer.fit(STEPS), reports


def fit_both(
    axes: dict[str, int], *, rules: rj.LogicalAxisRules | None = None, precision: float = 1e-4, **changes: Any
) -> tuple[rj.FitResult, Any]:
    """Train over axes and with whole replicas, compare all metrics; return the result and the last state over axes."""
    result, reports = fit(rj.Parallelism(axes=axes, logical_axis_rules=rules), **changes)
    _, expected = fit(rj.Parallelism(), **changes)
    for found, whole in zip(reports, expected, strict=True):
        assert found.metrics.keys() == whole.metrics.keys()
        for name, value in found.metrics.items():
            assert value == pytest.approx(whole.metrics[name], rel=precision), name
    return result, reports[-1].state


def count_elements(leaf: Any) -> set[int]:
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


class NamedLinen(nn.Module):
    """The same in Linen, with dropout and batch statistics."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        x = nn.Dense(WIDTH, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")), name="up")(x)
        x = jnp.tanh(nn.BatchNorm(use_running_average=False)(x))
        x = nn.Dropout(0.2, deterministic=False)(x)
        return nn.Dense(WIDTH, kernel_init=nn.with_logical_partitioning(init, ("mlp", "embed")), name="down")(
            x
        )


class NoisyNet(Net):
    """With dropout and batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(jnp.tanh(self.norm(self.up(x)))))


EVALUATE_EMA = rj.Evaluation(data=read, interval_steps=2, num_microbatches=2, use_ema=True)


def test_dropout_batch_statistics_and_averages_are_those_of_whole_replicas() -> None:
    _, state = fit_both(
        {"fsdp": 2, "tensor": 4},
        model=NoisyNet,
        numerics=rj.Numerics(clip_norm=0.1, ema_decay=0.5, remat=True),
        evaluation=EVALUATE_EMA,
    )
    assert count_elements(state.opt_state.ema_params["up"]["kernel"]) == {WIDTH * WIDTH // 8}
    assert jnp.all(state.variables.batch_stats["norm"]["mean"] != 0)


def weighted_loss(model: Net, rows: jax.Array) -> tuple[rj.WeightedMean, dict[str, Any]]:
    losses = jnp.mean((model(rows) - jnp.roll(rows, 1, axis=1)) ** 2, axis=1)
    mask = (rows[:, 0] > 0).astype(jnp.float32)
    return rj.WeightedMean(jnp.sum(losses * mask), jnp.sum(mask)), {"largest": jnp.max(losses)}


def read_bad(step: int, index: int) -> np.ndarray:
    """Return a microbatch, of which one in the second step has no number as its loss."""
    return read(step, index) * np.float32(np.nan if (step, index) == (1, 1) else 1)


def test_mixed_precision_weights_and_skipped_microbatches_are_those_of_whole_replicas() -> None:
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.01, 0.0, 10))
    fit_both(
        {"fsdp": 8},
        precision=0.02,
        data=read_bad,
        loss_fn=weighted_loss,
        optimizer=optax.chain(optax.clip_by_global_norm(0.1), optimizer),
        numerics=rj.Numerics(compute_dtype=jnp.bfloat16, non_finite="skip"),
    )


def test_a_linen_model_is_sharded_by_its_names_and_trains_as_whole_replicas_do() -> None:
    _, state = fit_both(
        {"fsdp": 2, "tensor": 4},
        model=NamedLinen(),
        numerics=rj.Numerics(clip_norm=0.1, ema_decay=0.5),
        evaluation=EVALUATE_EMA,
    )
    for params in (state.variables.params, state.opt_state.ema_params):
        specs = {name: params[name]["kernel"].unbox().sharding.spec for name in ("up", "down")}
        assert specs == {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}


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


def read_many(step: int, index: int) -> np.ndarray:
    return np.concatenate([read(step, 8 * index + part) for part in range(8)])


@pytest.mark.parametrize("axes", [{"expert": 4, "fsdp": 2}, {"expert": 4, "tensor": 2}])
def test_experts_are_on_the_devices_of_their_axis_and_train_as_whole_ones_do(axes: dict[str, int]) -> None:
    _, state = fit_both(
        axes,
        model=lambda rngs: Experts(WIDTH, 2 * WIDTH, experts=8, rngs=rngs),
        loss_fn=compute_experts_loss,
        data=read_many,
        evaluation=rj.Evaluation(data=read_many, interval_steps=2, num_microbatches=2),
        microbatch_size=64,
        batch_size=192,
    )
    for leaf in (state.variables.params["up"], state.opt_state[0].mu["up"]):
        assert count_elements(leaf) == {WIDTH * 2 * WIDTH}
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {2}, "two experts"


def make_plain(key: jax.Array) -> dict[str, jax.Array]:
    return {name: jax.random.normal(key, (WIDTH, WIDTH)) / 4 for name in ("up", "down")}


def plain_loss(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(rows @ params["up"]) @ params["down"] - rows) ** 2)


NAMES = [("up", ("model", "hidden")), ("down", ("hidden", "model"))]
OWN_NAMES = rj.LogicalAxisRules(names_by_path=NAMES, mesh_axes={"model": Axis.FSDP, "hidden": Axis.TENSOR})
PLAIN = {"model": make_plain, "loss_fn": plain_loss}


def test_rules_name_the_dims_of_a_model_without_metadata_and_their_axes() -> None:
    _, state = fit_both({"fsdp": 2, "tensor": 4}, rules=OWN_NAMES, **PLAIN)
    for params in (state.variables.params, state.opt_state[0].nu):
        specs = {name: leaf.sharding.spec for name, leaf in params.items()}
        assert specs == {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}


@pytest.mark.parametrize(
    ("rules", "axes", "message"),
    [
        (
            rj.LogicalAxisRules(names_by_path=NAMES),
            {"fsdp": 8},
            r"down: found the logical name 'hidden', expected one of embed, .*mesh_axes=",
        ),
        (
            dataclasses.replace(OWN_NAMES, mesh_axes={"model": Axis.FSDP, "hidden": Axis.SEQUENCE}),
            {"fsdp": 8},
            r"found the logical name 'hidden' of down for the axis sequence, expected one of fsdp, expert, tensor",
        ),
        (
            dataclasses.replace(OWN_NAMES, max_shards={"hidden": 2}),
            {"fsdp": 2, "tensor": 4},
            r"found axes with tensor 4, expected a size that divides the dims .*: hidden = 2\. Choose",
        ),
        (None, {"tensor": 8}, r"found no array in the state that tensor 8 shards"),
    ],
    ids=["unknown", "of another axis", "indivisible", "none"],
)
def test_names_that_no_axis_takes_are_refused(
    rules: rj.LogicalAxisRules | None, axes: dict[str, int], message: str
) -> None:
    with pytest.raises(CallerError, match=message):
        fit(rj.Parallelism(axes=axes, logical_axis_rules=rules), **PLAIN)


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
        (
            {"logical_axis_rules": rj.LogicalAxisRules()},
            r"found logical_axis_rules without axes, expected both",
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


def test_a_host_that_has_lost_devices_compiles_nothing_for_replicas_of_whole_hosts() -> None:
    devices = jax.devices()
    by_host = tuple(map(tuple, (devices[:2], devices[2:4], devices[4:5])))
    shape = rj.ReplicaShape(hosts=2, axes=(("fsdp", 4),))
    for host, has_one in ((0, True), (1, True), (2, False)):
        live: Any = SimpleNamespace(devices_by_host=by_host, host_index=host)
        found = find_likely_replicas(live, shape)
        assert (found is not None) is has_one
        assert found is None or found.mesh.devices.size == 4
    spare: Any = SimpleNamespace(devices_by_host=(*by_host[:2], tuple(devices[5:7])), host_index=2)
    found = find_likely_replicas(spare, shape)
    assert found is not None, "left over among these, it is in a replica of others"
