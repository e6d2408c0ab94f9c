"""The decisions of a leader: recorded in the generation, obeyed by the rules, and carried on by another leader."""

import dataclasses

import msgspec
import pytest
from membership_job import Job, change_leader, know, stop_at_boundary, training

from resilient_jax.ids import HostName
from resilient_jax.membership.failure_forecast import add_return, count_losses, describe_record
from resilient_jax.membership.host_shares import HostShares
from resilient_jax.membership.machine import HostLeft
from resilient_jax.protocol.records import GenerationPhase, WorkerState, WorkerStatus, WorldChange
from resilient_jax.protocol.recovery_records import (
    JobHistory,
    LossCause,
    RecoveryAction,
    RecoveryDecision,
    TimedChange,
)

TRAINS = GenerationPhase.ACTIVE


def decided(job: Job) -> RecoveryDecision:
    assert job.generation.decision is not None
    return job.generation.decision


def lose_two(job: Job) -> None:
    """Kill the workers of c and d; a and b go on in place, and both workers start again."""
    for name in "cd":
        job.worker(name, exit_code=-9)
    job.acknowledge("a", "b", step=6, holds_state=True)
    job.form()
    job.train(7)
    for name in "cd":
        job.change(name, worker=msgspec.structs.replace(job.worker_of(name), incarnation=2, exit_code=None))
        job.report(name, state=WorkerState.STARTING)


def test_how_the_hosts_go_on_after_a_loss_is_recorded_with_all_options():
    job = training("a", "b", "c", spare_seats=4)
    assert job.generation.decision is None, "at the start there is nothing to choose"
    job.give(HostLeft(HostName("c")))
    job.acknowledge("a", "b", step=6, holds_state=True)
    decision = decided(job)
    assert (job.phase, job.generation.change) == (GenerationPhase.FORM, WorldChange.SHRINK)
    assert (decision.action, decision.number) == (RecoveryAction.SHRINK, 2)
    assert {option.action for option in decision.options if not option.why_not} == {RecoveryAction.SHRINK}
    assert {option.why_not for option in decision.options} >= {
        "no host is on its way back",
        "the hosts have a newer state",
        "the hosts can go on in place",
    }


def test_hosts_that_return_together_are_gathered_where_a_join_is_a_new_world():
    job = training("a", "b", "c", "d")
    know(job, reform=20.0)
    lose_two(job)
    number = job.generation.number
    job.restart("c", incarnation=2)
    decision = decided(job)
    assert (job.phase, job.generation.number) == (TRAINS, number), "the others train on"
    assert (decision.action, decision.joining, decision.awaited) == (RecoveryAction.GATHER, ("c",), ("d",))
    job.restart("d", incarnation=2)
    assert (decided(job).action, decided(job).joining) == (RecoveryAction.JOIN, ("c", "d"))
    assert (job.phase, job.generation.reason) == (GenerationPhase.PAUSE, "c, d asked to join")
    stop_at_boundary(job, 9)
    job.serve()
    assert job.members == ["a", "b", "c", "d"]


def test_a_host_that_does_not_come_is_not_gathered_again():
    job = training("a", "b", "c", "d")
    know(job, reform=20.0)
    lose_two(job)
    job.restart("c", incarnation=2)
    decision = decided(job)
    assert decision.action is RecoveryAction.GATHER
    job.wait(decision.wait_s / 2)
    assert job.phase is TRAINS
    job.wait(decision.wait_s)
    assert (job.phase, decided(job).action) == (GenerationPhase.PAUSE, RecoveryAction.JOIN)


def test_a_host_that_is_lost_while_it_is_awaited_ends_the_wait():
    job = training("a", "b", "c", "d")
    know(job, reform=20.0)
    lose_two(job)
    job.restart("c", incarnation=2)
    assert decided(job).action is RecoveryAction.GATHER
    job.give(HostLeft(HostName("d")))
    assert (job.phase, decided(job).action) == (GenerationPhase.PAUSE, RecoveryAction.JOIN)


def test_a_new_leader_obeys_the_wait_that_was_decided():
    job = training("a", "b", "c", "d")
    know(job, reform=20.0)
    lose_two(job)
    job.restart("c", incarnation=2)
    decision = decided(job)
    assert decision.action is RecoveryAction.GATHER
    written = len(job.published)
    change_leader(job)
    job.wait(decision.wait_s / 2)
    assert (job.phase, decided(job)) == (TRAINS, decision)
    assert len(job.published) == written
    job.wait(decision.wait_s)
    assert decided(job).action is RecoveryAction.JOIN


