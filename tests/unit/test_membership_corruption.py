"""The membership machine goes back to a state that a host which computed wrongly cannot have touched."""

import pytest
from membership_job import Job, keep, snapshot, training

from resilient_jax.errors import ExitCode
from resilient_jax.ids import HostName
from resilient_jax.membership.machine import HostLeft
from resilient_jax.membership.rules import make_initial_state
from resilient_jax.membership.state_loss import StateLossPolicy
from resilient_jax.protocol.records import GenerationPhase, WorkerFailure, WorkerFailureKind

TRUSTED = 6


def failure(trusted=TRUSTED):
    return WorkerFailure(kind=WorkerFailureKind.CORRUPTION, text="b computes wrongly", trusted_step=trusted)


def found_corrupt(*knowing: str, checkpoint: int | None = 4, **config) -> Job:
    """Return a job after 9 steps whose host b has left; of the others these know which states are in doubt."""
    job = training("a", "b", "c", step=9, **config)
    job.give(HostLeft(HostName("b")))
    for name in "ac":
        job.acknowledge(
            name,
            step=9,
            holds_state=True,
            checkpoint_step=checkpoint,
            trusted_step=TRUSTED if name in knowing else None,
        )
    return job


@pytest.mark.parametrize("knowing", ["ac", "a", "c"])
def test_no_state_that_is_in_doubt_is_resumed_from_whichever_member_knows_that_it_is(knowing):
    job = found_corrupt(*knowing)
    job.serve()
    new = job.generation
    assert new.phase is GenerationPhase.FORM
    assert (new.trusted_step, new.sources, new.progress) == (TRUSTED, (), 0)
    assert new.state_loss is not None
    assert (new.state_loss.step, new.state_loss.checkpoint_step) == (9, 4)
    assert "states of more than 6 steps are in doubt" in new.state_loss.reason
    assert job.members == ["a", "c"]


def test_without_a_finding_the_members_keep_their_state():
    job = found_corrupt()
    assert job.phase is GenerationPhase.FORM
    assert (job.generation.step, job.generation.trusted_step) == (9, None)
    assert job.generation.state_loss is None


def test_the_job_does_not_wait_for_hosts_that_may_bring_back_a_state():
    job = found_corrupt("a")
    assert job.asked, "it forms at once"
    assert job.now_s == 0.0


def test_a_snapshot_from_before_is_the_newest_state_and_a_newer_one_is_void():
    job = training("a", "b", "c", step=9)
    keep(job, "abc", snapshot(5, "abc"), snapshot(8, "abc"))
    job.give(HostLeft(HostName("b")))
    for name in "ac":
        job.acknowledge(name, step=9, holds_state=True, checkpoint_step=4, trusted_step=TRUSTED)
    generation = job.generation
    assert generation.phase is GenerationPhase.FORM
    assert generation.snapshot is not None
    assert (generation.step, generation.snapshot.id.step, generation.state_loss) == (5, 5, None)
    assert generation.progress == 5
    job.form()
    job.train(6)
    assert job.generation.trusted_step is None, "all have resumed"
    # Its second failure: the void snapshot of step 8 would be newer than anything else.
    for name in "ac":
        job.acknowledge(name, step=6, holds_state=False)
    job.wait(1.0)
    assert job.generation.snapshot is None or job.generation.snapshot.id.step == 5


def test_the_finding_outlives_the_leader_and_another_loss_before_the_job_has_resumed():
    job = found_corrupt("a")
    job.serve()
    assert job.phase is GenerationPhase.FORM
    job.state = make_initial_state(job.generation, job.state.hosts.values(), job.now_s)
    job.form("a")
    job.worker("c", exit_code=-9)
    job.acknowledge("a", step=0, holds_state=False)
    job.restart("c")
    assert job.generation.trusted_step == TRUSTED
    job.serve()
    new = job.generation
    assert (new.phase, new.sources) == (GenerationPhase.FORM, ())
    assert new.state_loss is not None


@pytest.mark.parametrize("checkpoint", [None, 8], ids=["none", "one that is in doubt"])
def test_without_a_checkpoint_from_before_the_job_ends_with_the_reason(checkpoint):
    job = found_corrupt("a", checkpoint=checkpoint)
    assert job.phase is GenerationPhase.FINISHED
    outcome = job.generation.outcome
    assert outcome is not None
    assert outcome.exit_code == ExitCode.STATE_LOST
    assert "states of more than 6 steps are in doubt" in outcome.message


def test_the_policy_to_restart_begins_with_the_initial_state():
    job = found_corrupt("a", checkpoint=None, state_loss_policy=StateLossPolicy.RESTART)
    job.serve()
    assert job.phase is GenerationPhase.FORM
    assert job.generation.sources == ()


def test_a_member_that_reports_the_finding_breaks_the_generation_off():
    job = training("a", "b", "c", step=9)
    job.report("a", state="idle", failure=failure())
    assert job.phase is GenerationPhase.QUIESCE
    assert job.generation.reason == "b computes wrongly"


def test_a_finding_counts_although_all_workers_are_replaced():
    job = training("a", "b", "c", step=9, replaces_workers=True)
    keep(job, "abc", snapshot(5, "abc"), snapshot(8, "abc"))
    job.report("a", state="idle", failure=failure(), trusted_step=TRUSTED)
    assert job.generation.members == ()
    assert job.generation.trusted_step == TRUSTED
    for name in "abc":
        job.restart(name)
    job.serve()
    assert job.phase is GenerationPhase.FORM
    assert job.generation.snapshot is not None
    assert job.generation.snapshot.id.step == 5


@pytest.mark.parametrize("replaces_workers", [False, True])
def test_the_host_that_was_named_takes_no_part_though_it_did_not_learn_it_itself(replaces_workers):
    job = training("a", "b", "c", step=9, replaces_workers=replaces_workers)
    keep(job, "abc", snapshot(5, "abc"), snapshot(8, "abc"))
    named = (HostName("b"),)
    job.report("a", state="idle", failure=failure(), trusted_step=TRUSTED, corrupt_hosts=named)
    assert job.quarantined == ["b"], "once"
    for name in "abc":
        job.restart(name)
    job.serve()
    assert job.phase is GenerationPhase.FORM
    assert job.members == ["a", "c"]
    assert job.quarantined == ["b"]


def test_what_was_computed_since_the_job_went_back_is_not_in_doubt():
    job = found_corrupt("a")
    job.serve()
    job.form()
    job.worker("c", exit_code=-9)  # before all have made a step
    job.acknowledge("a", step=8, holds_state=True, has_finished_step=True)
    job.serve()
    assert job.generation.trusted_step is not None
    assert (job.generation.step, [s.host for s in job.generation.sources]) == (8, ["a"])


def test_a_finding_that_was_acted_on_is_not_acted_on_again():
    job = found_corrupt("a", "c")
    job.serve()
    job.form("a")
    job.train(7)
    job.restart("b")
    # c has not taken the order yet, and still reports what it found, when the others have gone on.
    before = job.generation.void_snapshots
    job.worker("b", exit_code=-9)
    job.acknowledge("a", "c", step=7, holds_state=True, has_finished_step=True)
    assert job.generation.void_snapshots == before
