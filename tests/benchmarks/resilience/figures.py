"""Figures of the resilience benchmark from runs and their time buckets. Pure.

Effective throughput is tokens per second and live device. A device is live as long as its host is up, and a host whose
worker was killed is up again at once: so all devices are live all the time, for every system, and a ratio of
throughputs is a ratio of times. `member_tokens_per_s` counts only devices of hosts that train.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from resilient_jax.errors import InternalError
from tests.benchmarks.resilience.schedule import RunSize
from tests.benchmarks.resilience.timeline import (
    TimeBuckets,
    Timeline,
    mean_hosts,
    measure_regained,
    measure_stalls,
    pad_buckets,
    split_time,
)

OURS: Final = "resilient_jax"
FAST: Final = "ours, fast sums"
"""This package with float sums: the weights depend, within rounding, on which hosts survived."""
OUR_SYSTEMS: Final = (OURS, FAST)
BARE: Final = "bare JAX"
"""The baseline's loop, without checkpoints and failures."""
DEFAULTS: Final = "JAX defaults"
TOKENS_A_STEP: Final = 16 * 64
RATIO_EVERY: Final = 50
GOODPUT_EVERY: Final = 100


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Mean time of a system's step without failures.

    Attributes:
        step_s: of the step itself.
        saving_s: cost of checkpoints per step.
    """

    step_s: float
    saving_s: float = 0.0


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run with failures; times in seconds.

    Attributes:
        failure_every: steps per failure, padding included.
        seed: of the schedule.
        checkpoint_every: interval in steps; 0: no checkpoints.
        failures: number of kills.
        measured: steps that were run.
        padded: steps that were added at the system's pace, to match the rate.
        computed: whether the figures are derived from another system's run.
        buckets: of measured and padded steps.
        tokens_per_s: per live device.
        member_tokens_per_s: per device that trains, of measured steps.
        goodput: productive share of time.
        cost_s: unproductive time per failure, including the return of a host and checkpoints.
        redone: commits of steps that had been committed before.
        stalls_s: from each failure to the end of the next step.
        regained_s: from each failure to the end of the step that it interrupted.
        host_mib: peak memory of a host's processes.
    """

    system: str
    failure_every: int
    seed: int
    checkpoint_every: int
    failures: int
    measured: int
    padded: int
    computed: bool = False
    buckets: TimeBuckets
    tokens_per_s: float
    member_tokens_per_s: float
    goodput: float
    cost_s: float
    redone: int
    stalls_s: list[float]
    regained_s: list[float]
    host_mib: float


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A median, with the minimum, the maximum and the number of values."""

    median: float
    least: float
    most: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        return cls(
            median=round(statistics.median(values), 4),
            least=round(min(values), 4),
            most=round(max(values), 4),
            n=len(values),
        )

    def text(self, digits: int = 2) -> str:
        """Return the median, followed by the range if there are several values."""
        found = f"{self.median:.{digits}f}"
        return found if self.n == 1 else f"{found} ({self.least:.{digits}f} to {self.most:.{digits}f})"


class ResilienceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON: medians, in seconds unless the name has another unit; null where nothing was measured.

    Attributes:
        stall_s: of ours, from a failure to the end of the next step.
        baseline_stall_s: of restarts with Orbax, tuned; all intervals together.
        stall_ratio: `baseline_stall_s / stall_s`.
        stall_less_a_step_s: `stall_s` minus a step without failures, as in the stall benchmark.
        baseline_stall_less_a_step_s: the same for the baseline.
        effective_throughput_ratio: ours over the best baseline, at one failure in 50 steps.
        effective_throughput_ratios: the same by rate; the median over schedules.
        throughput_spread: the same with range and number of schedules.
        fast_throughput_ratios: by rate, of ours with fast sums.
        goodput: of ours at one failure in 100 steps.
        goodputs: of ours, by rate.
        baseline_goodput: of the best baseline at one failure in 100 steps.
        baseline_goodputs: of the best baseline, by rate.
        steps_lost: committed steps that ours did again, in all runs.
        bitwise_equal: whether all runs of ours ended with the weights of an undisturbed one.
        stall: `stall_s` with range and number.
        baseline_stall: `baseline_stall_s` with range and number.
        baseline_regained: from a failure until the step that it interrupted is done.
        defaults_stall_s: of one failure with JAX's defaults.
        step_s: without failures and checkpoints, by system.
        checkpoint_cost: time that an asynchronous Orbax save adds to a run.
        checkpoint_blocking: time that the save blocks its caller.
        memory_mib: peak memory of one host, by system.
        load: of the machine over the last minute, before and after.
        failed: runs that did not finish.
        runs: all others.
    """

    stall_s: float
    baseline_stall_s: float
    stall_ratio: float
    stall_less_a_step_s: float
    baseline_stall_less_a_step_s: float
    effective_throughput_ratio: float | None
    effective_throughput_ratios: dict[str, float]
    throughput_spread: dict[str, Spread]
    fast_throughput_ratios: dict[str, float]
    goodput: float | None
    goodputs: dict[str, float]
    baseline_goodput: float | None
    baseline_goodputs: dict[str, float]
    steps_lost: int
    bitwise_equal: bool
    stall: Spread
    baseline_stall: Spread
    baseline_regained: Spread
    defaults_stall_s: float | None
    step_s: dict[str, float]
    checkpoint_cost: Spread
    checkpoint_blocking: Spread
    memory_mib: dict[str, float]
    load: tuple[float, float]
    machine: str
    failed: list[str]
    runs: list[RunFigures]


