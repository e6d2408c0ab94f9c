"""The membership machine resumes from a checkpoint when no host's memory has the state."""

import msgspec
import pytest
from membership_job import Job, keep, sharded, snapshot, training

from resilient_jax.errors import ExitCode
from resilient_jax.ids import HostName
from resilient_jax.membership.machine import HostLeft
from resilient_jax.membership.rules import make_initial_state
from resilient_jax.membership.state_loss import StateLossPolicy
from resilient_jax.protocol.records import (
    GenerationPhase,
    JobOutcomeKind,
    WorkerFailure,
    WorkerFailureKind,
    WorkerState,
)


def lost(*, checkpoint: int | None = 3, **config) -> Job:
    """Return a sharded job of four hosts that has lost two, one more than parity covers."""
    job = sharded("abcd", regroup_grace_s=5.0, **config)
    for host in "bc":
        job.give(HostLeft(HostName(host)))
    job.acknowledge("a", "d", step=6)
    for host in "ad":
        job.report(host, checkpoint_step=checkpoint)
    return job


def begun_again(job: Job) -> Job:
    """Return the job when the remaining hosts form the world in which they resume."""
    job.wait(6.0)
    job.serve()
    assert job.phase is GenerationPhase.FORM
    return job


def test_with_more_lost_hosts_than_parity_training_resumes_from_the_newest_checkpoint_and_reports_the_lost_steps():
    job = lost(checkpoint=3)
    assert job.phase is GenerationPhase.QUIESCE, "the lost hosts may come back"
    new = begun_again(job).generation
    assert new.state_loss is not None
    assert (new.state_loss.step, new.state_loss.checkpoint_step) == (6, 3)
    assert "b, c are; a, d survive" in new.state_loss.reason
    assert "the state of step 6 is lost; going on from the checkpoint of step 3, 3 steps back" in new.reason
    assert (new.step, new.progress, new.snapshot, new.initial_generation) == (0, 0, None, new.number)
    assert job.members == ["a", "d"]


def test_the_newest_checkpoint_that_any_host_sees_counts():
    job = lost(checkpoint=None)
    job.report("d", checkpoint_step=4)
    job.report("a", checkpoint_step=2)
    generation = begun_again(job).generation
    assert generation.state_loss is not None
    assert generation.state_loss.checkpoint_step == 4


def test_nothing_is_decided_while_a_host_still_polls_for_checkpoints():
    job = lost(checkpoint=None)
    job.report("d", is_polling_checkpoints=True)
    job.wait(6.0)
    assert job.phase is GenerationPhase.QUIESCE, "d may yet see one"
    job.report("d", is_polling_checkpoints=False, checkpoint_step=4)
    job.serve()
    assert job.generation.state_loss is not None
    assert job.generation.state_loss.checkpoint_step == 4


def test_storage_that_hangs_on_one_host_delays_the_decision_no_longer_than_the_poll_timeout():
    job = lost(checkpoint=3, checkpoint_poll_timeout_s=8.0)
    job.report("d", is_polling_checkpoints=True)
    job.wait(7.0)
    assert job.phase is GenerationPhase.QUIESCE
    job.wait(2.0)
    job.serve()
    assert job.generation.state_loss is not None
    assert job.generation.state_loss.checkpoint_step == 3


def test_the_policy_to_stop_does_not_wait_for_a_checkpoint_poll():
    job = lost(checkpoint=3, state_loss_policy=StateLossPolicy.STOP)
    job.report("d", is_polling_checkpoints=True)
    job.wait(6.0)
    assert job.phase is GenerationPhase.FINISHED


def test_a_host_that_has_just_started_may_be_the_only_one_that_sees_the_checkpoint():
    job = training("a", "b", "c", regroup_grace_s=5.0)
    for name in "abc":
        job.worker(name, exit_code=-9)
    for name in "abc":
        job.restart(name)
        job.report(name, checkpoint_step=4)
    job.wait(6.0)
    job.serve()
    lost = job.generation.state_loss
    assert lost is not None
    assert (lost.step, lost.checkpoint_step) == (5, 4)


def test_without_a_checkpoint_the_job_ends_with_what_is_lost_and_that_there_is_none():
    job = lost(checkpoint=None)
    job.wait(6.0)
    outcome = job.generation.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.exit_code) == (JobOutcomeKind.STATE_LOST, ExitCode.STATE_LOST)
    assert "b, c are; a, d survive" in outcome.message
    assert "no host sees a checkpoint" in outcome.message


def test_the_policy_to_stop_ends_the_job_and_names_the_checkpoint():
    job = lost(checkpoint=3, state_loss_policy=StateLossPolicy.STOP)
    job.wait(6.0)
    outcome = job.generation.outcome
    assert outcome is not None
    assert outcome.kind is JobOutcomeKind.STATE_LOST
    assert "the checkpoint of step 3" in outcome.message


def test_a_job_that_may_restart_resumes_from_the_checkpoint_if_there_is_one():
    config = {"state_loss_policy": StateLossPolicy.RESTART}
    with_one = begun_again(lost(checkpoint=3, **config)).generation
    assert with_one.state_loss is not None
    assert with_one.state_loss.checkpoint_step == 3
    without = begun_again(lost(checkpoint=None, **config)).generation
    assert without.state_loss is not None
    assert without.state_loss.checkpoint_step is None
    assert "beginning again with the initial state" in without.reason


