"""A state in shards over hosts, larger than what any process may take: it trains, is killed, saved and resumed.

The bound is measured, not enforced: a worker looks at its private memory all the time, and the kernel keeps the peak of
other processes. A limit of address space would count stacks of threads, which are as large as this state. Workers are
replaced, as on GPUs: one that goes on in place has its old state and sums beside what it restores, up to three shares
more.
"""

import re
import signal
from pathlib import Path

import psutil
import pytest

from resilient_jax.cluster.job_report import JobComponent, find_pids
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.support.paths import SCRIPTS
from tests.support.patience import patience
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, TinyJob, read_logs

HOSTS = 4
CONFIG = f'{CONFIG_WITHOUT_STANDBYS}min_hosts = {HOSTS}\nabort = "replace"\n'
PATIENCE_S = patience(60)
"""Each step moves a gigabyte between processes that share two cores."""


class LargeJob(TinyJob):
    """A job of `large_mesh.py`: one replica over all hosts."""

    def __init__(self, work: Path) -> None:
        words = [f"fsdp:{HOSTS}"]
        script = SCRIPTS / "large_mesh.py"
        super().__init__(work, HOSTS, CONFIG, ONE_DEVICE, words, script)
        self.patience_s = PATIENCE_S

    def check_memory(self) -> None:
        """Check that no process has had as much memory as the whole state takes."""
        rows = [row for rows in read_logs(self.work).values() for row in rows]
        (whole,) = {row["whole_bytes"] for row in rows}
        assert max(row["growth_bytes"] for row in rows) < whole, "a worker had the whole state"
        report = self.read_report()
        workers = {
            pid for status in report.hosts for pid in find_pids(report, JobComponent.WORKER, status.host)
        }
        peaks = {pid: read_peak_bytes(pid) for pid in set(self.job.find_processes()) - workers}
        assert max(peaks.values()) < whole, (
            "a snapshot server, or what writes a checkpoint, had the whole state"
        )

    def check_steps(self) -> None:
        """Check nothing: bits are compared where a state is small."""


def read_peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had; 0: it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0


@pytest.mark.full
def test_a_state_that_no_process_may_have_whole_is_trained_killed_saved_and_resumed(tmp_path: Path) -> None:
    if psutil.virtual_memory().available < 8 * 2**30:
        pytest.skip("all hosts of this machine together need 8 GiB")
    with LargeJob(tmp_path) as job:
        report = job.wait_training(HOSTS)
        assert report.generation is not None
        victim = next(
            member.host for member in report.generation.membership.members if member.host != report.leader
        )
        job.hold(FailPoint.BEFORE_REDUCE, [victim], ahead=2)
        job.signal(JobComponent.WORKER, victim, signal.SIGKILL)
        job.job.release()
        job.wait_training(HOSTS, report.generation.number)
        job.job.wait_event(
            "a checkpoint of the new generation",
            lambda event: event.kind is EventKind.CHECKPOINT_SAVED and (event.generation or 0) > 1,
            PATIENCE_S,
        )
        job.check_memory()
        job.finish(more_steps=2)
    saved = int((tmp_path / "stop").read_text())
    for log in tmp_path.glob("steps-*"):
        log.unlink()
    (tmp_path / "stop").unlink()
    (tmp_path / "run").rename(tmp_path / "first run")
    with LargeJob(tmp_path) as job:
        job.wait_training(HOSTS)
        assert min(row["step"] for rows in job.logs().values() for row in rows) == saved
        job.check_memory()
        job.finish(more_steps=2)
