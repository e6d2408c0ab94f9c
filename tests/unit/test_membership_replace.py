"""The membership machine where collectives cannot be aborted: all workers of a world are replaced."""

from membership_job import Job, keep, sharded, snapshot, training

from resilient_jax.ids import HostName, Incarnation
from resilient_jax.membership.machine import HostLeft
from resilient_jax.protocol.records import (
    GenerationPhase,
    JobOutcomeKind,
    WorkerFailure,
    WorkerFailureKind,
    WorkerReport,
    WorkerState,
    WorkerStatus,
)


def replace(job: Job, *names: str) -> None:
    """Kill and restart the workers of these hosts, as their agents do."""
    for name in names:
        job.restart(name)


def test_after_a_death_no_worker_of_the_world_joins_the_next_one():
    job = sharded("abcd", replaces_workers=True)
    job.worker("b", exit_code=-9)
    assert job.phase is GenerationPhase.QUIESCE
    assert job.members == []
    # A survivor's collective failed by itself, before its agent has read what the leader decided.
    job.report("a", state=WorkerState.IDLE)
    asked = len(job.asked)
    replace(job, "b", "c", "d")
    assert len(job.asked) == asked, "the worker of a is yet to be replaced, so there is no world to prepare"
    replace(job, "a")
    job.serve()
    new = job.generation
    assert (new.phase, job.members) == (GenerationPhase.FORM, list("abcd"))
    assert new.snapshot is not None
    assert (new.snapshot.id.step, new.step, new.sources) == (5, 5, ())


def test_a_host_that_is_gone_is_not_waited_for():
    job = sharded("abcd", replaces_workers=True, regroup_grace_s=1000.0)
    job.give(HostLeft(HostName("b")))
    replace(job, "a", "c", "d")
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, list("acd"))
    assert job.generation.snapshot is not None


def test_workers_that_start_slowly_are_waited_for():
    job = sharded("abcd", replaces_workers=True, regroup_grace_s=5.0, forming_timeout_s=60.0)
    job.worker("b", exit_code=-9)
    asked = len(job.asked)
    starting = WorkerReport(state=WorkerState.STARTING)
    job.change("d", worker=WorkerStatus(incarnation=Incarnation(2), pid=2, report=starting))
    replace(job, *"abc")
    job.wait(50.0)
    assert len(job.asked) == asked
    job.wait(11.0)
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, list("abc"))


def test_the_world_is_another_after_every_replacement():
    job = sharded("abcd", replaces_workers=True)
    world = job.generation.world
    job.worker("b", exit_code=-9)
    replace(job, *"abcd")
    job.serve()
    assert job.generation.world > world


def test_a_death_while_the_next_world_is_formed_replaces_all_again():
    job = sharded("abcd", replaces_workers=True)
    job.worker("b", exit_code=-9)
    replace(job, *"abcd")
    job.serve()
    number = job.generation.number
    job.worker("c", exit_code=-9)
    assert (job.phase, job.members) == (GenerationPhase.QUIESCE, [])
    for name in "abcd":
        job.restart(name, 3)
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, list("abcd"))
    assert job.generation.number > number


def test_collectives_that_fail_without_a_death_end_the_job_after_a_few_tries():
    job = sharded("abcd", replaces_workers=True, max_collective_retries=2)
    failure = WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="NCCL error")
    for attempt in range(3):
        assert job.phase is GenerationPhase.ACTIVE
        job.report("a", state=WorkerState.IDLE, failure=failure)
        for name in "abcd":
            job.restart(name, attempt + 2)
        if attempt < 2:
            job.serve()
            job.form()
    assert job.quarantined == ["a"]
    job.wait(job.config.regroup_grace_s + 1)  # for a host of the four that is missing
    job.serve()
    job.form()
    job.report("b", state=WorkerState.IDLE, failure=failure)
    for name in "bcd":
        job.restart(name, 9)
    assert job.generation.outcome is not None
    assert job.generation.outcome.kind is JobOutcomeKind.USER_ERROR
    assert "NCCL error" in job.generation.outcome.message


def test_a_member_that_did_not_join_in_time_has_all_replaced():
    job = sharded("abcd", replaces_workers=True, forming_timeout_s=10.0)
    job.worker("b", exit_code=-9)
    replace(job, *"abcd")
    job.serve()
    job.wait(11.0)
    assert (job.phase, job.members) == (GenerationPhase.QUIESCE, [])


def test_the_losses_that_the_state_stands_are_those_of_its_snapshot_alone():
    kept = training("abcd")
    keep(kept, "abcd", snapshot(5, "abcd", parity=2))
    replaced = training("abcd", replaces_workers=True)
    keep(replaced, "abcd", snapshot(5, "abcd", parity=2))
    assert (kept.generation.losses_left, replaced.generation.losses_left) == (3, 2)
