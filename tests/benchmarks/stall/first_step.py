"""The time from the command to the first step: of all hosts, and of one host alone, with an empty and a full cache."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from resilient_jax.errors import InternalError
from resilient_jax.events import EventKind
from tests.benchmarks.runs import HOSTS, run_job, wait_success


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """Seconds from the command until every host has committed its first step, one for each start."""

    alone: Sequence[float]
    together: Sequence[float]

    @property
    def ratio(self) -> float:
        """The time of all hosts over that of one host alone, of medians."""
        return statistics.median(self.together) / statistics.median(self.alone)


def measure_first_steps(
    script: Path, work: Path, starts: int, console: Console
) -> tuple[FirstSteps, FirstSteps]:
    """Return the times with an empty cache and with the cache that such a start has left, one and all hosts in turn."""
    cold: dict[int, list[float]] = {1: [], HOSTS: []}
    warm: dict[int, list[float]] = {1: [], HOSTS: []}
    for number in range(starts):
        for hosts in (1, HOSTS):
            folder = work / f"first-step-{hosts}-{number}"
            cache = folder / "cache"
            cold[hosts].append(_time_first_step(script, folder / "cold", hosts, cache))
            warm[hosts].append(_time_first_step(script, folder / "warm", hosts, cache))
            console.print(
                f"  {hosts} hosts: {cold[hosts][-1]:.2f} s with an empty cache, {warm[hosts][-1]:.2f} s with a full one"
            )
    return (
        FirstSteps(alone=cold[1], together=cold[HOSTS]),
        FirstSteps(alone=warm[1], together=warm[HOSTS]),
    )


def _time_first_step(script: Path, folder: Path, hosts: int, cache: Path) -> float:
    began_s = time.monotonic()
    with run_job([str(script), "ours", "1", str(folder / "times")], folder, hosts, cache) as job:
        wait_success(job, "the job of one step")
        ended_s = [
            event.monotonic_s
            for event in job.read_events()
            if event.kind is EventKind.STEP_COMMITTED and event.generation == 1
        ]
    if len(ended_s) != hosts:
        raise InternalError(f"first step: found {len(ended_s)} hosts that committed it, expected {hosts}")
    return max(ended_s) - began_s
