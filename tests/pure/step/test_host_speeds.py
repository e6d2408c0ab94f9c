"""Microbatches move to faster hosts where a step is then done sooner, and stay where they are otherwise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.pipeline_schedule.makespan import share_tasks
from resilient_jax.step.assignment import AccumulationSpec, ReplicaLocation, count_by_host, replica_speeds
from resilient_jax.step.host_speeds import (
    MIN_GAIN,
    HostSpeeds,
    choose_speeds,
)
from resilient_jax.step.measured_seconds import MIN_MEASURED, WINDOW, MeasuredSeconds

some_seconds = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6)


def locate(num_hosts: int) -> list[ReplicaLocation]:
    return [ReplicaLocation((host,)) for host in range(num_hosts)]


def finish_s(speeds: np.ndarray, seconds: np.ndarray, count: int) -> float:
    shares = share_tasks(count, replica_speeds(locate(len(speeds)), speeds))
    return float(max(np.array(shares) * seconds))


def test_a_host_at_half_speed_gets_half_as_many() -> None:
    speeds = choose_speeds(np.ones(4), np.array([1.0, 1.0, 2.0, 1.0]), locate(4), 14)
    assert share_tasks(14, replica_speeds(locate(4), speeds)) == (4, 4, 2, 4)


@given(some_seconds, st.integers(1, 40), st.floats(0.97, 1.03))
def test_noise_moves_no_microbatch(seconds: list[float], count: int, noise: float) -> None:
    present = 1 / np.array(seconds)
    noisy = np.array(seconds)
    noisy[0] *= noise
    assert choose_speeds(present, noisy, locate(len(seconds)), count) is present


@given(some_seconds, some_seconds, st.integers(1, 40))
def test_a_step_is_never_much_slower_than_the_best_assignment(
    before: list[float], after: list[float], count: int
) -> None:
    hosts = min(len(before), len(after))
    present = 1 / np.array(before[:hosts])
    seconds = np.array(after[:hosts])
    chosen = choose_speeds(present, seconds, locate(hosts), count)
    best_s = finish_s(1 / seconds, seconds, count)
    assert finish_s(chosen, seconds, count) <= MIN_GAIN * best_s * (1 + 1e-9)


def test_a_host_without_measurements_counts_as_the_median() -> None:
    speeds = choose_speeds(np.ones(4), np.array([1.0, 1.0, 4.0, 0.0]), locate(4), 13)
    assert share_tasks(13, replica_speeds(locate(4), speeds)) == (4, 4, 1, 4)


def test_hosts_keep_what_they_have_while_nothing_is_known() -> None:
    present = np.ones(3)
    assert choose_speeds(present, np.zeros(3), locate(3), 6) is present


def test_a_replica_of_several_hosts_is_as_fast_as_its_slowest() -> None:
    pairs = [ReplicaLocation((0, 1)), ReplicaLocation((2, 3))]
    speeds = choose_speeds(np.ones(4), np.array([1.0, 3.0, 1.0, 1.0]), pairs, 8)
    shares = share_tasks(8, replica_speeds(pairs, speeds))
    assert shares == (2, 6)
    assert count_by_host(pairs, shares, 4) == [2, 2, 6, 6]


def test_compilation_and_stops_do_not_count() -> None:
    speed: MeasuredSeconds[str] = MeasuredSeconds()
    for seconds in (60.0, 1.0, 1.0):
        speed.add({"task": seconds})
        assert speed.estimate() == {}  # too few to say
    for seconds in (1.0, 30.0, 1.0):
        speed.add({"task": seconds})
    assert speed.estimate()["task"] == 1


def test_a_host_that_became_slow_is_known_after_a_window() -> None:
    speed: MeasuredSeconds[str] = MeasuredSeconds()
    for seconds in [1.0] * WINDOW + [2.0] * (WINDOW // 2 + 1):
        speed.add({"task": seconds})
    assert speed.estimate()["task"] == 2


def test_a_host_that_gets_no_microbatch_is_tried_again() -> None:
    """It would never be measured otherwise, and stay without work for ever."""
    speed: MeasuredSeconds[str] = MeasuredSeconds()
    for _ in range(WINDOW):
        speed.add({"task": 8.0})
    assert speed.estimate()["task"] == pytest.approx(8)
    for _ in range(MIN_MEASURED):
        speed.add({})
    assert speed.estimate()["task"] == pytest.approx(4)
    assert speed.estimate()["task"] == pytest.approx(2)
    speed.add({"task": 1.0})
    assert speed.estimate()["task"] == pytest.approx(2)  # one alone says nothing
    for _ in range(MIN_MEASURED):
        speed.add({"task": 1.0})
    assert speed.estimate()["task"] == pytest.approx(1)


def test_a_change_of_shares_is_news_until_it_is_taken():
    """A sum that did not fit is made again, and chooses by no new measurements."""
    speeds = HostSpeeds({})
    spec = AccumulationSpec(name="train", step=16, num_microbatches=8, reduction="exact")
    speeds.choose(spec, np.array([1.0, 3.0]), locate(2))
    speeds.choose(spec, np.zeros(2), locate(2))
    assert [count for count, _ in speeds.new_shares] == [6, 2]
