"""A notice to a whole job, of each kind: it saves a checkpoint, ends and says so; started again it goes on from there.

As Slurm does at the time limit, each notice goes to every process of the job, and twice.
"""

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from resilient_jax.errors import ExitCode
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.jobs.launched import make_environment, run_alone
from tests.support.agents import run_command
from tests.support.paths import SCRIPTS
from tests.support.patience import patience
from tests.support.patient_job import PatientJob

DEADLINE_S = patience(15)
CONFIG = 'restart_backoff_s = 0.0\nstandby = "off"\n'
GRACE_S = str(patience(5))
"""A slow machine must not be out of time."""
HOSTS = ("host-0", "host-1")


class Kind(NamedTuple):
    """A script and its words behind the folder, and how it is told where to end; empty: it ends by itself."""

    script: str
    words: tuple[str, ...] = ()
    end: str = ""


KINDS = {
    "replicated": Kind("sharded_job.py", ("replicated", "slow")),
    "sharded": Kind("sharded_job.py", ("sharded", "slow")),
    "pipelined": Kind("pipelined.py", ("2",), "stop"),
    "own loop": Kind("own_loop.py", ("checkpoints",), "stop"),
}


def launch(work: Path, script: str, words: Sequence[str]) -> PatientJob:
    (work / "job.toml").write_text(CONFIG)
    return PatientJob(
        [str(SCRIPTS / script), str(work), *words],
        num_hosts=len(HOSTS),
        run_directory=work / "run",
        options=["--config", str(work / "job.toml"), "--devices-per-host", "2", "--grace-s", GRACE_S],
        environment={**make_environment(), "TINY_JOB_HOSTS": str(len(HOSTS))},
    )


def notify_all(job: PatientJob) -> None:
    """Send SIGTERM to all processes of the job, and again as soon as the agents have answered."""
    for times in (1, 2):
        for pid in (job.process.pid, *job.find_processes()):
            os.kill(pid, signal.SIGTERM)
        if times == 1:
            for host in HOSTS:
                job.wait_event(
                    f"{host} leaves",
                    lambda event, host=host: event.kind is EventKind.HOST_DRAINING and event.host == host,
                    DEADLINE_S,
                )


def interrupt(job: PatientJob, step: int) -> int:
    """Give the job notice in a step, and return up to which it was saved, as its last line says."""
    job.hold(FailPoint.AFTER_COMMIT, ["host-0"], step)
    job.wait_held(["host-0"], DEADLINE_S)
    notify_all(job)
    job.release()
    assert job.wait(DEADLINE_S) == ExitCode.DRAINED, job.read_tail()
    assert not job.find_processes()
    last = job.read_output().rstrip().splitlines()[-1]
    found = re.fullmatch(
        r"interrupted, saved at step (\d+): all hosts got a notice to leave\. Started again, .*", last
    )
    assert found, job.read_tail()
    # A worker that takes longer to end than its agent waits is killed, when all is done.
    kinds = {event.kind for event in job.read_events() if event.detail.get("why") != "the job is over"}
    ended = {EventKind.WORKER_KILLED, EventKind.USER_ERROR, EventKind.COLLECTIVE_FAILED, EventKind.STATE_LOST}
    assert not kinds & ended, job.read_tail()
    return int(found[1])


def test_a_job_goes_on_where_its_notice_came_with_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    with launch(tmp_path, "trainer_job.py", ()) as job:
        saved = interrupt(job, 1)
    assert 2 < saved < 14, "the step in which it came is finished"
    code, said = run_command(["status", str(tmp_path / "run")])
    assert (code, f"interrupted, saved at step {saved}" in said) == (0, True), said
    with launch(tmp_path, "trainer_job.py", ()) as again:
        assert again.wait(DEADLINE_S) == 0, again.read_tail()
        found = set(re.findall(r"step 14 digest \w{64}", again.read_output()))
    undisturbed = run_alone([str(SCRIPTS / "trainer_job.py"), str(tmp_path / "alone")], DEADLINE_S).strip()
    assert found == {undisturbed}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_job_saves_its_last_step_and_begins_there_again(kind: str, tmp_path: Path) -> None:
    script, words, end = KINDS[kind]
    words = [str(tmp_path / word) if word == "checkpoints" else word for word in words]
    with launch(tmp_path, script, words) as job:
        saved = interrupt(job, 1)
    if end:
        (tmp_path / end).write_text(str(saved + 2))
    began_s = time.time()
    with launch(tmp_path, script, words) as again:
        assert again.wait(DEADLINE_S) == 0, again.read_tail()
        commits = [
            int(event.step or event.detail["step"])
            for event in again.read_events()
            if event.kind is EventKind.STEP_COMMITTED and event.wall_s > began_s
        ]
    assert min(commits) == saved + 1