def make_run_figures(
    system: str,
    size: RunSize,
    timeline: Timeline,
    pace: Pace,
    *,
    seed: int,
    checkpoint_every: int,
    hosts: int,
    host_mib: float,
) -> RunFigures:
    """Return the figures of a run for the rate of `size`."""
    measured = split_time(timeline, pace_s=pace.step_s, keeps_partial=system in OUR_SYSTEMS)
    buckets = pad_buckets(measured, size.padded, pace_s=pace.step_s, saving_s=pace.saving_s)
    tokens = TOKENS_A_STEP * size.measured
    return RunFigures(
        system=system,
        failure_every=size.failure_every,
        seed=seed,
        checkpoint_every=checkpoint_every,
        failures=size.failures,
        measured=size.measured,
        padded=size.padded,
        buckets=buckets,
        tokens_per_s=TOKENS_A_STEP * (size.measured + size.padded) / buckets.wall_s / hosts,
        member_tokens_per_s=tokens / timeline.wall_s / mean_hosts(timeline),
        goodput=buckets.goodput,
        cost_s=(buckets.wall_s - buckets.productive) / size.failures,
        redone=timeline.redone,
        stalls_s=measure_stalls(timeline),
        regained_s=measure_regained(timeline),
        host_mib=host_mib,
    )


def with_longer_stalls(run: RunFigures, stall_s: float) -> RunFigures:
    """Return the run as if each of its stalls had taken `stall_s`: JAX's defaults, of which one stall is measured."""
    longer_s = sum(stall_s - found_s for found_s in run.stalls_s)
    buckets = msgspec.structs.replace(run.buckets, recovery=run.buckets.recovery + longer_s)
    return msgspec.structs.replace(
        run,
        system=DEFAULTS,
        computed=True,
        buckets=buckets,
        tokens_per_s=run.tokens_per_s * run.buckets.wall_s / buckets.wall_s,
        member_tokens_per_s=run.tokens_per_s * run.buckets.wall_s / buckets.wall_s,
        goodput=buckets.goodput,
        cost_s=(buckets.wall_s - buckets.productive) / run.failures,
        stalls_s=[stall_s] * len(run.stalls_s),
        regained_s=[s + stall_s - found_s for s, found_s in zip(run.regained_s, run.stalls_s, strict=True)],
    )


def median_of(
    runs: Sequence[RunFigures], system: str, failure_every: int, value: Callable[[RunFigures], float]
) -> float:
    """Return the median of `value` over the runs of one system at one rate."""
    return statistics.median(
        value(run) for run in runs if (run.system, run.failure_every) == (system, failure_every)
    )


def best_baseline(runs: Sequence[RunFigures], failure_every: int) -> str:
    """Return the baseline with the highest effective throughput at a rate."""
    systems = sorted({run.system for run in runs if run.failure_every == failure_every} - set(OUR_SYSTEMS))
    return max(systems, key=lambda name: median_of(runs, name, failure_every, lambda run: run.tokens_per_s))


