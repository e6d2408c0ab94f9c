"""The same kills under a supervisor that ends all processes and starts all again from an Orbax checkpoint."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.benchmarks.paths import JOBS
from tests.benchmarks.resilience.runs import RestartableJob, run_restarting
from tests.benchmarks.resilience.schedule import QUIET_STEPS, WARM_STEPS, ScheduledKill
from tests.benchmarks.resilience.timeline import Timeline, measure_regained, measure_stalls, step_times

SCRIPT: Final = JOBS / "restart_lm.py"
STRIDE: Final = 3
"""Between one kill and the next the distance to the last checkpoint grows by so many steps. It divides no usual
interval, so that of as many kills as an interval has steps each has another distance."""


class RestartedLM(RestartableJob, frozen=True, kw_only=True):
    """Configuration file of `jobs/restart_lm.py`.

    Attributes:
        settings: path of the example's settings.
    """

    settings: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartStalls:
    """What the kills cost, in seconds, each less a step.

    Attributes:
        step_s: median time of a step.
        stalls_s: from each kill to the end of the next step.
        regained_s: from each kill until the step that it interrupted is committed.
        redone: steps that were done again, of all kills.
    """

    step_s: float
    stalls_s: tuple[float, ...]
    regained_s: tuple[float, ...]
    redone: int


def schedule_kills(kills: int, every: int, hosts: Sequence[str]) -> tuple[ScheduledKill, ...]:
    """Return kills of one host after the other, each in another distance to the last checkpoint.

    There are two checkpoints between two kills, so that also one that is being written at a kill is not the only one.
    """
    return tuple(
        ScheduledKill(
            step=WARM_STEPS + every + 2 * every * number + STRIDE * number % every,
            host=hosts[number % len(hosts)],
        )
        for number in range(kills)
    )


def run_restarts(settings: Path, kills: int, every: int, hosts: Sequence[str], work: Path) -> RestartStalls:
    """Run the example with JAX and Orbax alone, with the programs of a warm cache after the first start.

    Raises:
        InternalError: the job failed, or hangs.
    """
    faults = schedule_kills(kills, every, hosts)
    job = RestartedLM(
        steps=faults[-1].step + every + QUIET_STEPS,
        hosts=tuple(hosts),
        faults=faults,
        every=every,
        settings=str(settings),
    )
    return find_stalls(run_restarting(SCRIPT, job, work / "restart", work / "cache").timeline)


def find_stalls(timeline: Timeline) -> RestartStalls:
    """Return what the kills of a run cost."""
    step_s = statistics.median(step_times(timeline))
    return RestartStalls(
        step_s=step_s,
        stalls_s=tuple(stall_s - step_s for stall_s in measure_stalls(timeline)),
        regained_s=tuple(regained_s - step_s for regained_s in measure_regained(timeline)),
        redone=timeline.redone,
    )
