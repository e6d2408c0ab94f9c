"""How long a kill stops training where collectives cannot be broken off, so that all workers are replaced."""

import statistics
from pathlib import Path

from rich.console import Console

from benchmarks.runs import HOSTS, MANY_STEPS, REPORT_TIMEOUT_S, run_job, wait_healthy
from resilient_jax.chaos.local_job import LocalJob
from resilient_jax.chaos.recovery import wait_stall
from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.launcher import make_host_names

CONFIG = 'abort = "replace"\nreplicated_snapshot_interval_steps = 1\n'


def measure_replacements(script: Path, work: Path, kills: int, console: Console) -> float:
    """Return the median seconds from SIGKILL to a worker until the next step of the workers that replaced all."""
    totals: list[float] = []
    hosts = make_host_names(HOSTS)
    command = [str(script), "ours", str(MANY_STEPS), str(work / "times")]
    with run_job(command, work, config=CONFIG) as job:
        for number in range(kills):
            wait_healthy(job)
            _wait_standbys(job)
            found = wait_stall(job, job.kill(JobComponent.WORKER, hosts[number % HOSTS]), REPORT_TIMEOUT_S)
            totals.append(found.total_s)
            console.print(f"  {number + 1}: {hosts[number % HOSTS]}, all replaced, {found.total_s:.2f} s")
    return statistics.median(totals) if totals else float("nan")


def _wait_standbys(job: LocalJob) -> None:
    """Wait until every host has a standby that can replace its worker."""
    job.wait_report(
        "standbys",
        lambda now: all(h.standby is not None and h.standby.state == "ready" for h in now.hosts),
        REPORT_TIMEOUT_S,
    )
