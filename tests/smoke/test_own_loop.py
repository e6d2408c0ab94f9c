"""A hand-written loop with checkpoints of its own: a host gets notice, all workers die, the whole job dies.

After each it goes on: with the hosts that stay, from its newest checkpoint by itself, and when it is launched again.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import EventKind
from tests.support.kills import generation_of
from tests.support.paths import SCRIPTS
from tests.support.patience import patience
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, TinyJob, read_logs

SCRIPT = SCRIPTS / "own_loop.py"
HOSTS = 3
CONFIG = f"{CONFIG_WITHOUT_STANDBYS}start_timeout_s = 10.0\n"
"""Without a state in memory the others wait so long for the host that left, which might come back."""


class OwnLoopJob(TinyJob):
    """A job of `own_loop.py`, with the checkpoints of all jobs of these tests."""

    def __init__(self, work: Path, hosts: int, checkpoints: Path) -> None:
        super().__init__(work, hosts, CONFIG, options=ONE_DEVICE, words=[str(checkpoints)], script=SCRIPT)
        self._checkpoints = checkpoints

    def newest_checkpoint(self) -> int:
        """Return the step of the newest checkpoint; 0: there is none."""
        return max((int(path.stem) for path in self._checkpoints.glob("*.npz")), default=0)

    def wait_saved(self, after: int) -> int:
        """Wait for a checkpoint of a later step, and return its step."""
        self.job.wait_for("a checkpoint", lambda: self.newest_checkpoint() > after or None)
        return self.newest_checkpoint()

    def check_steps(self) -> None:
        """Do nothing: the last test checks the steps of both jobs together."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own") / "checkpoints"


@pytest.fixture(scope="module")
def job(checkpoints: Path) -> Iterator[OwnLoopJob]:
    """Yield a running job, of which nothing is left afterwards, although its launcher was killed."""
    with OwnLoopJob(checkpoints.parent / "first", HOSTS, checkpoints) as first:
        yield first


def test_a_host_that_gets_notice_leaves_and_no_step_is_lost(job: OwnLoopJob) -> None:
    before = generation_of(job.wait_training(HOSTS)).number
    job.signal(JobComponent.AGENT, "host-2", signal.SIGTERM)
    job.wait_training(HOSTS - 1, before)
    assert not any(event.kind is EventKind.STATE_LOST for event in job.job.read_events())


def test_all_workers_die_and_the_job_goes_on_from_its_newest_checkpoint(job: OwnLoopJob) -> None:
    before = generation_of(job.wait_training(HOSTS - 1)).number
    saved = job.wait_saved(0)
    for host in ("host-0", "host-1"):
        job.signal(JobComponent.WORKER, host, signal.SIGKILL)
    job.wait_training(HOSTS - 1, before)
    (lost,) = [event for event in job.job.read_events() if event.kind is EventKind.STATE_LOST]
    assert int(lost.detail["goes_on_from"]) >= saved


def test_the_whole_job_dies_and_is_launched_again(job: OwnLoopJob, checkpoints: Path) -> None:
    saved = job.wait_saved(job.newest_checkpoint())
    with job:
        pass  # its launcher and all its processes get SIGKILL
    with OwnLoopJob(checkpoints.parent / "second", HOSTS - 1, checkpoints) as second:
        second.wait_training(HOSTS - 1)
        second.finish(more_steps=5)
    rows = [row for work in (job.work, second.work) for log in read_logs(work).values() for row in log]
    again = [row["step"] for log in read_logs(second.work).values() for row in log]
    assert min(again) >= saved, f"went back to step {min(again)}, {saved} was saved"
    total = max(again) + 1
    assert {row["step"] for row in rows} == set(range(total)), "a step is missing"
    expected = read_alone(checkpoints.parent / "alone", total)
    for row in rows:
        assert row["digest"] == expected[row["step"]], f"step {row['step']}: other bits"


def read_alone(work: Path, total: int) -> dict[int, str]:
    """Return the digest after each step of an undisturbed run on one host, which has no checkpoint."""
    work.mkdir()
    (work / "stop").write_text(str(total))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(work), str(work / "checkpoints"), "pace=0"],
        timeout=patience(10),
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {row["step"]: row["digest"] for rows in read_logs(work).values() for row in rows}