@pytest.mark.parametrize("do_come", [True, False])
def test_a_job_that_would_need_two_new_worlds_waits_for_its_host_once(do_come):
    job = training("a", "b", "c")
    know(job, reform=20.0, **{"return": 4.0})
    job.change("a", services=())
    job.worker("c", exit_code=-9)
    job.acknowledge("a", "b", step=6, holds_state=True)
    decision = decided(job)
    assert job.phase is GenerationPhase.QUIESCE
    assert (decision.action, decision.awaited, decision.wait_s) == (RecoveryAction.WAIT, ("c",), 6.0)
    job.wait(5.5)
    assert job.phase is GenerationPhase.QUIESCE
    if do_come:
        job.restart("c", incarnation=2)
        job.report("c", generation=job.generation.number)
    else:
        job.wait(0.6)  # the end of the wait, and of no other time limit
    job.serve()
    assert decided(job).action is RecoveryAction.REFORM
    assert (job.phase, job.members) == (GenerationPhase.FORM, list("abc") if do_come else list("ab"))
    (record,) = job.generation.history.host_losses
    assert (record.num_returns, record.return_s) == ((1, pytest.approx(5.5)) if do_come else (0, 0.0))


def test_a_job_measures_its_changes_and_passes_them_on():
    job = training("a", "b", "c", spare_seats=4)
    job.wait(10.0)
    job.train(15)  # ten steps of a second
    job.worker("c", exit_code=-9)
    job.wait(0.5)
    job.acknowledge("a", "b", step=15, holds_state=True)
    job.form()
    job.wait(1.0)
    job.train(16)
    job.wait(4.0)
    job.restart("c", incarnation=2)
    job.take_seat("c")
    history = job.generation.history
    assert history.failures == 1
    assert [(one.host, one.cause, one.count) for one in history.host_losses] == [("c", LossCause.WORKER, 1)]
    assert history.host_losses[0].return_s == pytest.approx(5.5)
    assert history.away == ()
    assert history.step_s == pytest.approx(1.0)
    assert {time.change: time.typical_s for time in history.times} == {
        TimedChange.SHRINK: pytest.approx(0.5),
        TimedChange.RETURN: pytest.approx(5.5),
    }
    assert history.observed_s == pytest.approx(15.5)


@pytest.mark.parametrize(("waited_s", "is_measured"), [(4.0, True), (200.0, False)])
def test_a_change_that_waited_for_hosts_is_no_measure_of_its_kind(waited_s, is_measured):
    job = training("a", "b", "c", min_hosts=3)
    job.wait(10.0)
    job.train(15)
    job.worker("c", exit_code=-9)
    job.acknowledge("a", "b", step=15, holds_state=True)
    job.wait(waited_s)  # with two hosts there is nothing to do
    job.restart("c", incarnation=2)
    job.report("c", generation=job.generation.number)
    job.serve()
    job.form()
    job.train(16)
    job.change("a", is_draining=True)
    measured = {time.change for time in job.generation.history.times}
    assert (TimedChange.REFORM in measured) is is_measured


def test_a_short_generation_does_not_make_steps_seem_long():
    job = training("a", "b", "c", spare_seats=4)
    job.wait(10.0)
    job.train(15)
    job.wait(240.0)  # a hang
    job.worker("c", exit_code=-9)
    assert job.generation.history.step_s == pytest.approx(25.0)
    job.acknowledge("a", "b", step=15, holds_state=True)
    job.form()
    job.wait(1.0)
    job.train(16)
    job.wait(4.0)
    job.train(20)
    job.change("a", is_draining=True)
    assert job.generation.history.step_s == pytest.approx(1.0)


def test_a_new_leader_measures_nothing_that_it_has_not_seen_begin():
    job = training("a", "b", "c", spare_seats=4)
    job.wait(10.0)
    job.train(15)
    job.worker("c", exit_code=-9)
    change_leader(job)
    job.acknowledge("a", "b", step=15, holds_state=True)
    job.form()
    job.wait(50.0)
    job.train(16)
    job.change("a", is_draining=True)
    assert job.generation.history.times == ()
    assert job.generation.history != JobHistory()


