"""A loop of its own with a state in flat ranges, over real hosts that are lost: bits, shares, and what is compiled."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.jobs.compiled_programs import wait_compiled_ahead
from tests.support.paths import SCRIPTS
from tests.support.patience import patience
from tests.support.patient_job import PatientJob
from tests.support.reference_runs import share_run
from tests.support.sharded_job import ShardedJob
from tests.support.tiny_job import ONE_DEVICE, read_logs

JOB = SCRIPTS / "flat_state_job.py"
DEADLINE_S = patience(24)
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
STEPS = 12
LOSSES = {"host-3": 4, "host-2": 8}
"""The step in which each host is lost."""


def read_steps(work: Path) -> list[dict]:
    """Return what the processes said of their steps."""
    return [row for rows in read_logs(work).values() for row in rows]


def read_digests(work: Path) -> set[tuple[int, str]]:
    """Return each step with each digest that a process found after it."""
    return {(row["step"], row["digest"]) for row in read_steps(work)}


def run_alone(folder: Path, steps: int) -> None:
    """Train so many steps on one host, undisturbed."""
    (folder / "stop").write_text(str(steps))
    done = subprocess.run(
        [sys.executable, str(JOB), str(folder)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr


def read_alone(steps: int) -> set[tuple[int, str]]:
    """Return the digest of each step of one undisturbed host."""
    found = read_digests(share_run((JOB,), steps, run_alone))
    return {(step, digest) for step, digest in found if step < steps}


class FlatStateJob(ShardedJob):
    """The job with a snapshot in every step, which any two hosts of three may be lost of."""

    def __init__(self, work: Path) -> None:
        super().__init__(work, 3, parity=2, words=("pace=0.05",), script=JOB, options=ONE_DEVICE)

    def check_steps(self) -> None:
        """Check that each step has the bits of an undisturbed one, also where it was made twice."""
        found = read_digests(self.work)
        assert found == read_alone(1 + max(step for step, _ in found))


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)]
)
def test_random_kills_down_to_one_host_and_back_leave_the_bits_of_one_host_alone(seed, tmp_path):
    drawn = random.Random(seed)
    hosts = [f"host-{number}" for number in range(3)]
    with FlatStateJob(tmp_path) as job:
        # Two hosts at once, so that one is left; then whatever is drawn.
        faults = [(JobComponent.HOST, 2)]
        faults += [
            (drawn.choice([JobComponent.WORKER, JobComponent.HOST]), drawn.choice([1, 2])) for _ in range(2)
        ]
        for part, count in faults:
            job.wait_protected(3)
            report, begun = job.read_report(), job.step()
            assert report.generation is not None
            steps = drawn.randrange(8)
            job.wait_report(f"{steps} more steps", lambda _, first=begun + steps: job.step() >= first)
            for host in drawn.sample(hosts, count):
                job.signal(part, host, signal.SIGKILL)
            job.wait_protected(3, after_generation=report.generation.number)
        job.finish(more_steps=5)
    assert {row["hosts"] for row in read_steps(tmp_path)} >= {1, 3}


@pytest.mark.full  # random kills go down to one host
def test_from_four_hosts_to_two_each_has_its_share_and_the_bits_of_one_host_alone(tmp_path):
    alone, work = tmp_path / "alone", tmp_path / "job"
    for folder in (alone, work):
        folder.mkdir()
    run_alone(alone, STEPS)
    (work / "stop").write_text(str(STEPS))
    with PatientJob(
        [str(JOB), str(work)],
        num_hosts=4,
        run_directory=work / "run",
        options=["--devices-per-host", "1", "--host-restart-delay", "-1"],
        environment=ENVIRONMENT,
    ) as job:
        for hosts, (lost, step) in zip((4, 3), LOSSES.items(), strict=True):
            job.hold(FailPoint.BEFORE_REDUCE, [lost], step)
            job.wait_held([lost], DEADLINE_S)
            left = [f"host-{number}" for number in range(hosts - 1)]
            wait_compiled_ahead(job, left, [f"sharded state over {hosts - 1} hosts"], DEADLINE_S)
            job.kill(JobComponent.HOST, lost)
            job.release()
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events = job.read_events()
    assert sorted(step for step, _ in read_digests(alone)) == list(range(STEPS))
    assert read_digests(work) == read_digests(alone), "also of steps that were made twice"
    found = read_steps(work)
    assert {row["hosts"] for row in found} == {4, 3, 2}
    for row in found:
        assert row["whole"] <= row["here"] * row["hosts"] <= 1.01 * row["whole"]
    for event in events:
        # Whether in place, or because the leader's host was lost: all was compiled ahead.
        if event.kind is EventKind.PROGRAMS_READY and event.host in ("host-0", "host-1"):
            assert event.generation == 1 or event.detail["compiled"] == 0, event
    shares = {(e.generation, e.host) for e in events if e.kind is EventKind.STATE_SHARDED}
    assert len({host for generation, host in shares if generation == 1}) == 4
    assert {host for generation, host in shares if generation == max(shares)[0]} == {"host-0", "host-1"}
