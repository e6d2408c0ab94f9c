"""`World` on one host without an agent: resuming, reductions, and the moments at which observers are called."""

import contextlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from resilient_jax.errors import CallerError, StateError
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import Corruption, FailPoint
from resilient_jax.protocol.state_records import StateLoss
from resilient_jax.step.assignment import AccumulationOptions
from resilient_jax.worker.committed_state import CommittedState
from resilient_jax.worker.generation_info import make_mesh
from resilient_jax.worker.observers import Observer
from resilient_jax.worker.training_control import ErrorSwallowed
from tests.support.standalone_world import make_world

LOST = StateLoss(step=9, is_lower_bound=False, reason="two hosts", checkpoint_step=5)


def commit_steps(world, num_steps):
    """Commit all steps that are left; return them."""
    found = []
    for step in world.steps(num_steps):
        world.commit({"w": jnp.zeros(())})
        found.append(step)
    return found


def test_steps_are_counted_from_the_step_of_the_checkpoint():
    resumed = make_world(loss=LOST)
    resumed.resume_at(5)
    assert commit_steps(resumed, 8) == [5, 6, 7]


def test_a_loop_that_ignores_the_checkpoint_to_resume_from_is_refused():
    with pytest.raises(
        StateError, match=r"found a loop that begins at step 0, expected .* checkpoint of step 5"
    ):
        next(make_world(loss=LOST).steps(8))


def test_a_loop_may_restart_from_step_0_where_there_is_no_checkpoint():
    without_checkpoint = StateLoss(step=9, is_lower_bound=False, reason="two hosts")
    assert commit_steps(make_world(loss=without_checkpoint), 2) == [0, 1]


def test_a_state_that_was_committed_since_the_loss_needs_no_checkpoint():
    committed = CommittedState()
    first = make_world(loss=LOST, committed=committed)
    first.resume_at(5)
    next(first.steps(8))
    first.commit({"a": jnp.zeros(3)})
    assert next(make_world(loss=LOST, committed=committed).steps(8)) == 6


@pytest.mark.parametrize(
    ("num_steps", "found"), [(3, "3 steps up to step 2"), (1000, "10 steps up to step 9")]
)
def test_a_loop_that_never_commits_passes_for_no_training(num_steps, found):
    with pytest.raises(StateError, match=rf"{found} without a commit, expected world\.commit\(state\)"):
        for _ in make_world().steps(num_steps):
            pass


def train_and_swallow(world, tries):
    """Train as a script does that catches its error around the loop, and goes on."""
    while True:
        with contextlib.suppress(Exception):
            for step in world.steps(8):
                if step == 2:
                    tries.append(step)
                    raise ValueError("bad batch")  # the line
                world.commit({"w": jnp.zeros(())})


def test_a_loop_that_swallows_its_error_each_time_ends_with_the_line_that_raised_it():
    tries = []
    with pytest.raises(ErrorSwallowed, match=r"left 3 times in a row in the step after 2 commits") as ended:
        train_and_swallow(make_world(), tries)
    assert len(tries) == 3
    (line,) = re.findall(r"test_world\.py:(\d+)", str(ended.value))
    assert "# the line" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_a_loop_that_gets_further_after_an_error_may_catch_it():
    world, failing, done = make_world(), [2, 3, 4, 5], []
    while len(done) < 8:
        with contextlib.suppress(ValueError):
            for step in world.steps(8):
                if step in failing:
                    failing.remove(step)
                    raise ValueError("bad batch")
                world.commit({"w": jnp.zeros(())})
                done.append(step)
    assert done == list(range(8))


