"""A host of a pipeline that loses a device goes on with those that are left, and takes it back."""

import signal
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.jobs.unequal_pipeline import UnequalPipelinedJob, check_unequal_steps
from tests.support.agents import run_command, start_agents
from tests.support.pipelined_job import PATIENCE_S, SCRIPT
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS

CONFIG = f'{CONFIG_WITHOUT_STANDBYS}devices_after_loss = "all"\n'
TOGETHER = f"{CONFIG}min_hosts = 2\n"


def list_cuts(job: UnequalPipelinedJob) -> list[str]:
    return [str(e.detail["cut"]) for e in job.job.read_events() if e.kind is EventKind.PIPELINE_FORMED]


def lose_device(job: UnequalPipelinedJob) -> int:
    """Take a device of host-1 out; return the generation in which the host trains with the other one."""
    job.wait_protected(2)
    before = job.wait_training(2).generation
    assert before is not None
    assert run_command(["hosts", str(job.work / "run"), "drain", "host-1:1"])[0] == 0
    job.job.wait_event("a worker with one device", lambda event: event.kind is EventKind.DEVICES_CHANGED)
    job.job.wait_event(
        "a pipeline of unequal hosts",
        lambda event: (
            event.kind is EventKind.PIPELINE_FORMED and "(1 of 2 devices)" in str(event.detail["cut"])
        ),
        job.patience_s,
    )
    job.wait_protected(2, after_generation=before.number)
    now = job.wait_training(2, after_generation=before.number).generation
    assert now is not None
    return now.number


@pytest.mark.full
def test_a_stage_that_loses_a_device_goes_on_with_the_other_and_takes_it_back(tmp_path: Path) -> None:
    """In between the other host dies with all it had in memory: that comes from parity, of unequal hosts."""
    with UnequalPipelinedJob(tmp_path, 2, 2, axes={"fsdp": 2}, config=TOGETHER) as job:
        unequal = lose_device(job)
        job.signal(JobComponent.HOST, "host-0", signal.SIGKILL)
        restored = job.job.wait_event(
            "blocks from parity",
            lambda e: e.kind is EventKind.SNAPSHOT_RESTORED and (e.generation or 0) > unequal,
            job.patience_s,
        )
        assert int(restored.detail["decoded"]) > 0
        job.wait_protected(2, after_generation=unequal)
        again = job.wait_training(2, after_generation=unequal).generation
        assert again is not None
        assert "(1 of 2 devices)" in list_cuts(job)[-1]
        unequal = again.number
        assert run_command(["hosts", str(tmp_path / "run"), "clear", "host-1:1"])[0] == 0
        job.wait_protected(2, after_generation=unequal)
        assert "devices" not in list_cuts(job)[-1]
        job.finish()


@pytest.mark.full
def test_microbatches_of_a_dead_host_with_one_device_are_computed_again_with_two(tmp_path: Path) -> None:
    """Each host is a replica of one stage, so all units are on both, and all bits are compared."""
    with UnequalPipelinedJob(tmp_path, 2, 1, axes={"fsdp": 2}, config=CONFIG) as job:
        unequal = lose_device(job)
        job.hold(FailPoint.BEFORE_WEIGHT_GRADIENT, ["host-1"])
        job.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        job.job.release()
        job.wait_protected(2, after_generation=unequal)
        assert "(1 of 2 devices)" in list_cuts(job)[-1]
        job.finish()


@pytest.mark.full
def test_hosts_with_four_and_three_devices_begin_together_and_have_the_same_bits(tmp_path: Path) -> None:
    """Of the hidden sizes none divides by three: weights are replicated along that axis, examples shared."""
    words = ["rows=12"]
    (tmp_path / "stop").write_text("12")
    first, second = start_agents(
        tmp_path,
        [str(SCRIPT), str(tmp_path), "2", *words, "fsdp=4", "pace=0"],
        config=TOGETHER,
        devices=(4, 3),
    )
    with first, second:
        assert (second.wait(PATIENCE_S), first.wait(PATIENCE_S)) == (0, 0), first.output() + second.output()
        output = first.output() + second.output()
    events = "".join(path.read_text() for path in tmp_path.glob("run-*/**/*.jsonl"))
    assert "(3 of 4 devices)" in events
    assert EventKind.STATE_DIFFERS not in events
    check_unequal_steps(tmp_path, output, 0, {"fsdp": 4}, words)
