"""A pipeline in a loop of the user's, over four hosts of which one is killed: the bits of `fit` on one host."""

import signal
from pathlib import Path

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.support.pipelined_job import PipelinedJob

HOSTS, STAGES = 4, 2


def test_a_stage_killed_in_an_own_loop_costs_no_bit(tmp_path: Path) -> None:
    with PipelinedJob(tmp_path, HOSTS, STAGES, words=["loop=own"]) as job:
        job.wait_protected(HOSTS)
        before = job.wait_training(HOSTS).generation
        assert before is not None
        job.hold(FailPoint.BEFORE_INPUT_GRADIENT, ["host-1"])
        job.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        job.job.release()
        job.wait_protected(HOSTS, after_generation=before.number)
        kinds = [event.kind for event in job.job.read_events()]
        assert EventKind.PIPELINE_STEP_RESUMED in kinds
        assert EventKind.SNAPSHOT_RESTORED not in kinds
        job.finish()
