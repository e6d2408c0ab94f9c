"""What a job makes of a host at half speed: its step times with even shares, and with shares by speed."""

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.benchmarks.paths import JOBS
from tests.benchmarks.runs import HOSTS, run_undisturbed
from tests.benchmarks.step_times import StepTime, read_step_times

MICROBATCHES: Final = 16
"""Of a step, as in the job's script."""
MICROBATCH_S: Final = 0.05
STEPS: Final = 64
SETTLING_STEPS: Final = 33
"""Speeds are exchanged every 16 steps; the first 16 are not enough for a host that starts later than the others."""


class SlowHostFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A real job of `HOSTS` hosts of which one has half the speed.

    Attributes:
        slow_host_throughput: microbatches a second, over what the speeds of all hosts add up to.
        slow_host_throughput_even: the same if each host gets as many.
        step_s: median seconds of a step by speed.
        step_s_even: the same if each host gets as many.
    """

    slow_host_throughput: float
    slow_host_throughput_even: float
    step_s: float
    step_s_even: float


def measure_slow_host() -> SlowHostFigures:
    """Run the two jobs, one after the other."""
    by_speed_s, even_s = (_run(assignment) for assignment in ("by_speed", "even"))
    return make_slow_host_figures(by_speed_s, even_s)


def make_slow_host_figures(by_speed_s: float, even_s: float) -> SlowHostFigures:
    """Return the figures of two jobs, of each the median seconds of a step."""
    ideal_s = MICROBATCHES * MICROBATCH_S / (HOSTS - 0.5)
    return SlowHostFigures(
        slow_host_throughput=round(ideal_s / by_speed_s, 3),
        slow_host_throughput_even=round(ideal_s / even_s, 3),
        step_s=round(by_speed_s, 3),
        step_s_even=round(even_s, 3),
    )


def find_median_step_s(steps: Sequence[StepTime]) -> float:
    """Return what a step takes when speeds are settled: the median over all steps of all hosts."""
    by_process: dict[int, list[StepTime]] = {}
    for one in steps:
        by_process.setdefault(one.process, []).append(one)
    return statistics.median(
        after.at_s - before.at_s
        for ends in by_process.values()
        for before, after in itertools.pairwise(ends)
        if before.step >= SETTLING_STEPS
    )


def _run(assignment: str) -> float:
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        times = Path(folder) / "times"
        arguments = [str(STEPS), str(times), str(MICROBATCH_S), f"host-{HOSTS - 1}", assignment]
        run_undisturbed([str(JOBS / "slow_host_job.py"), *arguments], Path(folder))
        return find_median_step_s(read_step_times(times))
