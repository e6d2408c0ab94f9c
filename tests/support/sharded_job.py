"""A real job of `tests/support/scripts/sharded.py`, and its invariants: no host has a complete copy of the state."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from resilient_jax.protocol.snapshots import SnapshotPhase
from tests.support.paths import SCRIPTS
from tests.support.patience import patience
from tests.support.reference_runs import share_run
from tests.support.tiny_job import (
    CONFIG_WITHOUT_STANDBYS,
    TinyJob,
    digest_leaves,
    is_training,
    read_final,
    read_logs,
)

SCRIPT = SCRIPTS / "sharded.py"
ALONE_TIMEOUT_S = patience(20)


class ShardedJob(TinyJob):
    """A job that takes a snapshot in every step, with parity for the loss of `parity` hosts."""

    def __init__(
        self,
        work: Path,
        hosts: int,
        parity: int,
        words: Sequence[str] = (),
        config: str = CONFIG_WITHOUT_STANDBYS,
        script: Path = SCRIPT,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(work, hosts, f"{config}\nsnapshot_parity = {parity}\n", options, words, script)

    def promised_step(self) -> int:
        """Return the step of the newest snapshot that a server reports as committed on all hosts; 0: none."""
        report = self.job.read_report()
        hosts = report.hosts if report is not None else ()
        committed = [s.id.step for h in hosts for s in h.snapshots if s.phase is SnapshotPhase.COMMITTED]
        return max(committed, default=0)

    def wait_protected(self, hosts: int, after_generation: int = 0) -> int:
        """Wait until so many hosts train and have committed a snapshot together; return its step.

        A snapshot of a generation of fewer hosts does not count: it does not tolerate the loss of as many.
        """
        report = self.job.wait_report(
            f"{hosts} hosts with a snapshot of a generation after {after_generation}",
            lambda now: (
                is_training(now, hosts, after_generation)
                and now.generation is not None
                and any(
                    s.phase is SnapshotPhase.COMMITTED and s.id.generation == now.generation.number
                    for h in now.hosts
                    for s in h.snapshots
                )
            ),
            self.patience_s,
        )
        return max(s.id.step for h in report.hosts for s in h.snapshots)

    def restored(self) -> list[dict]:
        """Return the lines that the processes logged when they had restored or made their state, oldest first."""
        rows = [row for rows in self.logs().values() for row in rows if row["restored"]]
        return sorted(rows, key=lambda row: (row["generation"], row["step"]))

    def check_steps(self) -> None:
        check_shared_steps(self.work)


def check_shared_steps(work: Path, devices: int = 2) -> None:
    """Check that every step has the bits of an undisturbed run, occurs once in a generation, and was shared.

    Args:
        work: the folder where the hosts of the job wrote what they computed.
        devices: of each host; they share a microbatch, so their number decides bits.
    """
    logs = read_logs(work)
    by_step: dict[int, set[str]] = {}
    for process, rows in logs.items():
        for number in {row["generation"] for row in rows}:
            steps = [row["step"] for row in rows if row["generation"] == number and not row["restored"]]
            assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True, (
                process,
                steps,
            )
        for row in rows:
            by_step.setdefault(row["step"], set()).add(row["digest"])
    total = max(by_step) + 1
    assert sorted(set(by_step) - {-1}) == list(range(total)), "a step is missing"
    alone = read_alone(total, devices)
    expected = {row["step"]: row["digest"] for row in alone}
    for step, digests in by_step.items():
        assert digests == {expected[step]}, f"step {step}: other bits"
    for path in work.glob("final-*.npz"):
        assert digest_leaves(read_final(path)) == expected[total - 1], (
            f"{path}: other bits than after the last step"
        )
    shares = [row["bytes_here"] for rows in logs.values() for row in rows if "bytes_here" in row]
    whole = next(row["bytes_here"] for row in alone if "bytes_here" in row) / 2
    assert min(shares) < whole, "some host had less than everything"


def read_alone(total: int, devices: int = 2) -> list[dict]:
    """Return the log of the same job on one undisturbed host, of at least so many steps."""

    def run(alone: Path, steps: int) -> None:
        (alone / "stop").write_text(str(steps))
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(alone), "pace=0"],
            timeout=ALONE_TIMEOUT_S,
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                "JAX_PLATFORMS": "cpu",
            },
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    (log,) = share_run((SCRIPT, devices), total, run).glob("steps-*.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]
