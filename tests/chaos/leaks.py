"""Finds what a job leaves behind on its machine, and samples the resources of its long-lived processes."""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from resilient_jax.cluster.run_directory import CONTACT_FILE
from resilient_jax.local_job.local_job import LocalJob
from tests.chaos.invariants import Invariant, Violation
from tests.chaos.resource_growth import ProcessSample

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_WORDS = ("resilient", "gloo", "jax")
"""Words in the names of segments that a job might create. This package creates none; other programs may."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CLEANUP_TIMEOUT_S = 15.0
"""Timeout for the kernel to remove killed processes."""
CLEANUP_POLL_S = 0.1


def list_shared_segments() -> frozenset[str]:
    """Return the names of the shared memory segments that may belong to a job."""
    with contextlib.suppress(OSError):
        names = os.listdir(SHARED_MEMORY)
        return frozenset(name for name in names if any(word in name for word in SEGMENT_WORDS))
    return frozenset()


def check_leftovers(job: LocalJob, segments: frozenset[str]) -> list[Violation]:
    """Return a violation for each process, segment or file that an ended job still has after `CLEANUP_TIMEOUT_S`.

    Args:
        job: the job, which has ended.
        segments: the shared memory from before the job.
    """
    deadline_s = time.monotonic() + CLEANUP_TIMEOUT_S
    while (found := _list_leftovers(job, segments)) and time.monotonic() < deadline_s:
        time.sleep(CLEANUP_POLL_S)
    return [Violation(invariant=Invariant.NO_LEFTOVERS, description=text) for text in found]


def _list_leftovers(job: LocalJob, segments: frozenset[str]) -> list[str]:
    names = [CONTACT_FILE, *(path.name for path in job.run_directory.glob(".writable-*"))]
    return [
        *(f"process {pid}" for pid in job.find_processes()),
        *(f"shared memory {name}" for name in list_shared_segments() - segments),
        *(f"{name} in the run folder" for name in names if (job.run_directory / name).exists()),
    ]


class ProcessIdentity(NamedTuple):
    """A process, distinct from a later one with the same pid: a busy machine reuses pids within minutes."""

    pid: int
    start_ticks: int


def identify_process(pid: int) -> ProcessIdentity | None:
    """Return the process that has this pid now; None if it is gone, or a zombie that its parent has not reaped."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if stat[0] not in ("Z", "X"):
            # Field 22 of proc(5), starttime: what is left after the process's name begins with field 3.
            return ProcessIdentity(pid, int(stat[19]))
    return None


def sample_job(report: JobReport, launcher_pid: int) -> list[ProcessSample]:
    """Sample the long-lived processes: the launcher, and the agent and the snapshot server of each host."""
    named = [(launcher_pid, "launcher")]
    for host in (status.host for status in report.hosts):
        agent = "leading agent" if host == report.leader else "agent"
        for component, name in (
            (JobComponent.AGENT, agent),
            (JobComponent.SNAPSHOT_SERVER, "snapshot server"),
        ):
            named += [(pid, f"{name} of {host}") for pid in find_pids(report, component, host)]
    return [found for pid, name in named if (found := _sample_process(pid, name)) is not None]


def _sample_process(pid: int, name: str) -> ProcessSample | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        if (found := identify_process(pid)) is not None:
            return ProcessSample(
                name=name,
                pid=pid,
                start_ticks=found.start_ticks,
                rss_bytes=int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES,
                descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            )
    return None
