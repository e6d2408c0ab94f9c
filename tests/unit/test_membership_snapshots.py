"""The membership machine resumes from snapshots where no host has the complete state."""

import msgspec
import pytest
from membership_job import Job, keep, server, sharded, snapshot, stop_at_boundary, training

from resilient_jax.ids import HostName
from resilient_jax.membership.machine import HostLeft
from resilient_jax.membership.state_loss import StateLossPolicy
from resilient_jax.protocol.records import (
    GenerationPhase,
    JobOutcomeKind,
    WorkerFailure,
    WorkerFailureKind,
    WorkerState,
    WorldChange,
)
from resilient_jax.protocol.snapshots import SnapshotPhase


def test_after_the_loss_of_a_host_the_newest_snapshot_is_restored_in_the_same_world():
    job = sharded("abcd")
    job.give(HostLeft(HostName("b")))
    job.acknowledge("a", "c", "d", step=6)
    new = job.generation
    assert (new.phase, new.change, new.world) == (GenerationPhase.FORM, WorldChange.SHRINK, 1)
    assert new.snapshot is not None
    assert (new.snapshot.id.step, new.step) == (5, 5), "step 6 is nowhere whole"
    assert [source.host for source in new.snapshot.sources] == ["a", "c", "d"]
    assert (new.sources, new.receivers) == ((), ())


def test_the_snapshot_of_a_killed_workers_host_is_still_used():
    job = sharded("abcd")
    job.worker("b", exit_code=-9)
    job.worker("c", exit_code=-9)
    job.acknowledge("a", "d", step=5)
    assert job.generation.snapshot is not None
    assert [source.host for source in job.generation.snapshot.sources] == ["a", "b", "c", "d"]


def test_a_snapshot_that_all_have_copied_is_waited_for_while_servers_exchange_parity():
    job = sharded("abcd")
    job.worker("b", exit_code=-9)
    newer = snapshot(6, "abcd")
    job.acknowledge("a", "c", "d", step=6, copied=newer.id)
    assert job.phase is GenerationPhase.QUIESCE
    keep(job, "bcd", snapshot(5, "abcd"), newer)
    assert job.phase is GenerationPhase.QUIESCE, "it may stand fewer losses than the one before"
    keep(job, "a", snapshot(5, "abcd"), newer)
    assert job.phase is GenerationPhase.FORM
    assert job.generation.snapshot is not None
    assert (job.generation.snapshot.id.step, job.generation.step) == (6, 6), "no step is done again"


def test_a_snapshot_that_comes_to_nothing_is_waited_for_for_a_moment():
    job = sharded("abcd", snapshot_grace_s=0.3)
    job.worker("b", exit_code=-9)  # in the middle of its copy
    job.acknowledge("a", "c", "d", step=6, copied=snapshot(6, "abcd").id)
    job.wait(0.2)
    assert job.phase is GenerationPhase.QUIESCE
    job.wait(0.2)
    assert job.phase is GenerationPhase.FORM
    assert job.generation.step == 5


def test_a_snapshot_that_a_member_has_not_copied_is_not_waited_for():
    job = sharded("abcd")
    job.worker("b", exit_code=-9)
    job.acknowledge("a", "c", step=6, copied=snapshot(6, "abcd").id)
    job.acknowledge("d", step=5, copied=snapshot(5, "abcd").id)
    assert job.phase is GenerationPhase.FORM
    assert job.generation.step == 5


def test_a_snapshot_without_the_part_of_a_lost_host_is_not_waited_for():
    job = sharded("abcd")
    job.give(HostLeft(HostName("b")))
    job.acknowledge("a", "c", "d", step=6, copied=snapshot(6, "abcd").id)
    assert job.phase is GenerationPhase.FORM
    assert job.generation.step == 5


def test_more_lost_hosts_than_parity_end_the_job_with_what_survived():
    job = sharded("abcd", regroup_grace_s=5.0)
    job.give(HostLeft(HostName("b")))
    job.give(HostLeft(HostName("c")))
    job.acknowledge("a", "d", step=6)
    assert job.phase is GenerationPhase.QUIESCE, "they may come back"
    job.wait(6.0)
    outcome = job.generation.outcome
    assert outcome is not None
    assert outcome.kind is JobOutcomeKind.STATE_LOST
    assert "the snapshot of step 5 (generation 1)" in outcome.message
    assert "b, c are; a, d survive" in outcome.message


