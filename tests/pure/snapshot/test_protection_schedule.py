"""When a replicated state is snapshotted: not in a generation's first steps, then as often as is affordable."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber
from resilient_jax.state.protection_schedule import (
    AGREED_OFFSET,
    FIRST_OFFSET,
    MAX_OVERHEAD,
    MEASURED_INTERVAL,
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


def test_where_a_failure_costs_all_workers_the_first_step_is_protected():
    schedule = dataclasses.replace(make(3), first_offset=0)
    assert run(schedule, 12) == [0, 3, 6, 9]


def test_the_first_snapshots_are_measured_and_the_interval_is_agreed_on_once():
    schedule = make(None)
    first = [FIRST_OFFSET + index * MEASURED_INTERVAL for index in range(3)]
    assert run(schedule, AGREED_OFFSET + 15, chosen=7) == [*first, first[-1] + 7, first[-1] + 14]
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
