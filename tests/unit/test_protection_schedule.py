"""When a replicated state is snapshotted: not in a generation's first steps, then as often as is affordable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber
from resilient_jax.state.protection_schedule import (
    FIRST_OFFSET,
    MAX_OVERHEAD,
    QUIET_OFFSET,
    WINDOW_STEPS,
    ProtectionSchedule,
    compute_affordable_interval_steps,
)


def run(schedule: ProtectionSchedule, num_steps: int, step_s: float, cost_s: float) -> list[int]:
    """Train until the interval is measured, or for so many steps; return the offsets of the snapshots."""
    taken: list[int] = []
    now_s = 100.0
    for step in range(schedule.first_step, schedule.first_step + num_steps):
        schedule.mark(step, now_s)
        if schedule.is_measured(step):
            break
        if schedule.is_due(step):
            schedule.newest_step = step
            taken.append(step - schedule.first_step)
            now_s += cost_s
        now_s += step_s
    return taken


def make(every: int | None, first_step: int = 7) -> ProtectionSchedule:
    return ProtectionSchedule(generation=GenerationNumber(1), first_step=first_step, every=every)


def test_a_fixed_interval_begins_after_the_first_steps_of_a_generation():
    assert run(make(3), 12, 1.0, 0.1) == [FIRST_OFFSET, FIRST_OFFSET + 3, FIRST_OFFSET + 6, FIRST_OFFSET + 9]


def test_the_cost_of_a_snapshot_is_what_it_prolongs_training_by():
    schedule = make(None)
    taken = run(schedule, 100, 0.5, 0.05)
    assert taken[0] == FIRST_OFFSET
    assert not any(QUIET_OFFSET <= offset < QUIET_OFFSET + WINDOW_STEPS for offset in taken)
    cost_s, step_s = schedule.measure()
    assert (cost_s, step_s) == (pytest.approx(0.05), pytest.approx(0.5))


def test_the_measured_interval_is_kept_from_then_on():
    schedule = make(None)
    run(schedule, 100, 0.5, 0.05)
    schedule.every = 5
    assert schedule.newest_step is not None
    due = [schedule.is_due(schedule.newest_step + steps) for steps in range(1, 8)]
    assert due == [False] * 4 + [True] * 3
    assert not schedule.is_measured(1000)


def test_a_disabled_schedule_takes_and_measures_nothing():
    schedule = make(None)
    schedule.is_disabled = True
    assert run(schedule, 100, 0.5, 0.05) == []


@given(cost_s=st.floats(0, 100), step_s=st.floats(0.001, 100), copy_s=st.floats(0, 100))
def test_the_affordable_interval_is_the_least_within_the_overhead_and_the_copy(cost_s, step_s, copy_s):
    every = compute_affordable_interval_steps(cost_s, step_s, copy_s=copy_s)
    assert every >= 1
    assert cost_s <= MAX_OVERHEAD * every * step_s * (1 + 1e-6)
    assert copy_s <= every * step_s * (1 + 1e-6)
    less = every - 1
    if less:
        assert cost_s > MAX_OVERHEAD * less * step_s or copy_s > less * step_s