def test_hosts_that_may_be_partitioned_are_waited_for_before_the_state_counts_as_lost():
    job = sharded("abcd", regroup_grace_s=5.0, state_loss_grace_s=30.0)
    away = {name: job.status(name) for name in "bc"}
    for name in "bc":
        job.give(HostLeft(HostName(name)))
    job.acknowledge("a", "d", step=6)
    job.wait(20.0)
    assert job.phase is GenerationPhase.QUIESCE, "a link that is down for some seconds must not end the job"
    job.change("b", snapshot_server=away["b"].snapshot_server, snapshots=away["b"].snapshots)
    job.serve()
    assert job.phase is GenerationPhase.FORM
    assert job.generation.snapshot is not None
    assert job.generation.snapshot.id.step == 5


def test_the_wait_for_absent_hosts_has_a_timeout():
    job = sharded("abcd", regroup_grace_s=5.0, state_loss_grace_s=30.0)
    for name in "bc":
        job.give(HostLeft(HostName(name)))
    job.acknowledge("a", "d", step=6)
    job.wait(31.0)
    assert job.generation.outcome is not None
    assert job.generation.outcome.kind is JobOutcomeKind.STATE_LOST


def test_when_all_hosts_are_back_without_the_state_no_host_is_waited_for():
    job = sharded("abcd", regroup_grace_s=5.0, state_loss_grace_s=30.0)
    for name in "bc":
        job.give(HostLeft(HostName(name)))
    job.acknowledge("a", "d", step=6)
    for name in "bc":
        job.change(name, snapshot_server=None, snapshots=())
    job.wait(6.0)
    assert job.generation.outcome is not None
    assert job.generation.outcome.kind is JobOutcomeKind.STATE_LOST


def test_a_snapshot_from_before_a_restart_of_the_job_is_not_restored():
    job = sharded("abcd", regroup_grace_s=5.0, state_loss_policy=StateLossPolicy.RESTART)
    held = job.status("b")
    for lost in "bc":
        job.give(HostLeft(HostName(lost)))
    job.acknowledge("a", "d", step=6)
    job.wait(6.0)
    job.serve()
    assert job.phase is GenerationPhase.FORM
    assert (job.generation.step, job.generation.snapshot) == (0, None)
    assert job.generation.initial_generation == job.generation.number
    job.form()
    for name in "ad":
        job.report(name, has_finished_step=True, holds_state=False, step=1)
    for name in "bc":  # back with their snapshots
        job.change(name, snapshot_server=held.snapshot_server, snapshots=held.snapshots)
    keep(job, "ad", snapshot(1, "ad", generation=job.generation.number), *held.snapshots)
    job.worker("a", exit_code=-9)
    job.acknowledge("d", step=2)
    job.serve("d")
    assert job.generation.snapshot is not None
    assert job.generation.snapshot.id.step == 1


def test_a_replicated_state_that_is_newer_takes_precedence_over_a_snapshot():
    job = training("a", "b", "c")
    keep(job, "abc", snapshot(3, "abc"))
    job.worker("b", exit_code=-9)
    job.acknowledge("a", "c", step=5)
    assert job.generation.snapshot is None
    assert [s.host for s in job.generation.sources] == ["a", "c"]


def test_a_late_host_with_the_complete_state_is_not_left_out_for_an_older_snapshot():
    job = training("a", "b")
    job.worker("b", exit_code=-9)
    job.restart("b")
    job.acknowledge("a", step=5)
    job.serve()
    job.form("a")
    keep(job, "ab", snapshot(3, "ab"))
    job.report(
        "b",
        failure=WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text=""),
        generation=job.generation.number,
    )
    assert job.phase is GenerationPhase.QUIESCE
    job.acknowledge("b", step=0, holds_state=False)
    job.wait(60.0)
    assert (job.phase, job.members) == (GenerationPhase.QUIESCE, ["a", "b"])
    job.acknowledge("a", step=5)
    job.serve()
    assert [s.host for s in job.generation.sources] == ["a"]


def test_when_all_workers_die_the_snapshots_of_their_hosts_are_restored():
    job = training("a", "b", "c", regroup_grace_s=5.0)
    keep(job, "abc", snapshot(4, "abc", parity=0))
    for name in "abc":
        job.worker(name, exit_code=-9)
    for name in "abc":
        job.restart(name)
    job.serve()
    assert job.phase is GenerationPhase.FORM
    assert job.generation.snapshot is not None
    assert (job.generation.step, job.generation.snapshot.id.step) == (4, 4)
    assert job.generation.progress >= 5


