"""A state with leaves of many kinds: each comes back as it was from the others' memory, and from snapshots."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.events import EventKind
from resilient_jax.protocol.snapshots import SnapshotPhase
from tests.support.kills import generation_of
from tests.support.paths import SCRIPTS
from tests.support.patience import patience
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, TinyJob, protect, read_logs

SCRIPT = SCRIPTS / "mixed_state.py"
HOSTS = 2
KINDS = {
    "w": "ArrayImpl bfloat16",
    "step": "ArrayImpl int32 weak",
    "scale": "ArrayImpl float32 weak",
    "rate": "float ",
    "best": "float64 float64",
    "seen": "ndarray int64",
    "rounds": "int ",
    "is_warm": "bool ",
    "key": "PRNGKeyArray key<fry>",
    "name": "str ",
}
"""What each leaf is after the first step."""


class MixedJob(TinyJob):
    """A job of `mixed_state.py`."""

    def __init__(self, work: Path) -> None:
        super().__init__(work, HOSTS, protect(CONFIG_WITHOUT_STANDBYS, 1), options=ONE_DEVICE, script=SCRIPT)

    def wait_snapshots(self, generation: int) -> None:
        """Wait until each host has a committed snapshot of this generation."""

        def have_snapshots(report: JobReport) -> bool:
            return all(
                any(
                    s.phase is SnapshotPhase.COMMITTED and s.id.generation == generation
                    for s in host.snapshots
                )
                for host in report.hosts
            )

        self.wait_report("a snapshot of every host", have_snapshots)

    def check_steps(self) -> None:
        """Compare kinds and bits of each step, and of what each generation began with, with an undisturbed run."""
        steps = [row for rows in read_logs(self.work).values() for row in rows]
        total = max(row["step"] for row in steps) + 1
        expected = read_alone(self.work / "alone", total)
        assert {row["step"] for row in steps} == set(range(total))
        for row in steps:
            assert row["kinds"] == expected[row["step"]]["kinds"] == KINDS
            assert row["digest"] == expected[row["step"]]["digest"], f"step {row['step']}: other bits"
        restored = read_restored(self.work)
        assert any(row["step"] > 0 for row in restored)
        for row in restored:
            if row["step"] > 0:
                before = expected[row["step"] - 1]
                assert (row["kinds"], row["digest"]) == (before["kinds"], before["digest"]), row


def read_restored(work: Path) -> list[dict]:
    """Return what each host began each generation with."""
    lines = [line for path in work.glob("restored-*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def read_alone(work: Path, total: int) -> dict[int, dict]:
    """Return the rows of an undisturbed run on one host."""
    work.mkdir()
    (work / "stop").write_text(str(total))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(work), "pace=0"],
        timeout=patience(15),
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (first,) = read_restored(work)
    assert first["kinds"] == {**KINDS, "step": "int "}, "what init makes is returned as it was made"
    return {row["step"]: row for rows in read_logs(work).values() for row in rows}


def test_each_leaf_comes_back_as_it_was_and_so_do_the_bits_of_each_step(tmp_path: Path) -> None:
    with MixedJob(tmp_path / "job") as job:
        before = generation_of(job.wait_training(HOSTS)).number
        job.wait_snapshots(before)
        # It comes back with the state of the other host.
        job.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        before = generation_of(job.wait_training(HOSTS, before)).number
        job.wait_snapshots(before)
        # No worker has the state: it is read from snapshots.
        for host in ("host-0", "host-1"):
            job.signal(JobComponent.WORKER, host, signal.SIGKILL)
        job.wait_training(HOSTS, before)
        job.finish(more_steps=8)
        kinds = {event.kind for event in job.job.read_events()}
        assert {EventKind.STATE_FETCHED, EventKind.SNAPSHOT_RESTORED} <= kinds
