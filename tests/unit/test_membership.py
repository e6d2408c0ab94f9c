"""Each rule of the membership machine, as a sequence of a few events."""

import msgspec
import pytest
from checked_membership import CheckedMachine
from membership_job import Job, stop_at_boundary, training

from resilient_jax.ids import GenerationNumber, HostName, WorldId
from resilient_jax.membership.machine import HostChanged, HostLeft, QuarantineChanged, Tick
from resilient_jax.membership.rules import make_initial_state
from resilient_jax.membership.state_loss import StateLossPolicy
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.records import (
    GenerationPhase,
    JobOutcomeKind,
    WorkerFailure,
    WorkerFailureKind,
    WorkerState,
    WorldChange,
)
from resilient_jax.protocol.worker_messages import RESTART_EXIT_CODE

COLLECTIVE = WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="connection reset by peer")


# Start.


def test_a_job_starts_when_the_expected_hosts_are_ready():
    job = Job("a", "b")
    assert job.asked == [StartCoordinationService(WorldId(1), 2, 2)]
    assert job.published == []
    job.serve()
    assert job.phases == [(1, GenerationPhase.FORM)]
    assert [(m.host, m.seat) for m in job.generation.members] == [("a", 0), ("b", 1)]
    assert job.generation.service_address == "a:1:2"
    assert job.generation.receivers == ()
    job.form()
    assert job.phases[1:] == [(1, GenerationPhase.ACTIVE)]


def test_a_start_waits_for_the_expected_hosts_and_then_takes_the_minimum():
    job = Job("a", "b", num_hosts=3, min_hosts=2, start_timeout_s=10.0)
    job.wait(9.0)
    assert job.asked == []
    job.wait(2.0)
    assert job.asked[-1] == StartCoordinationService(WorldId(1), 2, 2)


def test_a_job_with_too_few_hosts_reports_how_many_joined():
    job = Job("a", num_hosts=3, min_hosts=2, start_timeout_s=10.0)
    job.wait(11.0)
    outcome = job.generation.outcome
    assert outcome is not None
    assert outcome.kind is JobOutcomeKind.TOO_FEW_HOSTS
    assert outcome.message.startswith("1 of the 2 hosts that the job needs at least are ready after 11 s")
    assert "start more agents, or lower min_hosts" in outcome.message


def test_a_service_for_another_number_of_hosts_is_not_used():
    job = Job("a", "b", num_hosts=2)
    job.report("c", state=WorkerState.IDLE)  # c becomes ready before the service for two hosts runs
    assert job.asked == [
        StartCoordinationService(WorldId(1), 2, 2),
        StartCoordinationService(WorldId(1), 3, 3),
    ]
    for nodes in (2, 3):
        job.asked.append(StartCoordinationService(WorldId(1), nodes, nodes))
        job.serve()
    assert job.generation.service_address == "a:1:3"
    assert job.members == ["a", "b", "c"]


# A member is lost.


def test_a_killed_worker_leads_to_a_shrink_in_the_same_world():
    job = training("a", "b", "c")
    job.worker("b", exit_code=-9)
    assert (job.generation.number, job.phase, job.members) == (2, GenerationPhase.QUIESCE, ["a", "c"])
    assert job.generation.reason == "lost b"
    job.acknowledge("a", step=7)
    assert job.phase is GenerationPhase.QUIESCE
    job.acknowledge("c", step=8)
    assert job.phases[-2:] == [(2, GenerationPhase.QUIESCE), (2, GenerationPhase.FORM)]
    new = job.generation
    assert (new.change, new.world, new.step) == (WorldChange.SHRINK, 1, 8)
    assert [(m.host, m.seat) for m in new.members] == [("a", 0), ("c", 2)], "seats are kept"
    assert [s.host for s in new.sources] == ["c"]
    assert new.receivers == ("a",)


@pytest.mark.parametrize(
    "lose", [lambda job: job.give(HostLeft(HostName("b"))), lambda job: job.worker("b", is_unresponsive=True)]
)
def test_a_lost_lease_and_a_stopped_worker_count_as_a_death(lose):
    job = training("a", "b", "c")
    lose(job)
    assert (job.generation.number, job.phase, job.members) == (2, GenerationPhase.QUIESCE, ["a", "c"])


