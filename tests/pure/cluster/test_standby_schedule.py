"""When a standby starts: in a settled world, and not again and again."""

import pytest

from resilient_jax.cluster.standby_schedule import MAX_RETRY_S, RETRY_S, SETTLING_S, StandbySchedule
from resilient_jax.ids import GenerationNumber

FIRST, SECOND = GenerationNumber(1), GenerationNumber(2)


def settle(schedule: StandbySchedule, now_s: float) -> StandbySchedule:
    """Return the schedule of a world that has trained for long enough at `now_s`."""
    return schedule.commit(FIRST, now_s - SETTLING_S).commit(FIRST, now_s)


def test_a_standby_starts_only_after_its_generation_has_trained_for_a_while() -> None:
    schedule = StandbySchedule()
    assert not schedule.is_due(100.0), "nothing is committed"
    schedule = schedule.commit(FIRST, 100.0)
    assert not schedule.is_due(100.0)
    assert schedule.commit(FIRST, 100.0 + SETTLING_S).is_due(100.0 + SETTLING_S)
    again = schedule.commit(SECOND, 100.0 + SETTLING_S)
    assert not again.is_due(100.0 + SETTLING_S), "the membership has just changed"
    replaced = settle(schedule, 110.0).replace_worker(is_promoted=True)
    assert not replaced.is_due(200.0), "the worker that was promoted has committed nothing"


def test_a_killed_standby_is_started_again_later_each_time_until_one_is_promoted() -> None:
    schedule, now_s = settle(StandbySchedule(), 100.0), 100.0
    for delay_s in (RETRY_S, 2 * RETRY_S, 4 * RETRY_S):
        schedule = schedule.lose_standby(now_s, is_killed=True)
        assert not schedule.is_due(now_s + delay_s - 0.1)
        now_s += delay_s
        assert schedule.is_due(now_s)
    schedule = settle(schedule.replace_worker(is_promoted=True), now_s)
    assert schedule.lose_standby(now_s, is_killed=True).is_due(now_s + RETRY_S)


def test_the_time_until_the_next_try_has_a_limit() -> None:
    schedule = settle(StandbySchedule(), 0.0)
    for _ in range(20):
        schedule = schedule.lose_standby(0.0, is_killed=True)
    assert schedule.not_before_s == pytest.approx(MAX_RETRY_S)


def test_a_standby_that_failed_by_itself_is_not_started_again() -> None:
    schedule = settle(StandbySchedule(), 100.0).lose_standby(100.0, is_killed=False)
    assert not settle(schedule, 10_000.0).is_due(10_000.0)
