"""Kills at chosen points of a step, and the microbatches that were computed again because of them."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from resilient_jax.errors import InternalError
from resilient_jax.events import Event, EventKind
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.protocol.failpoints import FailPoint
from tests.benchmarks.run_end import read_digest
from tests.benchmarks.runs import (
    AHEAD_STEPS,
    HOSTS,
    MANY_STEPS,
    REPORT_TIMEOUT_S,
    end_job,
    run_alone,
    run_job,
    wait_healthy,
)
from tests.benchmarks.step.figures import (
    MicrobatchId,
    RedoneWork,
    WorkerKill,
    count_redone,
    count_work,
    find_missing,
)

MICROBATCHES = 16
JOB_ARGUMENTS = ("microbatch=1", "log")


class _Line(msgspec.Struct, frozen=True):
    step: int
    index: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KillCampaign:
    """Results of one job with several kills, beside an undisturbed run.

    Attributes:
        steps: that both runs trained.
        work: cost of each kill.
        redone: microbatches computed again in any step of the job.
        digest: SHA-256 of the weights after the kills; several, joined by spaces, if the hosts disagree.
        undisturbed: SHA-256 of the weights of the undisturbed run.
    """

    steps: int
    kills: tuple[WorkerKill, ...]
    work: tuple[RedoneWork, ...]
    redone: int
    digest: str
    undisturbed: str

    @property
    def lost(self) -> int:
        """Microbatches that the killed workers had computed."""
        return sum(work.lost for work in self.work)

    @property
    def is_equal(self) -> bool:
        """Whether both runs ended with equal weights, bit for bit."""
        return self.digest == self.undisturbed


def run_kill_campaign(script: Path, work: Path, kills: int, console: Console) -> KillCampaign:
    """Kill workers that have computed their microbatches and not yet entered the sum, each when all train again.

    Raises:
        InternalError: the job fails, or no process computed a microbatch of a committed step.
    """
    disturbed, alone = work / "kills", work / "undisturbed"
    with run_job(
        [str(script), "trainer", str(MANY_STEPS), str(disturbed / "times"), *JOB_ARGUMENTS], disturbed
    ) as job:
        killed = tuple(_kill_one(job, number, console) for number in range(kills))
        steps = end_job(job, disturbed, "the job with kills")
        rehearsed = find_rehearsals(job.read_events())
    console.print(f"  the same {steps} steps undisturbed, on one host")
    run_alone([str(script), "trainer", str(steps), str(alone / "times"), *JOB_ARGUMENTS], alone)
    computed = {
        # A rehearsal's microbatch is no part of a step; it is the first that the process computes.
        pid: microbatches[1:] if pid in rehearsed else microbatches
        for pid, microbatches in _read_computed(disturbed).items()
    }
    if missing := find_missing(computed, steps, MICROBATCHES):
        raise InternalError(
            f"found the microbatches {missing} computed by no process, expected all of {steps} steps"
        )
    return KillCampaign(
        steps=steps,
        kills=killed,
        work=tuple(count_work(computed, kill, MICROBATCHES) for kill in killed),
        redone=count_redone(computed, steps),
        digest=read_digest(disturbed),
        undisturbed=read_digest(alone),
    )


def _kill_one(job: LocalJob, number: int, console: Console) -> WorkerKill:
    report = wait_healthy(job)
    assert report.generation is not None, "all train"
    host = report.generation.membership.members[number % HOSTS].host
    step = max(status.progress.step for status in report.hosts) + AHEAD_STEPS
    with job.holding(FailPoint.BEFORE_REDUCE, [host], step):
        (pid,) = find_pids(report, JobComponent.WORKER, host)
        job.kill(JobComponent.WORKER, host)
    _wait_change(job, report.generation.number)
    console.print(f"  kill {number + 1}: {host}, before the sum of step {step}")
    return WorkerKill(host=host, pid=pid, step=step)


def _wait_change(job: LocalJob, before: int) -> None:
    def has_changed(report: JobReport) -> bool:
        return report.generation is not None and report.generation.number > before

    job.wait_report("the death to be noticed", has_changed, REPORT_TIMEOUT_S)


def find_rehearsals(events: Iterable[Event]) -> frozenset[int]:
    """Return the worker processes that have rehearsed a step before they joined, from events in order of time."""
    pids: dict[str, int] = {}
    found: set[int] = set()
    for event in events:
        if event.kind in (EventKind.WORKER_STARTED, EventKind.WORKER_PROMOTED):
            pids[event.host] = int(event.detail["pid"])
        elif event.kind is EventKind.STEP_REHEARSED and not event.detail["problem"]:
            found.add(pids[event.host])
    return frozenset(found)


def _read_computed(work: Path) -> dict[int, Sequence[MicrobatchId]]:
    """Return the microbatches that each process computed, by pid."""
    found: dict[int, Sequence[MicrobatchId]] = {}
    for path in work.glob("computed-*.jsonl"):
        lines = path.read_bytes().split(b"\n")[:-1]
        decoded = [msgspec.json.decode(line, type=_Line) for line in lines]
        found[int(path.stem.removeprefix("computed-"))] = [(line.step, line.index) for line in decoded]
    return found