def test_a_death_while_forming_starts_a_new_generation():
    job = training("a", "b", "c")
    job.worker("b", exit_code=-9)
    job.acknowledge("a", "c", step=5)
    job.give(HostLeft(HostName("c")))
    assert (job.generation.number, job.phase, job.members) == (3, GenerationPhase.QUIESCE, ["a"])
    job.acknowledge("a", generation=2)
    assert job.phase is GenerationPhase.QUIESCE, "an answer to an older number does not count"


def test_a_death_while_quiescing_starts_a_new_generation():
    job = training("a", "b", "c")
    job.worker("b", exit_code=-9)
    job.worker("c", exit_code=-9)
    assert (job.generation.number, job.phase, job.members) == (3, GenerationPhase.QUIESCE, ["a"])


def test_a_death_in_a_planned_change_makes_it_unplanned():
    job = training("a", "b", "c")
    job.change("a", services=())
    assert job.phase is GenerationPhase.PAUSE
    job.worker("c", exit_code=-9)
    assert (job.generation.number, job.phase, job.generation.boundary_step) == (
        3,
        GenerationPhase.QUIESCE,
        None,
    )


def test_a_host_that_is_ready_when_a_failure_is_handled_joins_in_the_same_change():
    job = training("a", "b", "c")
    job.worker("b", exit_code=-9)
    job.restart("b")
    job.acknowledge("a", "c", step=5)
    job.serve()
    new = job.generation
    assert (new.change, new.world, new.phase) == (WorldChange.REFORM, 2, GenerationPhase.FORM)
    assert [(m.host, m.incarnation, m.seat) for m in new.members] == [
        ("a", 1, 0),
        ("b", 2, 1),
        ("c", 1, 2),
    ]
    assert new.receivers == ("b",)


# Late or silent workers.


def test_a_worker_that_does_not_stop_in_time_is_left_out():
    job = training("a", "b", "c")
    job.worker("b", exit_code=-9)
    job.acknowledge("a", holds_state=True)
    job.wait(5.5)
    assert (job.generation.number, job.members) == (2, ["a", "c"]), "c has the only other copy of the state"
    job.wait(5)
    assert (job.generation.number, job.members) == (3, ["a"])
    assert job.generation.reason == "c did not stop within 10.5 s"


def test_a_worker_that_compiles_is_waited_for_longer():
    job = training("a", "b", "c", compile_timeout_s=60.0)
    job.worker("b", exit_code=-9)
    job.acknowledge("a")
    job.report("c", is_compiling=True)
    job.wait(50.0)
    assert job.members == ["a", "c"]
    job.wait(11.0)
    assert job.members == ["a"]


def test_the_last_host_with_the_state_is_not_left_out_early():
    job = training("a", "b", "c", compile_timeout_s=60.0)
    job.worker("c", exit_code=-9)
    job.acknowledge("b", holds_state=False)  # b had not fetched the state yet
    job.wait(50.0)
    assert job.members == ["a", "b"], "a is late, but it alone holds the state"
    job.acknowledge("a", step=6)
    assert job.generation.step == 6


def test_a_worker_that_was_left_out_joins_only_when_it_has_answered():
    job = training("a", "b", "c")
    job.worker("c", exit_code=-9)
    job.acknowledge("a", "b", step=5)  # the order to train is sent; an older report of b does not count
    job.form("a")
    job.report("a", failure=COLLECTIVE)
    assert (job.generation.number, job.members) == (3, ["a", "b"])
    job.acknowledge("a")
    job.wait(10.5)
    assert (job.generation.number, job.members) == (4, ["a"])
    assert [(d.host, d.required_generation) for d in job.generation.dropped_workers] == [("b", 3)]
    job.acknowledge("a")
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["a"]), (
        "b's last word is older than the order to train"
    )
    job.form()
    job.train(6)
    assert job.phase is GenerationPhase.ACTIVE
    job.report("b", generation=GenerationNumber(4))
    assert job.phase is GenerationPhase.PAUSE
    assert job.generation.reason == "b asked to join"


def test_the_last_host_resumes_in_a_world_of_its_own():
    job = training("a", "b")
    job.worker("b", exit_code=-9)
    job.acknowledge("a", step=6)
    assert job.phase is GenerationPhase.QUIESCE, "a new world needs a service first"
    job.serve()
    assert (job.phase, job.generation.change, job.generation.step) == (
        GenerationPhase.FORM,
        WorldChange.REFORM,
        6,
    )


