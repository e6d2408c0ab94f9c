"""Losses of a run that loses half its hosts and of an undisturbed run, for a plot."""

from pathlib import Path
from typing import Final

import msgspec

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.benchmarks.run_end import read_digest
from tests.benchmarks.runs import (
    REPORT_TIMEOUT_S,
    run_alone,
    run_job,
    wait_success,
)

STEPS: Final = 160
DEATH_STEP: Final = 30
VICTIMS: Final = ("host-2", "host-3")


class _Row(msgspec.Struct, frozen=True):
    """A line of the trainer's log."""

    step: int
    loss: float
    generation: int


class LossCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Data of the plot, which the script that draws it reads as JSON.

    Attributes:
        losses: of each step, in the run that lost half its hosts.
        undisturbed: of each step, in the undisturbed run.
        hosts: number of hosts that trained, for each step.
        equal: whether the final weights of both runs are equal, bit for bit.
    """

    losses: list[float]
    undisturbed: list[float]
    hosts: list[int]
    equal: bool


def record_curve(script: Path, work: Path) -> LossCurve:
    """Train a small model twice, with half of the workers killed at one step and undisturbed on one host."""
    disturbed, alone = work / "half", work / "whole"
    with run_job([str(script), "curve", str(STEPS), str(disturbed / "times")], disturbed) as job:
        with job.holding(FailPoint.BEFORE_REDUCE, VICTIMS, DEATH_STEP, REPORT_TIMEOUT_S):
            for host in VICTIMS:
                job.kill(JobComponent.WORKER, host)
        wait_success(job, "the job that lost half its hosts")
        members = {
            event.generation: int(event.detail["hosts"])
            for event in job.read_events()
            if event.kind is EventKind.WORLD_FORMED and event.generation is not None
        }
    run_alone([str(script), "curve", str(STEPS), str(alone / "times")], alone)
    found, expected = _read_rows(disturbed), _read_rows(alone)
    return LossCurve(
        losses=[found[step].loss for step in range(1, STEPS + 1)],
        undisturbed=[expected[step].loss for step in range(1, STEPS + 1)],
        hosts=[members[found[step].generation] for step in range(1, STEPS + 1)],
        equal=read_digest(disturbed) == read_digest(alone),
    )


def _read_rows(work: Path) -> dict[int, _Row]:
    """Return one line for each step, counted from 1: of any host of the newest generation that committed the step."""
    rows: dict[int, _Row] = {}
    for path in sorted((work / "log").glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            row = msgspec.json.decode(line, type=_Row)
            known = rows.get(row.step)
            if known is None or known.generation < row.generation:
                rows[row.step] = row
    return rows