def test_the_end_of_a_job_that_has_too_few_hosts_is_a_decision():
    job = training("a", "b", min_hosts=2, start_timeout_s=30.0)
    job.give(HostLeft(HostName("b")))
    job.acknowledge("a", step=6, holds_state=True)
    job.wait(40.0)
    assert job.phase is GenerationPhase.FINISHED
    assert decided(job).action is RecoveryAction.STOP
    assert "1 of the 2 hosts that the job needs" in decided(job).reason


def list_losses(job: Job) -> list[tuple[str, LossCause, int]]:
    return [(one.host, one.cause, one.count) for one in job.generation.history.host_losses]


@pytest.mark.parametrize(
    ("break_c", "cause"),
    [
        (lambda job: job.worker("c", exit_code=-9), LossCause.WORKER),
        (lambda job: job.worker("c", is_dying=True), LossCause.WORKER),
        (lambda job: job.worker("c", is_unresponsive=True), LossCause.LEFT_OUT),
        (lambda job: job.give(HostLeft(HostName("c"))), LossCause.HOST),
        (lambda job: job.change("c", num_devices=2, num_used=1, worker=end(job, "c")), LossCause.DEVICE),
    ],
)
def test_the_cause_of_a_loss_is_recorded_and_in_the_reason(break_c, cause):
    job = training("a", "b", "c", spare_seats=4)
    job.wait(60.0)
    break_c(job)
    job.acknowledge("a", "b", step=6, holds_state=True)
    assert list_losses(job) == [("c", cause, 1)]
    assert [(one.host, one.cause) for one in job.generation.history.away] == [("c", cause)]
    assert decided(job).reason.startswith(
        describe_record(job.generation.history, [HostName("c")]) + "; the job"
    )


def end(job: Job, name: str) -> WorkerStatus:
    return msgspec.structs.replace(job.worker_of(name), exit_code=-9)


def test_a_worker_of_a_host_that_lacked_a_device_all_along_ended_by_itself():
    job = Job("a", "b", "c", spare_seats=4)
    job.change("c", num_devices=2, num_used=1)
    job.serve()
    job.form()
    job.train(5)
    job.worker("c", exit_code=-9)
    assert list_losses(job) == [("c", LossCause.WORKER, 1)]


@pytest.mark.parametrize(("num_devices", "before", "after"), [(2, 1, 0), (8, 6, 7)])
def test_a_worker_that_is_started_again_because_a_device_is_back_is_no_failure(num_devices, before, after):
    job = Job("a", "b", "c", spare_seats=4)
    job.change("c", num_devices=num_devices, num_used=before)
    job.serve()
    job.form()
    job.train(5)
    job.change("c", num_used=after, worker=end(job, "c"))
    assert job.phase is GenerationPhase.QUIESCE
    assert (list_losses(job), job.generation.history.failures) == ([], 0)


@pytest.mark.parametrize("is_new_leader", [True, False])
def test_a_restart_for_a_device_that_was_back_before_is_no_failure_either(is_new_leader):
    """Its agent waits for its turn. Others are lost meanwhile, or the leader is, and forget what devices there were."""
    job = Job("a", "b", "c", "d", spare_seats=4)
    job.change("c", num_devices=2, num_used=1)
    job.serve()
    job.form()
    job.train(5)
    job.change("c", num_used=0)
    if is_new_leader:
        change_leader(job)
        job.train(6)
    else:
        job.worker("d", exit_code=-9)
        job.acknowledge("a", "b", "c", step=6, holds_state=True)
        job.form()
        job.train(7)
    failures = job.generation.history.failures
    job.change("c", ended_for_return=job.worker_of("c").incarnation, worker=end(job, "c"))
    assert job.phase is GenerationPhase.QUIESCE
    assert "c" not in [host for host, _, _ in list_losses(job)]
    assert job.generation.history.failures == failures


def test_hosts_count_by_their_devices_in_the_options_after_a_loss_and_before_a_join():
    job = Job("a", "b", "c", "d", spare_seats=4)
    for name, num_used in (("a", 0), ("b", 0), ("c", 4), ("d", 6)):
        job.change(name, num_devices=8, num_used=num_used)
    job.serve()
    job.form()
    job.train(5)
    job.worker("d", exit_code=-9)
    job.acknowledge("a", "b", "c", step=6, holds_state=True)
    speeds = {option.action: option.speed for option in decided(job).options}
    # c has half of its devices: 2.5 of 4 hosts; d is expected back with three quarters.
    assert speeds[RecoveryAction.SHRINK] == pytest.approx(2.5 / 4)
    assert speeds[RecoveryAction.WAIT] == pytest.approx(3.25 / 4)
    job.form()
    job.train(8)
    job.restart("d")
    job.take_seat("d")
    speeds = {option.action: option.speed for option in decided(job).options}
    assert speeds[RecoveryAction.JOIN] == pytest.approx(3.25 / 4)
    assert speeds[RecoveryAction.POSTPONE] == pytest.approx(2.5 / 4)