def test_a_member_that_does_not_form_in_time_counts_as_a_failed_attempt():
    job = Job("a", "b", forming_timeout_s=60.0)
    job.serve()
    job.form("a")
    job.wait(61.0)
    assert (job.generation.number, job.phase, job.generation.attempts) == (2, GenerationPhase.QUIESCE, 1)
    assert job.generation.reason == "b did not join the world within 60 s"


def test_an_old_report_of_being_done_does_not_count_as_formed():
    job = Job("a", "b")
    job.report("b", has_formed=True, is_done=True)
    job.serve()
    job.form("a")
    assert job.phase is GenerationPhase.FORM
    job.wait(61.0)
    assert job.generation.failed_host == "b"


# Planned changes.


def test_a_host_joins_between_two_steps():
    job = training("a", "b")
    job.report("c", state=WorkerState.IDLE)
    assert (job.generation.number, job.phase) == (2, GenerationPhase.PAUSE)
    assert job.generation.reason == "c asked to join"
    job.report("a", generation=GenerationNumber(2), earliest_stop_step=7)
    assert job.phase is GenerationPhase.PAUSE
    job.report("b", generation=GenerationNumber(2), earliest_stop_step=8)
    assert (job.phase, job.generation.boundary_step) == (GenerationPhase.BOUNDARY, 8)
    for name in "ab":
        job.report(name, state=WorkerState.IDLE, step=8, has_formed=False)
    job.serve()
    new = job.generation
    assert (new.number, new.phase, new.change, new.step) == (2, GenerationPhase.FORM, WorldChange.REFORM, 8)
    assert (job.members, new.receivers) == (["a", "b", "c"], ("c",))


def test_no_host_joins_before_all_have_finished_a_step():
    job = Job("a", "b")
    job.serve()
    job.form()
    job.report("c", state=WorkerState.IDLE)
    assert job.phase is GenerationPhase.ACTIVE
    job.train(1)
    assert job.phase is GenerationPhase.PAUSE


def test_a_host_with_a_notice_leaves_between_two_steps():
    job = training("a", "b", "c")
    job.change("b", is_draining=True)
    assert job.generation.reason == "b got a notice to leave"
    stop_at_boundary(job, 6)
    assert (job.phase, job.generation.change, job.members) == (
        GenerationPhase.FORM,
        WorldChange.SHRINK,
        ["a", "c"],
    )
    assert job.generation.receivers == ()


def test_a_job_all_of_whose_hosts_must_leave_ends():
    job = training("a", "b")
    job.change("a", is_draining=True)
    job.change("b", is_draining=True)
    stop_at_boundary(job, 6)
    outcome = job.generation.outcome
    assert outcome is not None
    assert outcome.kind is JobOutcomeKind.INTERRUPTED
    assert "all hosts got a notice to leave" in outcome.message


def test_hosts_that_must_all_leave_hand_their_state_to_the_joiners():
    job = training("a")
    job.change("a", is_draining=True)
    job.report("b", state=WorkerState.IDLE)
    stop_at_boundary(job, 6)
    job.serve()
    assert (job.members, job.generation.receivers) == (["a", "b"], ("b",))
    job.form()
    job.train(7)
    stop_at_boundary(job, 8)
    job.serve()  # the last host forms a world of its own
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["b"])


def test_a_worker_that_stops_by_itself_makes_the_change_unplanned():
    job = training("a", "b")
    job.report("b", state=WorkerState.IDLE)
    assert job.phase is GenerationPhase.QUIESCE
    assert job.generation.reason == "b stopped training (it lost the store)"


# The coordination service.


def test_a_lost_service_is_replaced_between_two_steps():
    job = training("a", "b")
    job.change("a", services=())
    assert (job.phase, job.generation.reason) == (GenerationPhase.PAUSE, "the coordination service has ended")
    stop_at_boundary(job, 6)
    assert job.asked[-1] == StartCoordinationService(WorldId(2), 2, 2)
    job.serve("b")
    assert (job.generation.change, job.generation.world) == (WorldChange.REFORM, 2)


