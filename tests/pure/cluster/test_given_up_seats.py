"""Which seats the coordination service is told of: those of members that were given up, and of no others."""

import msgspec
import pytest

from resilient_jax.cluster.generation_orders import list_given_up_seats
from resilient_jax.ids import HostName, WorldId
from resilient_jax.membership.machine import HostLeft
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.record_parts import change_fields
from tests.support.membership_job import training


def follow(before: Generation, after: Generation) -> list[int]:
    return [int(seat) for seat in list_given_up_seats(before, after)]


def test_a_dead_worker_and_a_lost_host_are_given_up_as_soon_as_the_others_must_stop() -> None:
    job = training("a", "b", "c", "d")
    before = job.generation
    job.worker("b", exit_code=-9)
    died = job.generation
    assert died.phase is GenerationPhase.QUIESCE
    assert follow(before, died) == [1]
    job.give(HostLeft(HostName("d")))
    assert follow(died, job.generation) == [3], "and not b again"
    assert follow(before, job.generation) == [1, 3], "also if a generation was missed"


def test_a_worker_that_hangs_is_given_up() -> None:
    job = training("a", "b", "c")
    before = job.generation
    job.worker("c", is_unresponsive=True)
    assert follow(before, job.generation) == [2]


def test_a_member_that_leaves_between_two_steps_is_not_given_up() -> None:
    job = training("a", "b", "c")
    before = job.generation
    job.change("c", is_draining=True)
    paused = job.generation
    assert (paused.phase, follow(before, paused)) == (GenerationPhase.PAUSE, [])
    formed = change_fields(paused, phase=GenerationPhase.FORM, members=paused.membership.members[:2])
    assert follow(paused, formed) == []


def test_a_seat_that_another_worker_has_taken_is_left_alone() -> None:
    before = training("a", "b", "c").generation
    later = change_fields(before, number=before.number + 1)
    gone, *others = before.membership.members
    back = msgspec.structs.replace(gone, incarnation=gone.incarnation + 1)
    assert follow(before, change_fields(later, members=(back, *others))) == []
    assert follow(before, change_fields(later, members=tuple(others), newcomers=(back,))) == []


@pytest.mark.parametrize("step", [0, 1])
def test_a_new_world_has_none_of_the_old_seats(step: int) -> None:
    before = training("a", "b", "c").generation
    after = change_fields(
        before,
        number=before.number + 1,
        world=WorldId(before.membership.world + step),
        members=before.membership.members[:2],
    )
    assert follow(before, after) == ([] if step else [2])