def test_a_host_that_is_gone_or_does_not_know_its_devices_counts_as_a_complete_one():
    job = Job("a", "b", "c", spare_seats=4)
    job.change("a", num_devices=8, num_used=2)
    job.change("b", num_devices=4)
    shares = HostShares.of(job.state)
    assert [shares.count_used(HostName(name)) for name in ("a", "b", "c", "gone")] == [0.25, 0.5, 1.0, 1.0]
    assert shares.sum_complete(map(HostName, ("a", "b", "c"))) == 2.5
    assert HostShares.of(Job("a").state).count_used(HostName("a")) == 1.0, "nobody knows"


def leave_and_come_back(job: Job, seconds: float, incarnation: int) -> None:
    """Have c leave after a notice, its agent end, and the host be back so long afterward."""
    job.change("c", is_draining=True)
    stop_at_boundary(job, job.worker_of("a").report.step + 1)
    job.form()
    job.train(job.generation.step + 1)
    job.give(HostLeft(HostName("c")))
    job.wait(seconds)
    job.restart("c", incarnation=incarnation)
    job.take_seat("c")
    stop_at_boundary(job, job.worker_of("a").report.step + 1)
    job.form()
    job.train(job.generation.step + 1)


def test_a_host_that_leaves_after_notices_is_no_failure_and_its_returns_are_its_own():
    job = training("a", "b", "c", spare_seats=8)
    for number in range(2):
        leave_and_come_back(job, 90.0, 2 + number)
    history = job.generation.history
    assert (list_losses(job), history.failures, history.away) == ([("c", LossCause.NOTICE, 2)], 0, ())
    assert history.host_losses[0].return_s == pytest.approx(90.0)


def test_a_host_that_dies_after_its_notice_was_preempted():
    job = training("a", "b", "c", spare_seats=4)
    job.change("c", is_draining=True)
    assert job.phase is GenerationPhase.PAUSE
    job.give(HostLeft(HostName("c")))
    assert (list_losses(job), job.generation.history.failures) == ([("c", LossCause.NOTICE, 1)], 0)


@pytest.mark.parametrize("has_returned_before", [True, False])
def test_a_host_whose_agent_is_gone_is_awaited_if_it_came_back_before(has_returned_before):
    job = training("a", "b", "c")
    know(job, reform=20.0)
    if has_returned_before:
        history = count_losses(job.generation.history, {HostName("c"): LossCause.HOST}, job.generation.number)
        history = add_return(history, HostName("c"), LossCause.HOST, 8.0)
        job.state = dataclasses.replace(
            job.state, generation=msgspec.structs.replace(job.generation, history=history)
        )
    job.change("a", services=())
    job.give(HostLeft(HostName("c")))
    job.acknowledge("a", "b", step=6, holds_state=True)
    if not has_returned_before:
        job.serve()
        assert decided(job).action is RecoveryAction.REFORM
        return
    assert (decided(job).action, decided(job).awaited, decided(job).wait_s) == (
        RecoveryAction.WAIT,
        ("c",),
        12.0,
    )
    job.restart("c", incarnation=2)
    job.report("c", generation=job.generation.number)
    job.serve()
    assert job.members == list("abc")


def test_of_two_hosts_the_one_that_is_soon_back_is_awaited_and_the_slow_one_is_not():
    job = training(*"abcdefgh")
    know(job, reform=20.0)
    history = job.generation.history
    for name, seconds in (("c", 2.0), ("d", 100.0)):
        history = count_losses(history, {HostName(name): LossCause.WORKER}, job.generation.number)
        history = add_return(history, HostName(name), LossCause.WORKER, seconds)
    job.state = dataclasses.replace(
        job.state, generation=msgspec.structs.replace(job.generation, history=history)
    )
    job.change("a", services=())
    for name in "cd":
        job.worker(name, exit_code=-9)
    job.acknowledge(*"abefgh", step=6, holds_state=True)
    decision = decided(job)
    assert (decision.action, decision.awaited, decision.wait_s) == (RecoveryAction.WAIT, ("c",), 3.0)