def compare(runs: Sequence[RunFigures], baseline: str, failure_every: int, system: str = OURS) -> list[float]:
    """Return a system's effective throughput over a baseline's, for each schedule that both completed."""
    speeds = {(run.system, run.seed): run.tokens_per_s for run in runs if run.failure_every == failure_every}
    seeds = sorted(seed for name, seed in speeds if name == system and (baseline, seed) in speeds)
    return [speeds[system, seed] / speeds[baseline, seed] for seed in seeds]


def rates_of(runs: Sequence[RunFigures]) -> list[int]:
    """Return the rates that ours and a baseline completed, from the rarest failures to the most frequent."""
    ours = {run.failure_every for run in runs if run.system == OURS}
    return sorted(ours & {run.failure_every for run in runs if run.system not in OUR_SYSTEMS}, reverse=True)


def make_resilience_figures(
    runs: Sequence[RunFigures],
    *,
    paces: Mapping[str, Pace],
    costs_s: Sequence[float],
    blocking_s: Sequence[float],
    defaults_stall_s: float | None,
    bitwise_equal: bool,
    load: tuple[float, float],
    machine: str,
    failed: Sequence[str] = (),
) -> ResilienceFigures:
    """Return the figures of the line of JSON. A run that several rates share contributes its stalls once.

    Raises:
        InternalError: no run of ours, or none of the baseline, finished.
    """
    once = {(r.system, r.checkpoint_every, r.measured, r.failures, r.seed): r for r in runs if not r.computed}
    ours = [run for run in once.values() if run.system == OURS]
    bare = list({key[1:]: run for key, run in once.items() if run.system not in OUR_SYSTEMS}.values())
    if not ours or not bare:
        raise InternalError(f"found no run to compare, expected one of each system; failed: {list(failed)}")
    stall = Spread.of([s for run in ours for s in run.stalls_s])
    baseline = Spread.of([s for run in bare for s in run.stalls_s])
    ratios: dict[str, Spread] = {}
    fast: dict[str, float] = {}
    goodputs: dict[str, float] = {}
    baselines: dict[str, float] = {}
    for rate in rates_of(runs):
        best = best_baseline(runs, rate)
        ratios[str(rate)] = Spread.of(compare(runs, best, rate))
        if found := compare(runs, best, rate, FAST):
            fast[str(rate)] = round(statistics.median(found), 4)
        goodputs[str(rate)] = round(median_of(runs, OURS, rate, lambda run: run.goodput), 4)
        baselines[str(rate)] = round(median_of(runs, best, rate, lambda run: run.goodput), 4)
    medians = {rate: spread.median for rate, spread in ratios.items()}
    return ResilienceFigures(
        stall_s=stall.median,
        baseline_stall_s=baseline.median,
        stall_ratio=round(baseline.median / stall.median, 2),
        stall_less_a_step_s=round(stall.median - paces[OURS].step_s, 4),
        baseline_stall_less_a_step_s=round(baseline.median - paces[BARE].step_s, 4),
        effective_throughput_ratio=medians.get(str(RATIO_EVERY)),
        effective_throughput_ratios=medians,
        throughput_spread=ratios,
        fast_throughput_ratios=fast,
        goodput=goodputs.get(str(GOODPUT_EVERY)),
        goodputs=goodputs,
        baseline_goodput=baselines.get(str(GOODPUT_EVERY)),
        baseline_goodputs=baselines,
        steps_lost=sum(run.redone for run in once.values() if run.system in OUR_SYSTEMS),
        bitwise_equal=bitwise_equal,
        stall=stall,
        baseline_stall=baseline,
        baseline_regained=Spread.of([s for run in bare for s in run.regained_s]),
        defaults_stall_s=defaults_stall_s,
        step_s={name: round(pace.step_s, 4) for name, pace in paces.items()},
        checkpoint_cost=Spread.of(costs_s),
        checkpoint_blocking=Spread.of(blocking_s),
        memory_mib={
            name: round(max(run.host_mib for run in once.values() if run.system == name), 1)
            for name in sorted({run.system for run in once.values()})
        },
        load=load,
        machine=machine,
        failed=list(failed),
        runs=list(runs),
    )
