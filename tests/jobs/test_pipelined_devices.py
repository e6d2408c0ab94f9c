"""A model that is split over hosts with several devices each: tensor 2 x pipeline 2 x replica 2, and a host dies."""

import signal
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.support.pipelined_job import PipelinedJob

HOSTS, STAGES = 4, 2
LAST_MICROBATCH = 5
TASKS_OF_A_HOST = 3 * (LAST_MICROBATCH + 1)
"""Forward, input gradient and weight gradient of each microbatch, where all go through one replica."""


def test_a_killed_stage_of_two_devices_costs_no_bit(tmp_path: Path) -> None:
    with PipelinedJob(tmp_path, HOSTS, STAGES, axes={"tensor": 2}) as job:
        job.wait_protected(HOSTS)
        before = job.wait_training(HOSTS).generation
        assert before is not None
        job.hold(FailPoint.BEFORE_INPUT_GRADIENT, ["host-1"])
        job.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        job.job.release()
        job.wait_training(HOSTS - 1, after_generation=before.number)
        # Without its service nobody can join the world any more: all form another one, with what they have.
        job.signal(JobComponent.COORDINATION_SERVICE, "leader", signal.SIGKILL)
        after = job.wait_training(HOSTS).generation
        assert after is not None
        assert after.membership.world > before.membership.world
        # Both blocks and what was done of the step are kept: nobody reads a snapshot.
        kinds = {event.kind for event in job.job.read_events()}
        assert EventKind.PIPELINE_STATE_KEPT in kinds
        assert EventKind.SNAPSHOT_RESTORED not in kinds
        job.finish()


@pytest.mark.full
def test_blocks_that_nobody_has_come_back_from_snapshots_and_the_step_goes_on_in_a_new_world(
    tmp_path: Path,
) -> None:
    """What the host that is left had done of the step on both devices it has done, although these went away."""
    with PipelinedJob(tmp_path, 2, STAGES, axes={"fsdp": 2}) as job:
        job.wait_protected(2)
        before = job.wait_training(2).generation
        assert before is not None
        step = job.hold(FailPoint.BEFORE_WEIGHT_GRADIENT, ["host-1"], index=LAST_MICROBATCH)
        # A step goes on only from the state that it began with.
        job.job.wait_for("its snapshot", lambda: job.promised_step() == step or None, job.patience_s)
        job.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        job.job.release()
        after = job.wait_training(2, after_generation=before.number).generation
        assert after is not None
        assert after.membership.world > before.membership.world
        events = [e for e in job.job.read_events() if (e.generation or 0) > before.number]
        assert EventKind.SNAPSHOT_RESTORED in {event.kind for event in events}
        (resumed,) = [e for e in events if (e.kind, e.host) == (EventKind.PIPELINE_STEP_RESUMED, "host-0")]
        assert resumed.detail["step"] == step
        # The other host had sent back every gradient, so only its own tasks are computed again.
        assert resumed.detail["kept"] == TASKS_OF_A_HOST
        changes = {
            str(e.detail["change"])
            for e in events
            if e.kind is EventKind.WORLD_FORMED and e.generation == resumed.generation
        }
        assert changes == {"reform"}
        job.finish()
