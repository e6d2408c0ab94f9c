"""When a replicated state is snapshotted: from the first commit where that is urgent, and as often as the risk asks."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber
from resilient_jax.state.protection_schedule import (
    FIRST_OFFSET,
    MAX_OVERHEAD,
    MEASURED_INTERVAL,
    NUM_MEASURED_STEPS,
    ProtectionSchedule,
    compute_affordable_interval_steps,
)


def run(schedule: ProtectionSchedule, num_steps: int, chosen: int = 1) -> list[int]:
    """Train so many steps of half a second; return the offsets of the snapshots."""
    taken: list[int] = []
    for step in range(schedule.first_step, schedule.first_step + num_steps):
        schedule.mark(step, 100.0 + 0.5 * step)
        if schedule.is_measured(step):
            schedule.every = chosen
        if schedule.is_due(step):
            schedule.newest_step = step
            taken.append(step - schedule.first_step)
    return taken


def make(every: int | None) -> ProtectionSchedule:
    return ProtectionSchedule(generation=GenerationNumber(1), first_step=7, every=every)


def test_a_fixed_interval_begins_after_the_first_steps_of_a_generation():
    assert run(make(3), 12) == [FIRST_OFFSET, FIRST_OFFSET + 3, FIRST_OFFSET + 6, FIRST_OFFSET + 9]


def test_where_it_is_urgent_the_first_commit_is_protected():
    schedule = dataclasses.replace(make(3), first_offset=0)
    assert run(schedule, 12) == [0, 3, 6, 9]


@pytest.mark.parametrize("first_offset", [0, FIRST_OFFSET])
def test_the_first_snapshots_are_measured_and_the_interval_is_agreed_on_once(first_offset):
    schedule = dataclasses.replace(make(None), first_offset=first_offset)
    first = [first_offset + index * MEASURED_INTERVAL for index in range(3)]
    agreed = first_offset + NUM_MEASURED_STEPS
    assert run(schedule, agreed + 15, chosen=7) == [*first, first[-1] + 7, first[-1] + 14]
    assert schedule.step_s == pytest.approx(0.5)
    assert not any(schedule.is_measured(step) for step in range(100))


def test_a_disabled_schedule_takes_and_measures_nothing():
    schedule = make(None)
    schedule.is_disabled = True
    assert run(schedule, 100) == []
    assert schedule.every is None


@given(copy_s=st.floats(0, 100), step_s=st.floats(0.001, 100))
def test_the_affordable_interval_is_the_least_within_the_overhead(copy_s, step_s):
    every = compute_affordable_interval_steps(copy_s, step_s)
    assert every >= 1
    assert copy_s <= MAX_OVERHEAD * every * step_s * (1 + 1e-6)
    if every > 1:
        assert copy_s > MAX_OVERHEAD * (every - 1) * step_s


@given(copy_s=st.floats(0.001, 100), step_s=st.floats(0.001, 100), failure_s=st.floats(0.1, 1e7))
def test_the_more_failures_a_job_sees_the_more_often_it_copies_its_state(copy_s, step_s, failure_s):
    every = compute_affordable_interval_steps(copy_s, step_s, failure_s)
    assert every <= compute_affordable_interval_steps(copy_s, step_s)
    assert every <= compute_affordable_interval_steps(copy_s, step_s, 2 * failure_s)
    # A copy is never begun before the last one can be over.
    assert every * step_s >= copy_s * (1 - 1e-6)


def test_rare_failures_leave_the_interval_to_what_is_affordable():
    assert compute_affordable_interval_steps(0.05, 0.5, 1e6) == compute_affordable_interval_steps(0.05, 0.5)
    assert compute_affordable_interval_steps(0.05, 0.5, 5.0) == 1
