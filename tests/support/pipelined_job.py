"""A real job of `tests/support/scripts/pipelined.py`, whose model is split over hosts, and its invariants."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import ANY_INDEX, FailPoint
from tests.support.paths import SCRIPTS
from tests.support.patience import patience
from tests.support.reference_runs import share_run
from tests.support.sharded_job import ShardedJob
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, read_logs

SCRIPT = SCRIPTS / "pipelined.py"
UNITS = 7
"""Embedding and head, which share a table, and four layers: a unit of each block, and one of the table."""
CHECKPOINT_STEPS = 50
"""Between two checkpoints, in the script."""
ALONE_TIMEOUT_S = patience(30)
NO_AXES: Final[Mapping[str, int]] = MappingProxyType({})
PATIENCE_S = patience(24)
"""The programs of each kind of block are many."""


class PipelinedJob(ShardedJob):
    """A job that takes a snapshot in every step, with parity for the loss of `parity` hosts."""

    def __init__(
        self,
        work: Path,
        hosts: int,
        stages: int,
        parity: int = 1,
        words: Sequence[str] = (),
        config: str = CONFIG_WITHOUT_STANDBYS,
        axes: Mapping[str, int] = NO_AXES,
        options: Sequence[str] = (),
    ) -> None:
        """Prepare it; `axes` are those of the devices of each host, `options` more of `launch`."""
        self.axes = axes
        words = [str(stages), *words, *(f"{axis}={size}" for axis, size in axes.items())]
        devices = ("--devices-per-host", str(math.prod(axes.values())))
        super().__init__(work, hosts, parity, words, config, SCRIPT, (*devices, *options))
        self.patience_s = PATIENCE_S

    def find_replicas(self) -> list[list[str]]:
        """Return the hosts of each replica now, in the order of its stages."""
        formed = [event for event in self.job.read_events() if event.kind is EventKind.PIPELINE_FORMED]
        return list_replicas(str(formed[-1].detail["cut"]))

    def hold(self, place: FailPoint, hosts: Sequence[str], *, ahead: int = 4, index: int = ANY_INDEX) -> int:
        """Hold these hosts at `place` in a step without a checkpoint.

        In the step before one the others would wait for their part of it, and when they are killed leave the
        step without a line in any log, although it is committed.
        """
        while any((self.step() + ahead + passed) % CHECKPOINT_STEPS == 0 for passed in range(1, 4)):
            ahead += 1
        return super().hold(place, hosts, ahead=ahead, index=index)

    def check_steps(self) -> None:
        """Check that every unit has the bits of an undisturbed run after every step, on all hosts that have it."""
        check_units(self.work, self.job.read_output(), self.axes)


def check_units(
    work: Path, output: str, axes: Mapping[str, int] = NO_AXES, words: Sequence[str] = ()
) -> None:
    """Check that every unit has the bits of an undisturbed run after every step, on all hosts that have it.

    Args:
        work: folder of the job.
        output: what it has printed.
        axes: of the devices of each host.
        words: of the script, which change what it computes.
    """
    for process, rows in read_logs(work).items():
        for number in {row["generation"] for row in rows}:
            steps = [row["step"] for row in rows if row["generation"] == number]
            assert steps == list(range(steps[0], steps[0] + len(steps))), (process, steps)
    found = _group_digests([*read_steps(work), *read_restored(work)])
    total = max(found) + 1
    assert sorted(found) == list(range(total)), "a step is missing"
    alone = run_alone(total, axes, words)
    expected = read_alone(alone, total)
    for row in expected:
        by_unit = found[row["step"]]
        assert len(by_unit) == UNITS, f"step {row['step']}: some unit was on no host that lived"
        for unit, digest in row["digests"].items():
            assert by_unit[unit] == {digest}, f"step {row['step']}, unit {unit}: other bits"
    assert find_digests(output) == {expected[-1]["result"]}, "other parameters in the result"
    _check_evaluations(work, alone, total)


def _group_digests(rows: Sequence[dict]) -> dict[int, dict[str, set[str]]]:
    """Return the digests in some lines, by step and unit."""
    found: dict[int, dict[str, set[str]]] = {}
    for row in rows:
        by_unit = found.setdefault(row["step"], {})
        for unit, digest in row["digests"].items():
            by_unit.setdefault(unit, set()).add(digest)
    return found


def _check_evaluations(work: Path, alone: Path, total: int) -> None:
    """Check that every evaluation found what that of the undisturbed run did, on all hosts, each time."""
    # A job that is told to stop makes no evaluation after its last step.
    expected = {step: rows for step, rows in _group_evaluations(alone).items() if step < total}
    assert expected
    assert _group_evaluations(work) == expected


def check_evaluations_agree(work: Path) -> None:
    """Check that all hosts found the same in every evaluation of a state."""
    found = _group_evaluations(work)
    assert found
    assert all(len(rows) == 1 for rows in found.values()), found


def _group_evaluations(work: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for row in read_evaluations(work):
        found.setdefault(row.pop("step"), set()).add(str(row))
    return found


def read_evaluations(work: Path) -> list[dict]:
    """Return the lines of all processes about evaluations."""
    return _read_lines(work, "evaluations")


def read_steps(work: Path) -> list[dict]:
    """Return the lines of all processes about steps that they have committed."""
    return _read_lines(work, "steps")


def read_restored(work: Path) -> list[dict]:
    """Return the lines of all processes about the states that generations began with.

    A host that commits a step because another one has committed it logs its units of it only here.
    """
    return _read_lines(work, "restored")


def _read_lines(work: Path, kind: str) -> list[dict]:
    """Return the complete lines of all logs of a kind: a process may have been killed while it wrote one."""
    logs = [path.read_text().split("\n")[:-1] for path in work.glob(f"{kind}-*.jsonl")]
    return [json.loads(line) for log in logs for line in log]


def list_replicas(cut: str) -> list[list[str]]:
    """Return the hosts of each replica, in the order of its stages, from the text of an event."""
    return [[stage.split()[0] for stage in replica.split(" -> ")] for replica in cut.split("; ")]


def find_digests(output: str) -> set[str]:
    """Return the digests of results that hosts have printed."""
    return set(re.findall(r"\bdigest ([0-9a-f]{64})", output))


def run_alone(total: int, axes: Mapping[str, int] = NO_AXES, words: Sequence[str] = ()) -> Path:
    """Return the folder of an undisturbed run of the same job on one host with devices of these axes."""
    words = ("1", "pace=0", *words, *(f"{axis}={size}" for axis, size in axes.items()))
    devices = math.prod(axes.values())

    def run(alone: Path, steps: int) -> None:
        (alone / "stop").write_text(str(steps))
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(alone), *words],
            timeout=ALONE_TIMEOUT_S,
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                "JAX_PLATFORMS": "cpu",
            },
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        *_, last = read_alone(alone, steps)
        assert find_digests(done.stdout) == {last["result"]}, "the log of a step has another digest"

    return share_run((SCRIPT, *words), total, run)


def read_alone(alone: Path, total: int) -> list[dict]:
    """Return the lines of the first steps of an undisturbed run, each with the digest of its result."""
    (rows,) = read_logs(alone).values()
    assert [row["step"] for row in rows[:total]] == list(range(total))
    return rows[:total]
