"""A rehearsed step: what the train function meets, and what it must not reach."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.jax_runtime.failures import RehearsalFailed
from resilient_jax.protocol.generation import Generation, GenerationPhase, Member, Membership, ResumedState
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import JobHistory
from resilient_jax.protocol.worker_messages import TakeSeat
from resilient_jax.trainer import trainer
from resilient_jax.trainer.pipelined_steps import PipelinedSteps
from resilient_jax.worker.committed_state import KeptArrays
from resilient_jax.worker.mail_opening import make_local_opener
from resilient_jax.worker.rehearsal import rehearse
from resilient_jax.worker.standalone import StandaloneControl
from resilient_jax.worker.training_control import GenerationEnded
from resilient_jax.worker.world import World

STEP = 7
ORDER = TakeSeat(
    generation=Generation(
        number=GenerationNumber(4),
        phase=GenerationPhase.ACTIVE,
        state=ResumedState(step=STEP),
        membership=Membership(
            newcomers=(Member(host=HostName("b"), incarnation=Incarnation(2), seat=Seat(4)),)
        ),
    ),
    host=HostName("b"),
    seat=Seat(4),
    relay_address="",
)


def run(train: Callable[[World], None], kept: list[KeptArrays] | None = None) -> bool:
    kept = [] if kept is None else kept
    return rehearse(train, ORDER, StandaloneControl("b"), lambda: None, make_local_opener(), kept)


def make_state() -> dict[str, jax.Array]:
    return {"w": jnp.zeros(3)}


def test_the_train_function_is_unwound_at_its_first_commit():
    seen: list[object] = []

    def train(world: World) -> None:
        seen.append((world.is_rehearsal, world.is_fresh, world.host))
        state = world.restore_or_init(make_state)
        loss_fn = world.value_and_grad(
            lambda params, batch: jnp.mean((params["w"] - batch) ** 2), batch_at, 8
        )
        for step in world.steps(100):
            seen.append(step)
            _, gradients = loss_fn(state)
            world.commit(gradients)
            seen.append("after the commit")
        seen.append("after the loop")

    def batch_at(step: int, index: int) -> np.ndarray:
        seen.append(f"reads {index}")
        return np.ones(3, np.float32)

    assert run(train)
    assert seen[:2] == [(True, False, "b"), STEP]
    assert len({word for word in seen[2:] if str(word).startswith("reads")}) == 2, "of eight"
    assert not [word for word in seen if str(word).startswith("after")]


def make_rich_state() -> dict[str, Any]:
    ran.append("made")
    return {
        "w": jnp.tanh(jnp.ones((3, 2), jnp.bfloat16)),
        "count": jnp.zeros((), jnp.int32),
        "key": jax.random.key(3),
        "name": "adam",
    }


ran: list[str] = []
"""Of how `make_rich_state` was called: also when it is traced."""


def test_its_state_has_the_shapes_of_the_initial_one_and_makes_no_array_by_the_scripts_function():
    ran.clear()
    seen: list[dict] = []

    def train(world: World) -> None:
        seen.append(world.restore_or_init(make_rich_state))
        for _ in world.steps(STEP + 1):
            world.commit(seen[-1])

    assert run(train)
    (state,) = seen
    made = make_rich_state()
    assert jax.tree.map(jnp.shape, {**state, "name": 0}) == jax.tree.map(jnp.shape, {**made, "name": 0})
    assert state["w"].dtype == made["w"].dtype
    assert state["name"] == "adam"
    assert jax.random.key_impl(state["key"]) == jax.random.key_impl(made["key"])
    assert (np.asarray(state["w"], np.float32) > 0).all()
    assert not np.array_equal(state["w"], made["w"])
    assert ran == ["made"] * 2, "once for the shapes, once by this test"


def test_a_script_that_refuses_that_state_rehearses_with_the_initial_one():
    tries: list[float] = []

    def train(world: World) -> None:
        state = world.restore_or_init(make_state)
        tries.append(float(state["w"][0]))
        if state["w"].any():
            raise FloatingPointError("expected zeros")
        for _ in world.steps(STEP + 1):
            world.commit(state)

    assert run(train)
    assert len(tries) == 2
    assert tries[1] == 0


@pytest.mark.parametrize("num_steps", [STEP, STEP + 5])
def test_what_follows_the_loop_is_never_reached(num_steps: int):
    reached: list[str] = []

    def train(world: World) -> None:
        world.restore_or_init(make_state)
        for _ in world.steps(num_steps):
            pass  # a step without a commit
        reached.append("the final checkpoint")

    assert not run(train)
    assert reached == []


def test_a_mesh_over_all_hosts_ends_it_and_an_error_is_the_callers():
    def make_mesh(world: World) -> None:
        world.mesh("data")

    def fail(world: World) -> None:
        raise ZeroDivisionError

    assert not run(make_mesh)
    with pytest.raises(ZeroDivisionError):
        run(fail)


def test_another_order_ends_it():
    class Ordered(StandaloneControl):
        def raise_if_ended(self) -> None:
            raise GenerationEnded

    def train(world: World) -> None:
        world.restore_or_init(make_state)

    with pytest.raises(GenerationEnded):
        rehearse(train, ORDER, Ordered("b"), lambda: None, make_local_opener(), [])


def test_a_collective_is_loaded_and_gives_zeros_of_its_shape_and_sharding():
    mesh = Mesh(np.array(jax.devices()), ("d",))
    split = NamedSharding(mesh, P("d"))
    values = jax.device_put(np.ones((len(jax.devices()), 2), np.float32), split)
    program = jax.jit(
        lambda x: (x + 1, x.sum().astype(jnp.int32)), out_shardings=(split, NamedSharding(mesh, P()))
    )
    with collective_thread.rehearse():
        many, one = collective_thread.run(program, values)
        with pytest.raises(RehearsalFailed):
            collective_thread.run(lambda x: x, values)
    assert (many.shape, many.dtype, many.sharding) == (values.shape, np.float32, split)
    assert not np.asarray(many).any()
    assert (one.shape, one.dtype, int(one)) == ((), np.int32, 0)
    assert int(collective_thread.run(program, values)[1]) == values.size, "afterwards programs run"


@pytest.mark.parametrize("num_steps", [STEP, STEP + 1], ids=["past its end", "in its last step"])
def test_a_trainer_saves_logs_and_reports_nothing(
    num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
    reports: list[object] = []
    rehearsed: list[bool] = []
    monkeypatch.setattr(trainer, "run", lambda train, **_: rehearsed.append(run(train)))
    with pytest.raises(SystemExit):  # there is no result
        rj.Trainer(
            model=lambda key: {"w": jnp.zeros((1, 1))},
            optimizer=optax.sgd(0.1),
            loss_fn=lambda params, batch: jnp.mean((batch @ params["w"] - 1) ** 2),
            data=data,
            batch_size=8,
            microbatch_size=2,
            evaluation=rj.Evaluation(data=data, interval_steps=1),
            checkpoints=rj.Checkpoints(directory=tmp_path / "checkpoints", interval_steps=1),
            callbacks=[reports.append],
            log_directory=tmp_path / "log",
        ).fit(num_steps=num_steps)
    assert rehearsed == [num_steps > STEP]
    assert reports == []
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size] == []


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = x + nn.Dense(1, name=f"layer_{number}")(x)
        return x


def test_a_loop_of_ones_own_meets_the_metrics_of_a_pipeline_by_their_names(monkeypatch: pytest.MonkeyPatch):
    data = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
    rehearsed: list[bool] = []
    seen: list[float] = []
    kept: list[KeptArrays] = []
    monkeypatch.setattr(trainer, "run", lambda train, **_: rehearsed.append(run(train, kept)))

    def loss_fn(model: Any, batch: Any) -> Any:
        loss = jnp.mean((model(batch) - 1) ** 2)
        return loss, {"twice": 2 * loss}

    def train(world: World, train_step: Any) -> None:
        state = train_step.restore_or_init()
        seen.append(train_step.evaluate(state)["eval_loss"])
        for step in world.steps(STEP + 1):
            state, metrics = train_step(state, step)
            seen.extend((metrics["loss"], metrics["twice"], metrics["grad_norm"]))
            world.commit(state, **metrics)

    rj.Trainer(
        model=Net(),
        optimizer=optax.sgd(0.1),
        loss_fn=loss_fn,
        data=data,
        batch_size=8,
        microbatch_size=2,
        evaluation=rj.Evaluation(data=data, interval_steps=1),
        parallelism=rj.Parallelism(pipeline=rj.Pipeline(num_stages=2)),
    ).run(train)
    assert rehearsed == [True]
    assert seen == [0.0] * 4
    (steps,) = kept
    assert isinstance(steps, PipelinedSteps)
    worker = steps._worker
    assert worker is not None
    found = (worker._sums.sharding, worker._runner.sharding)
    assert all(isinstance(sharding.mesh, AbstractMesh) for sharding in found), "a mesh keeps its devices"


EARLIER = (tuple(map(HostName, "dcba")), tuple(map(HostName, "abc")))


@pytest.mark.parametrize("kept", ["bca", "bdc", ""])
def test_a_stage_that_is_kept_for_the_host_that_joins_stays_where_it_is(kept: str):
    seated = tuple(
        Member(host=HostName(name), incarnation=Incarnation(1), seat=Seat(seat))
        for seat, name in enumerate("ac")
    )
    generation = change_fields(
        ORDER.generation,
        members=seated,
        stage_hosts=tuple(map(HostName, kept)),
        earlier_stage_hosts=() if kept else EARLIER,
    )
    seen: list[object] = []
    order = msgspec.structs.replace(ORDER, generation=generation)
    rehearse(
        lambda world: seen.extend((world.step_services.stage_hosts, world.step_services.earlier_stage_hosts)),
        order,
        StandaloneControl("b"),
        lambda: None,
        make_local_opener(),
        [],
    )
    # Else its stage follows from those that the members have: blocks are copied ahead for that.
    followed = [tuple("acb"), (tuple(kept),) if kept else (*EARLIER, tuple("ac"))]
    assert seen == ([tuple(kept), ()] if kept == "bca" else followed)


@pytest.mark.parametrize(
    ("members", "spares", "hosts"),
    [("ac", "", "acb"), ("ac", "b", "ab"), ("acd", "bx", "acb"), ("a", "b", "ab"), ("ac", "x", "acb")],
)
def test_a_spare_rehearses_in_the_place_of_a_member_and_others_beside_all(members, spares, hosts):
    seated = tuple(
        Member(host=HostName(name), incarnation=Incarnation(1), seat=Seat(seat))
        for seat, name in enumerate(members)
    )
    generation = change_fields(
        ORDER.generation, members=seated, spares=tuple(HostName(name) for name in spares)
    )
    seen: list[tuple[str, ...]] = []
    order = msgspec.structs.replace(ORDER, generation=generation)
    rehearse(
        lambda world: seen.append(world.hosts),
        order,
        StandaloneControl("b"),
        lambda: None,
        make_local_opener(),
        [],
    )
    assert seen == [tuple(hosts)]


def test_a_rehearsal_knows_the_axes_of_the_others_and_when_the_next_failure_is_expected():
    axes = ((0, (("fsdp", 2),)),)
    history = JobHistory(observed_s=3600.0, failures=9)
    generation = change_fields(ORDER.generation, plan_axes=axes, history=history)
    order = msgspec.structs.replace(ORDER, generation=generation)
    seen: list[tuple[object, float]] = []
    rehearse(
        lambda world: seen.append((world.step_services.plan_axes, world.step_services.next_failure_s)),
        order,
        StandaloneControl("b"),
        lambda: None,
        make_local_opener(),
        [],
    )
    # Nine failures in an hour, of which an hour counts as the prior.
    assert seen == [(axes, pytest.approx(800.0, rel=0.01))]