def test_a_snapshot_that_can_be_restored_takes_precedence_over_a_checkpoint():
    job = sharded("abcd")
    for host in "abcd":
        job.report(host, checkpoint_step=4)
    job.give(HostLeft(HostName("b")))
    job.acknowledge("a", "c", "d", step=6)
    assert job.generation.snapshot is not None
    assert job.generation.state_loss is None


def test_a_lost_host_that_comes_back_in_time_saves_the_steps_since_the_checkpoint():
    job = lost(checkpoint=3)
    job.restart("b")
    keep(job, "b", snapshot(5, "abcd"))
    job.serve()
    assert job.generation.snapshot is not None
    assert job.generation.state_loss is None


def test_the_loss_is_over_once_all_hosts_have_resumed():
    job = begun_again(lost())
    job.form()
    assert job.generation.state_loss is not None, "they may still read the checkpoint"
    for name in "ad":
        job.report(name, has_finished_step=True, holds_state=False, step=4)
    assert (job.phase, job.generation.state_loss) == (GenerationPhase.ACTIVE, None)


def test_another_failure_before_the_first_step_leads_to_the_checkpoint_again():
    job = begun_again(lost())
    job.form()
    job.restart("b")
    job.worker("d", exit_code=-9)
    job.acknowledge("a", step=3, holds_state=False)
    job.serve()
    again = job.generation
    assert (again.phase, job.members, again.step) == (GenerationPhase.FORM, ["a", "b"], 0)
    assert again.state_loss is not None
    assert again.state_loss.checkpoint_step == 3
    assert again.initial_generation == again.number


@pytest.mark.parametrize("dies", [True, False])
def test_a_checkpoint_that_cannot_be_read_ends_the_job_with_what_was_lost_and_the_reason(dies):
    job = begun_again(lost())
    job.form()
    job.report(
        "a",
        failure=WorkerFailure(
            kind=WorkerFailureKind.USER, text="CheckpointUnreadable: step 3: a bit is wrong"
        ),
    )
    if dies:
        job.worker("a", exit_code=1, error="CheckpointUnreadable: step 3: a bit is wrong")
    outcome = job.generation.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.exit_code) == (JobOutcomeKind.STATE_LOST, ExitCode.STATE_LOST)
    assert "b, c are; a, d survive" in outcome.message
    assert "step 3: a bit is wrong" in outcome.message


def test_an_error_in_user_code_after_the_loss_is_over_is_reported_as_such():
    job = begun_again(lost())
    job.form()
    for name in "ad":
        job.report(name, has_finished_step=True, holds_state=False, step=4)
    job.report("a", failure=WorkerFailure(kind=WorkerFailureKind.USER, text="oops"))
    assert job.generation.outcome is not None
    assert job.generation.outcome.kind is JobOutcomeKind.USER_ERROR


def test_progress_is_recorded_periodically_in_case_all_hosts_that_committed_it_die():
    job = training("a", "b", regroup_grace_s=5.0, progress_interval_s=10.0)
    assert job.generation.progress == 5, "at once: there is something to lose"
    job.wait(6.0)
    job.train(90)
    assert job.generation.progress == 5, "not with every step"
    job.wait(5.0)
    assert (job.phase, job.generation.progress) == (GenerationPhase.ACTIVE, 90)
    number = len(job.published)
    job.wait(50.0)
    assert len(job.published) == number, "nothing has changed"


def test_if_no_host_with_the_newest_step_is_left_the_loss_is_reported_as_a_lower_bound():
    job = training("a", "b", regroup_grace_s=5.0)
    job.train(90)
    job.state = make_initial_state(
        job.generation, (), job.now_s
    )  # that of a new leader, since the old one is gone, too
    for name in "ab":
        job.restart(name)
        job.report(name, checkpoint_step=60)
    generation = begun_again(job).generation
    assert generation.state_loss is not None
    assert (generation.state_loss.step, generation.state_loss.is_lower_bound) == (60, True)
    assert "the state of step 60 or a later one is lost; going on from the checkpoint of step 60" in (
        generation.reason
    )
    assert "back" not in generation.reason
    known = begun_again(lost()).generation.state_loss
    assert known is not None
    assert not known.is_lower_bound


def test_a_job_that_starts_for_the_first_time_has_no_state_loss():
    job = Job("a", "b")
    for name in "ab":
        job.report(name, checkpoint_step=7)
    job.serve()
    assert job.phase is GenerationPhase.FORM
    assert job.generation.state_loss is None


def test_the_records_survive_the_store():
    generation = begun_again(lost()).generation
    data = msgspec.msgpack.encode(generation)
    assert msgspec.msgpack.decode(data, type=type(generation)) == generation


def test_a_snapshot_from_before_the_loss_is_not_restored():
    job = begun_again(lost())
    job.form()
    for name in "ad":
        job.report(name, has_finished_step=True, holds_state=False, step=4)
    for name in "bc":
        job.restart(name)
        job.report(name, state=WorkerState.IDLE)
        keep(job, name, snapshot(5, "abcd"))
    job.worker("a", exit_code=-9)
    job.acknowledge("d", step=4)
    assert job.generation.snapshot is None