def test_a_loop_that_commits_some_steps_must_commit_the_last():
    def train(committed):
        world = make_world()
        for step in world.steps(6):
            if step in committed:
                world.commit({"w": jnp.zeros(())})

    train({1, 3, 5})
    with pytest.raises(StateError, match="1 step up to step 5 without a commit"):
        train({1, 3, 4})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda state: {"w": state["w"].astype(jnp.float16)},
            r"float16\[2\] at \['w'\] instead of float32\[2\]",
        ),
        (lambda state: {"w": state["w"][:1]}, r"float32\[1\] at \['w'\] instead of float32\[2\]"),
        (lambda state: {"w": state["w"], "mean": state["w"]}, r"\['mean'\], which is not in it"),
        (lambda state: {"w": state["w"], "name": "adam"}, r"\['name'\], which is not in it"),
        (lambda state: {}, r"no \['w'\]"),
    ],
)
def test_a_commit_that_no_restore_would_take_is_refused_before_the_first_failure(change, said):
    world = make_world()
    state = world.restore_or_init(lambda: {"w": jnp.zeros(2)})
    for _ in world.steps(1):
        with pytest.raises(
            StateError, match=rf"commit: found {said}.*expected the tree that the init function"
        ):
            world.commit(change(state))
        world.commit(state)


def test_resume_at_takes_any_integer_type_and_nothing_else():
    resumed = make_world()
    resumed.resume_at(jnp.int32(5))
    assert type(next(resumed.steps(8))) is int
    with pytest.raises(StateError, match=r"resume_at: found 5\.5, expected a whole number of steps"):
        resumed.resume_at(5.5)  # pyright: ignore[reportArgumentType]


def test_an_init_fn_that_cannot_be_traced_is_refused_before_the_first_failure():
    with pytest.raises(StateError, match="cannot be traced"):
        make_world().restore_or_init(lambda: {"w": np.asarray(jnp.zeros(3))})


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_an_accumulation_that_failed_may_be_repeated_in_the_same_step(reduction):
    alone = make_world()
    alone.restore_or_init(lambda: {"w": jnp.zeros(())})
    failures = [OSError("the storage is away for a moment")]

    def compute(microbatch):
        if microbatch.index == 2 and failures:
            raise failures.pop()
        return jnp.ones(())

    def accumulate():
        options = AccumulationOptions(reduction=reduction)
        return alone.accumulate_microbatches(4, compute, jnp.zeros(()), options=options)

    steps = alone.steps(2)
    next(steps)
    with pytest.raises(OSError, match="away"):
        accumulate()
    assert accumulate() == 4.0
    with pytest.raises(CallerError, match="found a second accumulation named 'train' in step 0"):
        accumulate()


def test_what_was_accumulated_of_a_step_counts_for_that_step_alone():
    """The job may go back: its state is lost, and the newest checkpoint is of an earlier step."""
    committed, computed = CommittedState(), []

    def compute(microbatch):
        if microbatch.step == 5 and microbatch.index == 2:
            raise OSError("the storage is away")
        computed.append((microbatch.step, microbatch.index))
        return jnp.float32(microbatch.step)

    def accumulate(first_step):
        world = make_world(committed=committed)
        world.resume_at(first_step)
        next(world.steps(8))
        return world.accumulate_microbatches(4, compute, jnp.zeros(()))

    with pytest.raises(OSError, match="away"):
        accumulate(5)
    assert accumulate(4) == 4 * 4.0
    assert computed == [(5, 0), (5, 1), (4, 0), (4, 1), (4, 2), (4, 3)]


def test_only_a_state_that_has_just_been_committed_is_snapshotted():
    alone = make_world()
    state = alone.restore_or_init(lambda: {"w": jnp.zeros(())})
    with pytest.raises(StateError, match="no step had been committed just before"):
        alone.snapshot(state)
    for _ in alone.steps(2):
        with pytest.raises(StateError, match=r"call it after world\.commit"):
            alone.snapshot(state)
        alone.commit(state)
        alone.snapshot(state)


def test_an_accumulation_outside_of_a_step_is_refused():
    with pytest.raises(CallerError, match=r"found a call outside of `for step in world\.steps"):
        make_world().accumulate_microbatches(1, lambda _: jnp.zeros(()), jnp.zeros(()))


