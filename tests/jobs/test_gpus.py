"""Jobs on GPUs, with NCCL. One GPU is enough: hosts share it."""

import signal
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from resilient_jax.protocol.snapshots import SnapshotPhase
from tests.jobs.gpu_needed import needs_gpu
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, TinyJob, is_training, protect

pytestmark = needs_gpu
HOSTS = 3
FAULTS = {
    "a worker dies": (JobComponent.WORKER, signal.SIGKILL),
    "a worker is stopped": (JobComponent.WORKER, signal.SIGSTOP),
    "a host dies": (JobComponent.HOST, signal.SIGKILL),
    "the coordination service dies": (JobComponent.COORDINATION_SERVICE, signal.SIGKILL),
}


@pytest.mark.parametrize("abort", ["interrupt", "replace"])
def test_a_job_on_gpus_survives_each_fault_with_equal_bits(abort: str, tmp_path: Path) -> None:
    config = f'{protect(CONFIG_WITHOUT_STANDBYS, interval_steps=1)}abort = "{abort}"\n'
    with TinyJob(tmp_path, HOSTS, options=ONE_DEVICE, config=config, platform="gpu") as job:
        number = 0
        for what, (part, kind) in FAULTS.items():
            report = wait_protected(job, number)
            assert report.generation is not None
            number = report.generation.number
            hosts = ["host-1", *(member.host for member in report.generation.membership.members)]
            host = next(host for host in hosts if any(find_pids(report, part, host)))
            print(f"step {job.step()}, generation {number}: {what} ({host})", flush=True)
            job.signal(part, host, kind)
            job.wait_training(HOSTS, number)
            job.wake_all()
        job.finish(more_steps=5)


def wait_protected(job: TinyJob, after_generation: int) -> JobReport:
    """Wait until all hosts train and have a snapshot of this generation; return the job's report."""

    def is_protected(report: JobReport) -> bool:
        number = report.generation.number if report.generation is not None else 0
        snapshots = [snapshot for status in report.hosts for snapshot in status.snapshots]
        return is_training(report, HOSTS, after_generation) and any(
            s.phase is SnapshotPhase.COMMITTED and s.id.generation == number for s in snapshots
        )

    return job.wait_report("all hosts training, with a snapshot", is_protected)