def test_a_service_lost_while_forming_restarts_the_forming():
    job = Job("a", "b")
    job.serve()
    job.change("a", services=())
    assert (job.generation.number, job.phase) == (2, GenerationPhase.QUIESCE)
    assert job.generation.reason == "lost the coordination service before the world was complete"


def test_a_service_lost_before_the_first_step_restarts_the_forming():
    job = Job("a", "b")
    job.serve()
    job.form()
    job.change("a", services=())
    assert (job.generation.number, job.phase) == (2, GenerationPhase.QUIESCE)


def test_a_service_lost_while_quiescing_leads_to_a_reform():
    job = training("a", "b", "c")
    job.worker("c", exit_code=-9)
    job.change("a", services=())
    job.acknowledge("a", "b")
    assert job.asked[-1] == StartCoordinationService(WorldId(2), 2, 2)


def test_a_service_of_the_same_world_elsewhere_does_not_count():
    job = training("a", "b")
    service = job.status("a").services[0]
    job.change("b", services=(msgspec.structs.replace(service, address="b:9"),))
    job.change("a", services=())
    assert job.phase is GenerationPhase.PAUSE


# Errors.


def test_an_old_failure_of_a_joining_host_does_not_disturb_its_new_world():
    job = training("a", "b")
    job.report("c", state=WorkerState.IDLE, generation=GenerationNumber(1), failure=COLLECTIVE)
    stop_at_boundary(job, 6)
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["a", "b", "c"])
    job.form()
    assert job.phase is GenerationPhase.ACTIVE


def fail_repeatedly() -> Job:
    """Return a job of two hosts of which one has reported more failed collectives than there are retries."""
    job = training("a", "b", step=5, max_collective_retries=2)
    for attempt in (1, 2):
        job.report("b", state=WorkerState.IDLE, failure=COLLECTIVE)
        assert job.generation.attempts == attempt
        job.acknowledge("a", "b", step=5)
        job.serve()
        assert job.generation.change is WorldChange.REFORM, "a fresh world is the better bet"
        job.form()
        assert job.phase is GenerationPhase.ACTIVE
    job.report("b", state=WorkerState.IDLE, failure=COLLECTIVE)
    job.acknowledge("a", "b", step=5)
    return job


def test_a_collective_that_fails_although_no_host_died_is_retried_and_then_goes_on_without_the_suspect():
    job = fail_repeatedly()
    assert (job.phase, job.members, job.quarantined) == (GenerationPhase.QUIESCE, ["a"], ["b"])
    assert job.generation.reason.startswith("b is taken out: training failed 3 times in a row at step 5")


def test_the_host_that_reported_most_of_the_failures_is_taken_out():
    job = fail_repeatedly()
    job.acknowledge("a", step=5)
    job.serve()
    job.form()
    assert (job.phase, job.members) == (GenerationPhase.ACTIVE, ["a"])
    job.report("b", state=WorkerState.IDLE)
    job.report("a", state=WorkerState.RUNNING, has_finished_step=True, step=6)
    assert job.phase is GenerationPhase.ACTIVE, "it is in quarantine"
    job.give(QuarantineChanged(frozenset()))
    assert (job.phase, job.generation.reason) == (GenerationPhase.PAUSE, "b asked to join")


def test_a_job_whose_collectives_fail_without_the_suspect_too_ends_with_the_error():
    job = fail_repeatedly()
    job.acknowledge("a", step=5)
    job.serve()
    job.form()
    job.report("a", state=WorkerState.IDLE, failure=COLLECTIVE)
    job.acknowledge("a", step=5)
    outcome = job.generation.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.host) == (JobOutcomeKind.USER_ERROR, "a")
    assert outcome.message.startswith(
        "training failed 4 times in a row at step 5 although no host died, also without b; the last error:"
    )
    assert COLLECTIVE.text in outcome.message


def test_a_suspect_without_which_too_few_hosts_are_left_stays_to_the_end():
    job = training("a", "b", step=5, max_collective_retries=0, min_hosts=2)
    job.report("b", state=WorkerState.IDLE, failure=COLLECTIVE)
    job.acknowledge("a", "b", step=5)
    assert (job.phase, job.quarantined) == (GenerationPhase.FINISHED, [])