def test_all_reduce_returns_numpy_for_numpy_and_the_sharding_for_device_arrays():
    alone = make_world()
    placed = jax.device_put(jnp.arange(4.0), NamedSharding(alone.local_mesh(), jax.sharding.PartitionSpec()))
    found = alone.all_reduce({"host": np.arange(3, dtype=np.int32), "device": placed})
    assert isinstance(found["host"], np.ndarray)
    assert found["device"].sharding == placed.sharding


class Recorder(Observer):
    """An observer that records each call."""

    def __init__(self, moments):
        self._moments = moments

    def on_step_begin(self, step):
        self._moments.append(("begin", step))

    def on_failpoint(self, failpoint, step, index):
        self._moments.append((str(failpoint), step) if index < 0 else (str(failpoint), step, index))
        is_corrupt = failpoint is FailPoint.AFTER_MICROBATCH and index == 1
        return Corruption.NAN if is_corrupt else Corruption.NONE

    def on_reduce(self, call, owners, total):
        self._moments.append(("reduce", call.spec.name, owners))

    def on_commit(self, state):
        self._moments.append(("commit", state.step))

    def on_restore(self, state):
        self._moments.append(("restore", state.step))


def test_observers_are_called_at_each_moment_of_a_step_in_order():
    moments, committed = [], CommittedState()
    alone = make_world(committed=committed, observers=[Recorder(moments)])
    next(alone.steps(1))
    total = alone.accumulate_microbatches(2, lambda _: jnp.ones(()), jnp.zeros(()))
    assert np.isnan(total), "a failpoint corrupted the second microbatch"
    alone.commit({"w": total})
    assert moments == [
        ("begin", 0),
        (FailPoint.BEFORE_MICROBATCH, 0, 0),
        (FailPoint.AFTER_MICROBATCH, 0, 0),
        (FailPoint.BEFORE_MICROBATCH, 0, 1),
        (FailPoint.AFTER_MICROBATCH, 0, 1),
        (FailPoint.BEFORE_REDUCE, 0),
        (FailPoint.AFTER_REDUCE, 0),
        ("reduce", "train", ("a", "a")),
        (FailPoint.BEFORE_COMMIT, 0),
        ("commit", 1),
        (FailPoint.AFTER_COMMIT, 0),
    ]
    moments.clear()
    make_world(committed=committed, observers=[Recorder(moments)]).restore_or_init(
        lambda: {"w": jnp.zeros(())}
    )
    assert moments == [("restore", 1)]


def test_all_observers_are_called_although_the_first_asks_to_corrupt():
    first, second = [], []
    alone = make_world(observers=[Recorder(first), Recorder(second)])
    next(alone.steps(1))
    alone.accumulate_microbatches(2, lambda _: jnp.ones(()), jnp.zeros(()))
    assert first == second


def test_an_all_reduce_of_host_arrays_is_no_reduction_of_the_step():
    moments = []
    alone = make_world(observers=[Recorder(moments)])
    next(alone.steps(1))
    alone.all_reduce(np.zeros(1))
    assert moments == [("begin", 0), (FailPoint.AFTER_ALL_REDUCE, 0)]
    alone.all_reduce(jnp.zeros(1))
    assert moments[2:] == [(FailPoint.BEFORE_REDUCE, 0), (FailPoint.AFTER_ALL_REDUCE, 0)]


def test_the_axis_with_size_minus_1_takes_the_devices_that_are_left():
    count = len(jax.devices())
    assert make_mesh(jax.devices(), ("data", "model"), "this host").shape == {"data": count, "model": 1}
    with pytest.raises(CallerError, match=r"do not fit the \d+ devices of this host"):
        make_mesh(jax.devices(), {"data": count + 1}, "this host")


@pytest.mark.parametrize("value", [["a"], None, np.float32(0.5), jnp.ones(())])
def test_details_of_an_event_that_no_log_can_hold_are_refused(value: object):
    world = make_world()
    world.record_event(EventKind.STEP_COMMITTED, loss=0.5, note="as usual")
    with pytest.raises(CallerError, match=r"record_event: found loss=.*, expected a str, int, float or bool"):
        world.record_event(EventKind.STEP_COMMITTED, loss=value)  # pyright: ignore[reportArgumentType]
