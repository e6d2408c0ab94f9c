"""How long a kill stops training where collectives cannot be aborted, so that all workers are replaced."""

import statistics
from pathlib import Path
from typing import Literal

from rich.console import Console

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.launcher import make_host_names
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.recovery import wait_stall
from resilient_jax.protocol.host_status import HostStatus, StandbyState
from tests.benchmarks.runs import AS_ON_A_POD, HOSTS, MANY_STEPS, REPORT_TIMEOUT_S, run_job, wait_healthy

CONFIG = 'abort = "replace"\nreplicated_snapshot_interval_steps = 1\nstandby = "{standby}"\n'

StandbyKind = Literal["off", "seat"]


def measure_replacements(
    script: Path, work: Path, kills: int, console: Console, *, standby: StandbyKind
) -> float:
    """Return the median seconds from SIGKILL to a worker until the next step of the workers that replaced all.

    Args:
        script: of the job.
        work: a folder for it.
        kills: how many to measure.
        console: for a line about each.
        standby: the kind of standbys, as configured.
    """
    totals: list[float] = []
    hosts = make_host_names(HOSTS)
    command = [str(script), "ours", str(MANY_STEPS), str(work / "times")]
    with run_job(command, work, config=CONFIG.format(standby=standby), options=AS_ON_A_POD) as job:
        for number in range(kills):
            wait_healthy(job)
            if standby == "seat":
                wait_standbys(job)
            found = wait_stall(job, job.kill(JobComponent.WORKER, hosts[number % HOSTS]), REPORT_TIMEOUT_S)
            totals.append(found.total_s)
            console.print(
                f"  {number + 1}: {hosts[number % HOSTS]}, all replaced ({standby}), {found.total_s:.2f} s"
            )
    return statistics.median(totals) if totals else float("nan")


def wait_standbys(job: LocalJob) -> None:
    """Wait until every host has a standby that can replace its worker."""
    job.wait_report("standbys", lambda now: all(map(_has_standby, now.hosts)), REPORT_TIMEOUT_S)


def _has_standby(host: HostStatus) -> bool:
    return host.standby is not None and host.standby.state is StandbyState.READY