def test_a_member_that_an_operator_drains_leaves_between_two_steps_and_comes_back():
    job = training("a", "b")
    for name in "ab":
        job.report(name, state=WorkerState.RUNNING, has_finished_step=True, step=6)
    job.give(QuarantineChanged(frozenset([HostName("b")])))
    assert job.phase is GenerationPhase.PAUSE
    stop_at_boundary(job, step=7)
    job.serve()
    job.form()
    assert job.members == ["a"]
    job.report("a", state=WorkerState.RUNNING, has_finished_step=True, step=8)
    job.report("b", state=WorkerState.IDLE, generation=job.generation.number)
    assert job.phase is GenerationPhase.ACTIVE
    job.give(QuarantineChanged(frozenset()))
    assert job.phase is GenerationPhase.PAUSE, "it joins again"


def test_progress_after_a_failure_resets_the_number_of_retries():
    job = training("a", "b", max_collective_retries=1)
    for step in range(6, 12):
        job.report("b", state=WorkerState.IDLE, failure=COLLECTIVE, step=step)
        assert job.generation.attempts == 1
        job.acknowledge("a", "b", step=step)
        job.serve()
        job.form()


def test_a_step_that_only_a_dead_host_committed_does_not_count_as_progress():
    job = training("a", "b", "c", step=5, max_collective_retries=1)
    job.change("c", step=6)
    job.worker("c", exit_code=-9)
    job.acknowledge("a", "b", step=5)
    assert (job.generation.step, job.generation.progress) == (5, 6)
    for attempt in (1, 2):
        job.form()
        job.report("b", state=WorkerState.IDLE, failure=COLLECTIVE)
        assert job.generation.attempts == attempt
        job.acknowledge("a", "b", step=5)
        if attempt == 1:
            job.serve()
    assert job.quarantined == ["b"]


@pytest.mark.parametrize("exit_code", [1, 3])
def test_an_error_in_user_code_ends_the_job_with_that_error(exit_code):
    job = training("a", "b")
    job.worker("b", exit_code=exit_code, error="ValueError: bad batch")
    outcome = job.generation.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.exit_code, outcome.host) == (JobOutcomeKind.USER_ERROR, exit_code, "b")
    assert outcome.message == "ValueError: bad batch"


def test_an_error_that_a_worker_reports_before_it_exits_ends_the_job():
    job = training("a", "b")
    job.report("b", failure=WorkerFailure(kind=WorkerFailureKind.USER, text="ZeroDivisionError"))
    assert job.generation.outcome is not None
    assert job.generation.outcome.message == "ZeroDivisionError"


def test_a_script_that_ends_without_having_trained_is_an_error():
    job = Job("a")
    job.worker("a", exit_code=0)
    assert job.generation.outcome is not None
    assert "call rj.run(train)" in job.generation.outcome.message


def test_a_worker_that_requests_a_restart_is_no_error():
    job = training("a", "b")
    job.worker("b", exit_code=RESTART_EXIT_CODE)
    assert job.phase is GenerationPhase.QUIESCE


# The end.


def test_a_job_is_done_when_all_members_are():
    job = training("a", "b")
    job.report("a", state=WorkerState.IDLE, is_done=True)
    assert job.phase is GenerationPhase.ACTIVE
    job.report("b", state=WorkerState.IDLE, is_done=True)
    assert job.generation.outcome is not None
    assert job.generation.outcome.kind is JobOutcomeKind.DONE
    job.give(HostLeft(HostName("a")))
    assert job.phases[-1] == (1, GenerationPhase.FINISHED), "nothing follows the end"


def lose_all_holders(job: Job) -> None:
    for name in job.members:
        job.give(HostLeft(HostName(name)))
    job.report("c", state=WorkerState.IDLE)


def test_a_lost_state_stops_the_job():
    job = training("a", "b", regroup_grace_s=5.0)
    lose_all_holders(job)
    assert job.phase is GenerationPhase.QUIESCE
    job.wait(5.5)
    outcome = job.generation.outcome
    assert outcome is not None
    assert outcome.kind is JobOutcomeKind.STATE_LOST
    assert outcome.message.startswith(
        "too many of the hosts that held the training state were lost at once, after 5 committed steps or more: there "
        "is no complete snapshot"
    )
    assert "snapshot_parity" in outcome.message
    assert "rj.Checkpoints" in outcome.message


