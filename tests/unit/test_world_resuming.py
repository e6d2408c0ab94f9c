"""A loop that goes on from storage: it counts from there, and never begins anew without being told to."""

import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.errors import StateError
from resilient_jax.ids import GenerationNumber, HostName, ProcessIndex
from resilient_jax.protocol.records import StateLoss
from resilient_jax.worker.standalone import StandaloneControl
from resilient_jax.worker.world import CommittedState, World


def world(*, lost=None, holder=None):
    host = HostName("a")
    return World(
        generation=GenerationNumber(3),
        hosts={ProcessIndex(0): host},
        process_index=ProcessIndex(0),
        holder=holder or CommittedState(),
        link=StandaloneControl(host),
        change="reform",
        reason="a test",
        lost=lost,
    )


LOST = StateLoss(step=9, is_lower_bound=False, reason="two hosts", checkpoint_step=5)


def test_steps_are_counted_from_where_the_checkpoint_was():
    resumed = world(lost=LOST)
    resumed.resume_at(5)
    assert list(resumed.steps(8)) == [5, 6, 7]


def test_a_loop_that_was_to_go_on_from_a_checkpoint_and_does_not_is_refused():
    with pytest.raises(
        StateError, match=r"found a loop that begins at step 0, expected .* checkpoint of step 5"
    ):
        next(world(lost=LOST).steps(8))


def test_a_loop_may_begin_anew_where_that_was_asked_for():
    told_to = StateLoss(step=9, is_lower_bound=False, reason="two hosts")
    assert list(world(lost=told_to).steps(2)) == [0, 1]


def test_a_state_that_was_committed_since_needs_no_checkpoint():
    holder = CommittedState()
    first = world(lost=LOST, holder=holder)
    first.resume_at(5)
    next(first.steps(8))
    first.commit({"a": jnp.zeros(3)})
    assert next(world(lost=LOST, holder=holder).steps(8)) == 6


def test_a_step_may_be_any_whole_number_and_nothing_else():
    resumed = world()
    resumed.resume_at(jnp.int32(5))
    assert type(next(resumed.steps(8))) is int
    with pytest.raises(StateError, match=r"resume_at: found 5\.5, expected a whole number of steps"):
        resumed.resume_at(5.5)  # pyright: ignore[reportArgumentType]


def test_a_state_that_could_not_be_made_again_is_refused_before_the_first_failure():
    with pytest.raises(StateError, match="cannot be traced"):
        world().restore_or_init(lambda: {"w": np.asarray(jnp.zeros(3))})


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_sum_that_failed_may_be_made_again(reproducible):
    alone = world()
    alone.restore_or_init(lambda: {"w": jnp.zeros(())})
    failures = [OSError("the storage is away for a moment")]

    def add(total, microbatch):
        if microbatch.index == 2 and failures:
            raise failures.pop()
        return total + 1.0

    def sum_all():
        return alone.accumulate_microbatches(4, add, jnp.zeros(()), reproducible=reproducible)

    steps = alone.steps(2)
    next(steps)
    with pytest.raises(OSError, match="away"):
        sum_all()
    assert sum_all() == 4.0
