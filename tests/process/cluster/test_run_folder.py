"""A job keeps its run folder, and is told to end only by what is said."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.run_directory import CONTACT_FILE, HostLog, make_log_path
from resilient_jax.events import EventKind
from resilient_jax.telemetry.event_log import read_events
from tests.process.cluster.gated_job import STUB, GatedJob
from tests.support.agents import run_command
from tests.support.patience import wait_until


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[GatedJob]:
    gated = GatedJob(tmp_path)
    with gated.job:
        gated.wait_members("host-0", "host-1")
        yield gated


def test_a_run_folder_that_is_removed_is_made_again_and_stays_the_jobs(
    gated: GatedJob, tmp_path: Path
) -> None:
    folder = gated.job.run_directory
    with gated.job.output_path.open() as output:
        # At once: the job may write into a folder while that is removed, which is then not empty.
        shutil.rmtree(folder.rename(tmp_path / "removed"))
        code, said = run_command(["launch", "--hosts", "1", "--run-dir", str(folder), STUB])
        assert code == 2, said
        assert "found a job that still runs in this folder" in said
        wait_until("how to reach the job", (folder / CONTACT_FILE).exists)
        code, said = run_command(["status", str(folder)])
        assert (code, "host-1" in said) == (0, True), said
        words = f"the run folder {folder} was removed while the job runs, and is made again"
        wait_until("a word about it", lambda: words in output.read())
    gated.job.kill(JobComponent.WORKER, "host-1", signal.SIGKILL)
    events = make_log_path(folder, "host-1", HostLog.EVENTS)
    wait_until(
        "the events in the new folder",
        lambda: events.exists() and EventKind.WORKER_EXITED in {event.kind for event in read_events(events)},
    )
    gated.wait_members("host-0", "host-1")
    code, said = run_command(["launch", "--hosts", "1", "--run-dir", str(folder), STUB])
    assert code == 2, said


def test_the_end_of_its_terminal_is_a_notice_to_the_job(gated: GatedJob) -> None:
    for _ in range(2):  # from the kernel, and from the shell
        gated.job.process.send_signal(signal.SIGHUP)
    assert gated.job.wait() == 84, gated.job.read_tail()
    said = gated.job.read_output()
    assert "got SIGHUP, as when a terminal is closed: the job ends at the next step boundary" in said
    assert "all hosts got a notice to leave" in said
