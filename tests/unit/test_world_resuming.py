"""A loop that goes on from storage: it counts from there, and never begins anew without being told to."""

import jax.numpy as jnp
import pytest

from resilient_jax.errors import StateError
from resilient_jax.ids import GenerationNumber, HostName, ProcessIndex
from resilient_jax.protocol.records import StateLoss
from resilient_jax.training.solo import SoloLink
from resilient_jax.training.world import StateHolder, World


def world(*, lost=None, holder=None):
    host = HostName("a")
    return World(
        generation=GenerationNumber(3),
        hosts={ProcessIndex(0): host},
        process_index=ProcessIndex(0),
        holder=holder or StateHolder(),
        link=SoloLink(host),
        change="reform",
        reason="a test",
        lost=lost,
    )


LOST = StateLoss(step=9, at_least=False, reason="two hosts", checkpoint=5)


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
    told_to = StateLoss(step=9, at_least=False, reason="two hosts")
    assert list(world(lost=told_to).steps(2)) == [0, 1]


def test_a_state_that_was_committed_since_needs_no_checkpoint():
    holder = StateHolder()
    first = world(lost=LOST, holder=holder)
    first.resume_at(5)
    next(first.steps(8))
    first.commit({"a": jnp.zeros(3)})
    assert next(world(lost=LOST, holder=holder).steps(8)) == 6
