"""When a new generation takes its snapshots: by what else has the state, and by the failures that the job sees."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat
from resilient_jax.membership.protection import ENOUGH_LOSSES, choose_protection
from resilient_jax.policy.failure_forecast import count_losses, estimate_rate, expect_failure_s
from resilient_jax.policy.score import HOUR_S
from resilient_jax.protocol.generation import (
    Generation,
    GenerationPhase,
    LeaderNotes,
    Member,
    Membership,
    ResumedState,
)
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import JobHistory, LossCause
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotPlan
from resilient_jax.state.protection_schedule import FIRST_OFFSET, MEASURED_INTERVAL, ProtectionSchedule

HOSTS = tuple(HostName(f"h{number}") for number in range(8))


def make_generation(number: int, step: int, *, losses_left: int | None = len(HOSTS), **changes) -> Generation:
    members = tuple(
        Member(host=host, incarnation=Incarnation(1), seat=Seat(i)) for i, host in enumerate(HOSTS)
    )
    made = Generation(
        number=GenerationNumber(number),
        phase=GenerationPhase.FORM,
        membership=Membership(members=members),
        state=ResumedState(step=step),
        record=LeaderNotes(losses_left=losses_left),
    )
    return change_fields(made, **changes)


def make_plan(step: int, number: int = 1) -> SnapshotPlan:
    return SnapshotPlan(id=SnapshotId(step, GenerationNumber(number)), groups=(), sources=())


@pytest.mark.parametrize(
    ("snapshot_step", "losses_left", "keeps_workers", "is_urgent"),
    [
        (None, 8, True, True),  # nothing but copies
        (4, 8, True, True),  # of the generation before the last one, which committed steps and took none
        (5, 8, True, True),  # with what the last one resumed from
        (6, 8, True, False),
        (9, 8, True, False),
        (9, ENOUGH_LOSSES, True, False),
        (9, ENOUGH_LOSSES - 1, True, True),
        (9, 0, True, True),
        (9, None, True, True),  # the job begins
        (9, 8, False, True),  # no worker outlives the loss of another
    ],
)
def test_the_first_commit_is_protected_where_few_have_the_state_or_no_recent_snapshot_does(
    snapshot_step, losses_left, keeps_workers, is_urgent
):
    before = make_generation(2, step=5)
    formed = make_generation(2, step=9, losses_left=losses_left, keeps_workers=keeps_workers)
    snapshot = make_plan(snapshot_step) if snapshot_step is not None else None
    assert choose_protection(before, formed, snapshot).from_first_commit is is_urgent


def test_a_generation_that_committed_nothing_asks_for_nothing_new():
    before, formed = make_generation(3, step=9), make_generation(3, step=9)
    assert not choose_protection(before, formed, make_plan(9)).from_first_commit
    assert choose_protection(before, formed, make_plan(8)).from_first_commit


# How often: the estimate that decisions go by.


def fail(history: JobHistory, times: int, every_s: float) -> JobHistory:
    for _ in range(times):
        history = count_losses(history, {HOSTS[0]: LossCause.WORKER}, GenerationNumber(1))
        history = JobHistory(
            observed_s=history.observed_s + every_s,
            failures=history.failures,
            losses=history.losses,
            host_losses=history.host_losses,
        )
    return history


@given(times=st.integers(0, 50), every_s=st.floats(1, 10 * HOUR_S))
def test_the_next_failure_is_expected_by_the_failures_of_this_job_and_sooner_than_by_the_rate_alone(
    times, every_s
):
    history = fail(JobHistory(), times, every_s)
    expected_s = expect_failure_s(history, HOSTS)
    assert expected_s < 1 / estimate_rate(history, HOSTS)
    # One more failure is never good news.
    assert expect_failure_s(fail(history, 1, 0.0), HOSTS) < expected_s


def test_a_job_without_failures_trusts_its_hosts_more_the_longer_it_runs():
    hours = [0, 1, 3, 24]
    found = [expect_failure_s(JobHistory(observed_s=h * HOUR_S), HOSTS) / HOUR_S for h in hours]
    assert found == pytest.approx([1, 2, 4, 25], rel=0.01)


def test_ten_failures_in_two_minutes_are_expected_again_within_minutes():
    assert expect_failure_s(fail(JobHistory(), 10, 12.0), HOSTS) < HOUR_S / 10


# A job of frequent faults: steps of half a second, a failure every 1.5 s on average, each of which begins a generation.


def count_unprotected(seed: int, *, follows_risk: bool, losses_left: int = len(HOSTS)) -> int:
    """Return the most steps in a row after which the newest state was in no snapshot."""
    chance = random.Random(seed)
    step = protected = longest = began = 0
    plan = None
    for number in range(200):
        before = make_generation(number, began)
        formed = make_generation(number, step, losses_left=losses_left)
        is_urgent = follows_risk and choose_protection(before, formed, plan).from_first_commit
        schedule = ProtectionSchedule(
            generation=GenerationNumber(number),
            first_step=step + 1,
            every=None,
            first_offset=0 if is_urgent else FIRST_OFFSET,
        )
        began = step
        for _ in range(int(chance.expovariate(1 / 1.5) / 0.5)):
            step += 1
            if schedule.is_due(step):
                schedule.newest_step = protected = step
                plan = make_plan(step, number)
            longest = max(longest, step - protected)
    return longest


def test_a_job_whose_generations_are_short_is_protected_all_the_same():
    before = [count_unprotected(seed, follows_risk=False) for seed in range(20)]
    large = [count_unprotected(seed, follows_risk=True) for seed in range(20)]
    small = [count_unprotected(seed, follows_risk=True, losses_left=1) for seed in range(20)]
    assert statistics.mean(before) > 2 * MEASURED_INTERVAL, "13.6 on average, 21 at most"
    # The end of a generation, and the beginning of one that may wait; the next one may not.
    assert max(large) < MEASURED_INTERVAL + FIRST_OFFSET, "5"
    assert max(small) < MEASURED_INTERVAL, "3"
