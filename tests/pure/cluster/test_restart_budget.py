"""Restarts: a limited number in a window, each after a longer wait."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.cluster.restart_budget import RestartBudget


def spend_all(budget: RestartBudget, times: list[float]) -> list[float | None]:
    delays = []
    for now in times:
        budget, delay_s = budget.spend(now)
        delays.append(delay_s)
    return delays


def test_the_first_restart_is_immediate_and_each_later_one_waits_twice_as_long():
    budget = RestartBudget(max_restarts=4, window_s=100.0, backoff_s=1.0)
    assert spend_all(budget, [0.0, 1.0, 2.0, 3.0, 4.0]) == [0.0, 1.0, 2.0, 4.0, None]


def test_a_restart_is_forgotten_when_the_window_has_passed():
    budget = RestartBudget(max_restarts=1, window_s=10.0, backoff_s=1.0)
    assert spend_all(budget, [0.0, 9.9, 10.0]) == [0.0, None, 0.0]


def test_a_limit_of_zero_allows_no_restart():
    assert spend_all(RestartBudget(max_restarts=0, window_s=10.0, backoff_s=1.0), [0.0]) == [None]


@given(
    limit=st.integers(0, 5),
    window_s=st.floats(1.0, 100.0),
    gaps=st.lists(st.floats(0.0, 30.0), max_size=40),
)
def test_no_window_ever_holds_more_restarts_than_the_limit(limit, window_s, gaps):
    times = list(itertools.accumulate(gaps))
    delays = spend_all(RestartBudget(max_restarts=limit, window_s=window_s, backoff_s=1.0), times)
    granted = [now for now, delay_s in zip(times, delays, strict=True) if delay_s is not None]
    for now in granted:
        assert sum(now - other < window_s for other in granted if other <= now) <= limit