def test_a_planned_change_waits_for_the_report_of_the_last_snapshot():
    job = sharded("abc")
    job.change("a", is_draining=True)
    last = snapshot(7, "abc", generation=job.generation.number)
    for name in job.members:
        job.report(name, generation=job.generation.number, earliest_stop_step=7)
    for name in job.members:
        job.report(
            name, state=WorkerState.IDLE, step=7, earliest_stop_step=7, has_formed=False, snapshot=last.id
        )
    assert job.phase is GenerationPhase.BOUNDARY, "their servers have not reported it yet"
    keep(job, "ab", last)
    assert job.phase is GenerationPhase.BOUNDARY
    keep(job, "c", last)
    job.serve("b")
    assert job.phase is GenerationPhase.FORM
    assert (job.generation.step, job.members) == (7, ["b", "c"])


def leave_two_of_four() -> Job:
    """Return a job that c and d are leaving; a and b train, and still need the snapshots of all four hosts."""
    job = sharded("abcd")
    for leaving in "cd":
        job.change(leaving, is_draining=True)
    last = snapshot(7, "abcd", generation=job.generation.number)
    for name in job.members:
        job.report(name, generation=job.generation.number, earliest_stop_step=7)
    for name in job.members:
        job.report(
            name, state=WorkerState.IDLE, step=7, earliest_stop_step=7, has_formed=False, snapshot=last.id
        )
    keep(job, "abcd", last)
    job.serve("a")
    job.form()
    assert job.members == ["a", "b"]
    for name in "ab":
        job.report(name, has_finished_step=True, holds_state=False, step=8)
    return job


def test_hosts_that_leave_wait_for_a_snapshot_without_them():
    job = leave_two_of_four()
    assert job.generation.snapshot is not None, "nobody else has it"
    new = snapshot(8, "ab", generation=job.generation.number)
    keep(job, "ab", new)
    assert job.generation.snapshot is not None, "complete, but nobody said that both have it"
    keep(job, "a", msgspec.structs.replace(new, phase=SnapshotPhase.COMMITTED))
    assert job.generation.snapshot is None


def test_leaving_hosts_are_not_waited_for_once_they_are_gone_or_a_member_has_the_state():
    job = leave_two_of_four()
    job.give(HostLeft(HostName("c")))
    assert job.generation.snapshot is not None
    job.give(HostLeft(HostName("d")))
    assert job.generation.snapshot is None
    job = leave_two_of_four()
    job.report("b", holds_state=True)
    assert job.generation.snapshot is None


def test_a_host_that_dies_while_others_wait_to_leave_is_restored_from_their_snapshots():
    job = leave_two_of_four()
    job.worker("b", exit_code=-9)
    job.acknowledge("a", step=8)
    assert job.generation.snapshot is not None
    assert job.generation.snapshot.id.step == 7
    assert [source.host for source in job.generation.snapshot.sources] == ["a", "b", "c", "d"]


def test_a_planned_change_without_snapshots_waits_for_nothing():
    job = training("a", "b")
    job.change("a", is_draining=True)
    stop_at_boundary(job, 6)
    job.serve("b")
    assert job.phase is GenerationPhase.FORM


def test_a_hung_worker_is_left_out_in_time_although_no_host_has_the_complete_state():
    job = sharded("abcd")
    job.worker("b", exit_code=-9)
    job.acknowledge("a", "c", step=5)
    job.wait(5.5)
    assert job.members == ["a", "c"], "the snapshot is safe without d"


def test_workers_that_hang_together_restart_from_the_snapshot():
    job = sharded("abc", compile_timeout_s=600.0)
    job.worker("b", exit_code=-9)
    job.wait(19.0)
    assert job.members == ["a", "c"], "a slow machine makes all late, too"
    job.wait(2.0)
    assert job.members == []
    assert job.generation.reason == "a, c did not stop within 21.0 s"
    for name in "abc":
        job.worker(name, exit_code=-9)  # killed by their agents
        job.restart(name)
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["a", "b", "c"])
    assert job.generation.snapshot is not None
    assert job.generation.step == 5


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_the_newest_state_is_waited_for_a_minute_where_a_snapshot_has_an_older_one(has_snapshot: bool):
    job = training("a", "b", compile_timeout_s=600.0)
    if has_snapshot:
        keep(job, "ab", snapshot(4, "ab"))
    job.worker("b", exit_code=-9)
    job.wait(59.0)
    assert job.members == ["a"]
    job.wait(2.0)
    assert job.members == ([] if has_snapshot else ["a"])
    if not has_snapshot:
        return
    for name in "ab":
        job.worker(name, exit_code=-9)
        job.restart(name)
    job.serve()
    assert job.generation.snapshot is not None
    assert (job.phase, job.members, job.generation.step) == (GenerationPhase.FORM, ["a", "b"], 4)


