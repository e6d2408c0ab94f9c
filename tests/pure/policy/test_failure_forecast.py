"""The expected time to the next failure, and until hosts are back: by host and by cause."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.policy.failure_forecast import (
    MAX_RECORDS,
    RECENT_S,
    add_return,
    count_losses,
    describe_record,
    estimate_rate,
    expect_return_s,
    forget_returns,
    list_expected,
)
from resilient_jax.policy.score import (
    HOUR_S,
    PRIOR_EXPOSURE_S,
    PRIOR_FAILURES_PER_HOST,
)
from resilient_jax.protocol.recovery_records import JobHistory, LossCause

A, B, C = (HostName(name) for name in "abc")
NUMBER = GenerationNumber(2)
LOSSES = st.lists(
    st.tuples(
        st.floats(0.0, 20 * HOUR_S),
        st.lists(st.sampled_from((A, B, C)), min_size=1, max_size=3, unique=True),
        st.sampled_from(tuple(LossCause)),
    ),
    max_size=12,
).map(lambda losses: sorted(losses, key=lambda loss: loss[0]))


def pass_time(history: JobHistory, seconds: float) -> JobHistory:
    return msgspec.structs.replace(history, observed_s=history.observed_s + seconds)


def lose(history: JobHistory, *hosts: HostName, cause: LossCause = LossCause.WORKER) -> JobHistory:
    return count_losses(history, dict.fromkeys(hosts, cause), NUMBER)


def play(losses) -> JobHistory:
    history = JobHistory()
    for at_s, hosts, cause in losses:
        history = lose(pass_time(history, at_s - history.observed_s), *hosts, cause=cause)
    return pass_time(history, 20 * HOUR_S - history.observed_s)


@given(losses=LOSSES)
def test_a_rate_is_the_sum_over_hosts_of_the_greater_posterior_mean(losses):
    expected = 0.0
    for host in (A, B, C):
        counted = [
            (at_s, 1 / len(hosts))
            for at_s, hosts, cause in losses
            if host in hosts and cause is not LossCause.NOTICE
        ]
        exposure_s = PRIOR_EXPOSURE_S + 20 * HOUR_S
        always = sum(part for _, part in counted) / exposure_s
        faded = sum(part * math.exp((at_s - 20 * HOUR_S) / RECENT_S) for at_s, part in counted)
        recent_s = PRIOR_EXPOSURE_S + RECENT_S * (1 - math.exp(-20 * HOUR_S / RECENT_S))
        expected += PRIOR_FAILURES_PER_HOST / exposure_s + max(always, faded / recent_s)
    history = play(losses)
    assert estimate_rate(history, {A, B, C}) == pytest.approx(expected)
    assert estimate_rate(history, {A}) + estimate_rate(history, {B, C}) == pytest.approx(expected)


@given(losses=LOSSES, quiet_s=st.floats(60.0, 50 * HOUR_S))
def test_a_rate_grows_with_each_failure_and_falls_in_quiet_time(losses, quiet_s):
    history = play(losses)
    rate = estimate_rate(history, {A, B})
    assert estimate_rate(lose(history, A), {A, B}) > rate
    assert estimate_rate(pass_time(history, quiet_s), {A, B}) < rate
    assert estimate_rate(history, {A, B, HostName("new")}) > rate


@given(losses=LOSSES)
def test_losses_of_other_hosts_do_not_make_a_host_suspect(losses):
    history = play(losses)
    others = [host for _, hosts, _ in losses for host in hosts]
    if C not in others:
        assert estimate_rate(history, {C}) == pytest.approx(
            PRIOR_FAILURES_PER_HOST / (PRIOR_EXPOSURE_S + history.observed_s)
        )


def test_a_host_that_leaves_after_a_notice_has_not_failed_and_is_expected_to_leave_again():
    history = pass_time(JobHistory(), HOUR_S)
    noticed = lose(history, A, cause=LossCause.NOTICE)
    assert noticed.failures == 0
    assert estimate_rate(noticed, {A}) == estimate_rate(history, {A})
    assert estimate_rate(noticed, {A}, with_notices=True) > 100 * estimate_rate(history, {A})


def test_hosts_that_are_lost_at_one_moment_are_one_failure_of_the_job():
    history = lose(pass_time(JobHistory(), HOUR_S), A, B, C)
    assert history.failures == 1
    one = estimate_rate(lose(pass_time(JobHistory(), HOUR_S), A), {A, B, C})
    assert estimate_rate(history, {A, B, C}) == pytest.approx(one)


def test_a_host_that_begins_to_fail_after_a_hundred_hours_is_suspected_at_once_and_trusted_again_after_days():
    history = pass_time(JobHistory(), 100 * HOUR_S)
    for _ in range(3):
        history = pass_time(lose(history, A), 600.0)
    assert 1 / estimate_rate(history, {A}) < 3 * HOUR_S
    assert 1 / estimate_rate(pass_time(history, 3 * 24 * HOUR_S), {A}) > 50 * HOUR_S
    assert 1 / estimate_rate(history, {B}) > 1000 * HOUR_S


def test_failures_of_more_hosts_than_are_recorded_still_count_for_the_job():
    history = JobHistory()
    hosts = [HostName(f"host-{number:03}") for number in range(2 * MAX_RECORDS)]
    for host in hosts:
        history = lose(pass_time(history, HOUR_S), host)
    assert len(history.host_losses) == MAX_RECORDS
    expected = len(hosts) * (PRIOR_FAILURES_PER_HOST + 1) / (PRIOR_EXPOSURE_S + history.observed_s)
    assert estimate_rate(history, set(hosts)) >= expected * (1 - 1e-9)


def test_a_job_begins_with_the_published_rate_and_is_judged_by_its_own_failures_after_hours():
    """Llama 3 405B (arXiv 2407.21783): 50,700 device-hours per failure."""
    assert 1 / estimate_rate(JobHistory(), {A, B}) == pytest.approx(6337.5 / 2 * HOUR_S)
    history = JobHistory()
    for _ in range(100):
        history = lose(pass_time(history, 10 * HOUR_S), A)
    assert 1 / estimate_rate(history, {A}) == pytest.approx(10 * HOUR_S, rel=0.5)


def test_a_return_is_expected_by_host_and_cause_then_by_host_then_by_cause_then_by_the_mean():
    history = lose(JobHistory(), A)
    assert expect_return_s(history, A, 5.0) == 5.0
    history = add_return(history, A, LossCause.WORKER, 4.0)
    history = add_return(lose(history, B, cause=LossCause.HOST), B, LossCause.HOST, 60.0)
    history = lose(history, A, B, cause=LossCause.WORKER)
    assert expect_return_s(history, A, 5.0) == 4.0  # its own worker
    assert expect_return_s(history, B, 5.0) == 60.0  # its own, of another cause
    history = lose(history, C, cause=LossCause.HOST)
    assert expect_return_s(history, C, 5.0) == 60.0  # of another host, after the same cause
    assert expect_return_s(lose(history, C, cause=LossCause.DEVICE), C, 5.0) == 5.0


def test_only_a_host_that_has_come_back_each_time_is_expected_though_nothing_is_there():
    history = lose(JobHistory(), A, B, cause=LossCause.NOTICE)
    assert list_expected(history) == []
    history = lose(add_return(history, A, LossCause.NOTICE, 90.0), A, cause=LossCause.NOTICE)
    assert list_expected(history) == [A]
    # Its agent was started by another hand: one return of three losses is no habit.
    missed = lose(history, A, cause=LossCause.HOST)
    assert list_expected(missed) == []
    assert list_expected(forget_returns(history, [A])) == []
    # It does so again: once missed is not for good.
    missed = add_return(missed, A, LossCause.HOST, 60.0)
    assert list_expected(lose(missed, A, cause=LossCause.NOTICE)) == [A]


def test_a_record_says_why_and_how_often():
    history = pass_time(lose(pass_time(JobHistory(), HOUR_S), A), 0.5 * HOUR_S)
    assert describe_record(history, [A, B]) == "a: its worker ended"
    history = lose(lose(history, A), A, cause=LossCause.HOST)
    assert describe_record(history, [A]) == "a: the host was lost, 2 more of other causes"
    assert (
        describe_record(lose(history, A), [A])
        == "a: its worker ended, 3 times in 1.5 h, 1 more of other causes"
    )