def test_a_job_restarts_from_a_lost_state_only_if_the_policy_is_restart():
    job = training(
        "a", "b", regroup_grace_s=5.0, state_loss_policy=StateLossPolicy.RESTART, start_timeout_s=9.0
    )
    lose_all_holders(job)
    job.wait(9.5)
    job.serve("c")
    assert (job.phase, job.members, job.generation.step) == (GenerationPhase.FORM, ["c"], 0)
    assert (job.generation.sources, job.generation.receivers, job.generation.progress) == ((), (), 0)


def test_a_host_with_the_state_that_reconnects_to_the_store_saves_the_job():
    job = training("a", "b", regroup_grace_s=5.0)
    status = job.status("a")
    lose_all_holders(job)
    job.wait(1.0)
    job.give(HostChanged(status))
    job.report("a", state=WorkerState.IDLE, step=6)
    job.serve("c")
    assert (job.members, job.generation.step, job.generation.receivers) == (["a", "c"], 6, ("c",))


def test_hosts_that_come_back_together_wait_for_each_other():
    job = training("a", "b", "c", regroup_grace_s=5.0)
    statuses = [job.status(name) for name in "abc"]
    for name in "abc":
        job.give(HostLeft(HostName(name)))
    for status in statuses[:2]:
        job.give(HostChanged(status))
        job.report(status.host, state=WorkerState.IDLE)
    assert job.phase is GenerationPhase.QUIESCE
    asked = len(job.asked)
    job.wait(5.5)
    assert len(job.asked) == asked + 1


def test_fewer_than_the_minimum_wait_for_more():
    job = training("a", "b", min_hosts=2, start_timeout_s=10.0)
    job.worker("b", exit_code=-9)
    job.acknowledge("a")
    job.wait(9.0)
    assert job.phase is GenerationPhase.QUIESCE
    job.restart("b")
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["a", "b"])


# A new leader.


def test_a_new_leader_continues_from_the_stored_phase():
    job = training("a", "b", "c")
    job.worker("c", exit_code=-9)
    job.acknowledge("a")
    statuses = (job.status("a"), job.status("b"))
    leader = CheckedMachine(make_initial_state(job.generation, statuses, 100.0), job.config)
    assert leader.handle(Tick(), 100.0) == (), "still b's turn"
    answer = msgspec.structs.replace(job.worker_of("a").report, generation=job.generation.number)
    status = job.status("b")
    status = msgspec.structs.replace(
        status, worker=msgspec.structs.replace(job.worker_of("b"), report=answer)
    )
    leader.handle(HostChanged(status), 100.0)
    assert (leader.state.generation.number, leader.state.generation.phase) == (2, GenerationPhase.FORM)


def test_a_new_leader_that_finds_members_missing_continues_without_them():
    job = training("a", "b", "c")
    leader = CheckedMachine(make_initial_state(job.generation, [job.status("a")], 100.0), job.config)
    leader.handle(Tick(), 100.0)
    assert (leader.state.generation.number, leader.state.generation.reason) == (2, "lost b, c")


def test_the_first_progress_is_recorded_at_once():
    job = training("a", "b", step=1)
    assert job.published[-1].progress == 1
    assert [g.number for g in job.published] == [1, 1, 1]


def test_the_minimum_applies_from_the_start_although_fewer_hosts_are_expected():
    job = Job("a", num_hosts=1, min_hosts=2, start_timeout_s=10.0)
    job.wait(9.0)
    assert job.asked == []
    job.report("b", state=WorkerState.IDLE)
    assert job.asked[-1] == StartCoordinationService(WorldId(1), 2, 2)


def test_of_many_members_with_the_state_the_generation_names_some_and_one_where_none_fetches():
    names = [f"h{index:03}" for index in range(150)]
    job = training(*names, step=3)
    job.worker(names[5], exit_code=-9)
    left = [name for name in names if name != names[5]]
    job.acknowledge(*left, step=4)
    assert (job.phase, len(job.members)) == (GenerationPhase.FORM, 149)
    assert len(job.generation.sources) == 1
    assert job.generation.receivers == ()
    job.form()
    job.worker(names[7], exit_code=-9)
    job.restart(names[5])
    job.acknowledge(*(name for name in left if name != names[7]), step=4)
    job.serve()
    assert job.phase is GenerationPhase.FORM
    assert job.generation.receivers == (names[5],)
    assert 32 < len(job.generation.sources) <= 64