def test_a_worker_that_compiles_is_waited_for_although_no_worker_stops_and_there_is_a_snapshot():
    job = sharded("abc", compile_timeout_s=60.0)
    job.worker("b", exit_code=-9)
    job.report("a", is_compiling=True)
    job.wait(50.0)
    assert job.members == ["a", "c"]


def test_the_records_survive_the_store():
    job = sharded("abcd")
    job.give(HostLeft(HostName("b")))
    job.acknowledge("a", "c", "d", step=6)
    data = msgspec.msgpack.encode(job.generation)
    assert msgspec.msgpack.decode(data, type=type(job.generation)) == job.generation


def test_a_job_that_fails_before_its_first_snapshot_restarts():
    job = Job("a", "b", "c")
    job.serve()
    job.form()
    for name in "abc":
        job.report(name, has_finished_step=True, holds_state=False, step=1)
        job.change(name, snapshot_server=server(name))
    job.give(HostLeft(HostName("b")))
    job.acknowledge("a", "c", step=1)
    assert (job.phase, job.generation.step, job.generation.snapshot) == (GenerationPhase.FORM, 0, None)
    assert job.generation.initial_generation == job.generation.number


def test_a_snapshot_that_is_corrupt_beyond_its_parity_is_not_retried():
    job = sharded("abcd")
    keep(job, "abcd", snapshot(5, "abcd"), snapshot(4, "abcd"))
    job.worker("b", exit_code=-9)
    job.acknowledge("a", "c", "d", step=6)
    job.form()
    for name in "acd":
        job.report(name, holds_state=False)
    failure = WorkerFailure(kind=WorkerFailureKind.SNAPSHOT, text="block 3 of the part of b")
    job.report("c", failure=failure)
    assert job.phase is GenerationPhase.QUIESCE
    assert job.generation.reason == "c could not read the snapshot"
    job.acknowledge("a", "c", "d", step=5)
    job.serve()
    assert job.generation.snapshot is not None
    assert job.generation.snapshot.id.step == 4
    assert [id.step for id in job.generation.unreadable_snapshots] == [5]


def test_when_all_hosts_have_resumed_from_a_snapshot_the_generation_records_it():
    job = sharded("abcd")
    job.give(HostLeft(HostName("b")))
    job.acknowledge("a", "c", "d", step=6)
    job.form()
    assert job.phase is GenerationPhase.ACTIVE
    assert job.generation.snapshot is not None, "some may still read it"
    for name in "acd":
        job.report(name, has_finished_step=True, holds_state=False, step=6)
    assert (job.phase, job.generation.snapshot) == (GenerationPhase.ACTIVE, None)


def test_a_host_that_does_not_train_is_waited_for_until_it_has_reported_its_newest_snapshots():
    job = sharded("abcd", do_agents_answer=False)
    job.worker("b", exit_code=-9)
    job.acknowledge("a", "c", "d", step=9)
    keep(job, "acd", snapshot(8, "abcd"))  # b has it, too, but the store does not know yet
    assert job.phase is GenerationPhase.QUIESCE
    job.wait(100.0)
    assert job.phase is GenerationPhase.QUIESCE, "as long as its agent has a lease"
    job.change("b", snapshots=(snapshot(8, "abcd"),), generation=job.generation.number)
    assert job.phase is GenerationPhase.FORM
    assert job.generation.snapshot is not None
    assert [source.host for source in job.generation.snapshot.sources] == ["a", "b", "c", "d"]


def test_a_host_that_does_not_train_and_loses_its_lease_is_not_waited_for():
    job = sharded("abcd", do_agents_answer=False)
    job.worker("b", exit_code=-9)
    job.acknowledge("a", "c", "d", step=9)
    job.give(HostLeft(HostName("b")))
    assert job.phase is GenerationPhase.FORM
