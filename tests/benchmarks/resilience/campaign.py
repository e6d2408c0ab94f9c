"""All runs of the resilience benchmark: undisturbed, calibration, JAX's defaults, and each system at each rate."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from resilient_jax.cluster.launcher import make_host_names
from resilient_jax.errors import InternalError
from resilient_jax.state.snapshot_interval import compute_interval_steps
from tests.benchmarks.paths import JOBS
from tests.benchmarks.resilience.figures import (
    BARE,
    FAST,
    OUR_SYSTEMS,
    OURS,
    Pace,
    RunFigures,
    make_run_figures,
    with_longer_stalls,
)
from tests.benchmarks.resilience.runs import (
    BenchmarkJob,
    FinishedRun,
    run_resilient,
    run_restarting,
)
from tests.benchmarks.resilience.schedule import (
    QUIET_STEPS,
    WARM_STEPS,
    RunSize,
    ScheduledKill,
    draw_faults,
    size_run,
)
from tests.benchmarks.resilience.timeline import (
    Timeline,
    measure_stalls,
    saving_costs,
    step_times,
)

BEST: Final = "Orbax, best n"
DEFAULTS_FAULT: Final = 3
"""Steps between the warm-up and the only failure of the run with JAX's defaults."""
DEFAULTS_EVERY: Final = 2
FAST_STEPS: Final = 2 * WARM_STEPS + 10
MICROBATCH: Final = 4
"""Sequences: one microbatch per host, as large as a host's share of a step in the baseline."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CampaignScale:
    """Size of a campaign: model, failure rates and length of the runs.

    Attributes:
        failure_every: the failure rates, as steps between two failures.
        max_steps: of a run; a run at a rarer rate is padded.
        max_failures: of a run.
        hosts: number of hosts, with one device each.
        width: of the model.
        layers: of the model.
        fixed: checkpoint intervals in steps that are run besides the best one.
        pairs: of windows, to measure the cost of a checkpoint.
        window: length of a window in steps.
        with_defaults: whether a failure with JAX's defaults is measured, which takes some minutes.
    """

    failure_every: tuple[int, ...]
    max_steps: int
    max_failures: int
    hosts: int = 4
    width: int = 320
    layers: int = 8
    fixed: tuple[int, ...] = (10, 50)
    pairs: int = 3
    window: int = 5
    with_defaults: bool = True


QUICK: Final = CampaignScale(failure_every=(100, 50, 20), max_steps=30, max_failures=2)
FULL: Final = CampaignScale(
    failure_every=(500, 200, 100, 50, 20, 10, 5), max_steps=200, max_failures=8, pairs=10
)
TINY: Final = CampaignScale(
    failure_every=(8,),
    max_steps=8,
    max_failures=1,
    hosts=2,
    width=32,
    layers=1,
    fixed=(),
    pairs=1,
    window=2,
    with_defaults=False,
)


@dataclasses.dataclass(slots=True)
class ResilienceCampaign:
    """All runs of a benchmark, with their measurements so far.

    Attributes:
        paces: step times without failures, by system.
        costs_s: cost of a checkpoint, each time it was measured.
        blocking_s: the part of each cost that blocks the process.
        digests: SHA-256 of the weights of our undisturbed run, by number of steps.
        runs: figures of the runs with failures.
        timelines: of the runs with failures and the first seed, by system and rate.
        failed: runs that did not finish; they have no figures, and the campaign continues.
        unequal: runs of ours whose final weights differ from those of an undisturbed run.
        defaults_stall_s: stall of one failure with JAX's defaults.
    """

    scale: CampaignScale
    work: Path
    console: Console
    repeats: int
    seed: int
    paces: dict[str, Pace] = dataclasses.field(default_factory=dict)
    costs_s: list[float] = dataclasses.field(default_factory=list)
    blocking_s: list[float] = dataclasses.field(default_factory=list)
    digests: Mapping[int, str] = dataclasses.field(default_factory=dict)
    runs: list[RunFigures] = dataclasses.field(default_factory=list)
    timelines: dict[tuple[str, int], Timeline] = dataclasses.field(default_factory=dict)
    failed: list[str] = dataclasses.field(default_factory=list)
    unequal: list[str] = dataclasses.field(default_factory=list)
    defaults_stall_s: float | None = None
    _done: dict[tuple[str, int, int, int, int], FinishedRun] = dataclasses.field(default_factory=dict)

    def run(self) -> None:
        """Run the undisturbed runs, the calibration, and each system at each rate and seed."""
        self._run_undisturbed()
        self._run_fast_undisturbed()
        self._calibrate()
        if self.scale.with_defaults:
            self._run_defaults()
        for rate in self.scale.failure_every:
            for repeat in range(self.repeats):
                self._run_rate(self._size(rate), self.seed + repeat)

    @property
    def checkpoint_cost_s(self) -> float:
        """The median cost, but at least the blocking time, which noise on a busy machine may hide."""
        return max(statistics.median(self.costs_s), statistics.median(self.blocking_s))

    @property
    def _hosts(self) -> tuple[str, ...]:
        return tuple(make_host_names(self.scale.hosts))

    def _size(self, rate: int) -> RunSize:
        return size_run(rate, max_steps=self.scale.max_steps, max_failures=self.scale.max_failures)

    def _file(self, steps: int, faults: Sequence[ScheduledKill] = (), *, kind: str = OURS) -> BenchmarkJob:
        return BenchmarkJob(
            steps=steps,
            hosts=self._hosts,
            faults=tuple(faults),
            width=self.scale.width,
            layers=self.scale.layers,
            microbatch=MICROBATCH,
            reduction="fast" if kind == FAST else "exact",
        )

    # Without failures.

    def _run_undisturbed(self) -> None:
        totals = sorted({self._size(rate).total for rate in self.scale.failure_every})
        file = msgspec.structs.replace(self._file(totals[-1]), digest_after=tuple(totals))
        ran = self._start(OURS, file, "undisturbed")
        self.digests = ran.digests
        if any(" " in digest or not digest for digest in self.digests.values()):
            raise InternalError(
                f"the undisturbed run: found weights {self.digests}, expected one of each step"
            )
        # The digest delays the step after it.
        times_s = step_times(ran.timeline, leave_out=totals)
        self.paces[OURS] = Pace(step_s=statistics.fmean(times_s))
        self._say(f"undisturbed, {OURS}: {self.paces[OURS].step_s:.3f} s a step, n = {len(times_s)}")

    def _run_fast_undisturbed(self) -> None:
        ran = self._start(FAST, self._file(FAST_STEPS, kind=FAST), "undisturbed-fast")
        times_s = step_times(ran.timeline)
        self.paces[FAST] = Pace(step_s=statistics.fmean(times_s))
        self._say(f"undisturbed, {FAST}: {self.paces[FAST].step_s:.3f} s a step, n = {len(times_s)}")

    def _calibrate(self) -> None:
        """Measure the baseline's pace and the cost of a checkpoint, in windows without and with one in alternation."""
        window = self.scale.window
        steps = 2 * window * (self.scale.pairs + 1)
        file = msgspec.structs.replace(self._file(steps), every=2 * window, phase=window)
        ran = self._start(BARE, file, "calibration")
        self.costs_s = saving_costs(ran.timeline, window)
        self.blocking_s = list(ran.saves_s)
        with_save = [step for step in range(steps) if step % (2 * window) >= window]
        times_s = step_times(ran.timeline, leave_out=with_save)
        self.paces[BARE] = Pace(step_s=statistics.fmean(times_s))
        self._say(
            f"undisturbed, {BARE}: {self.paces[BARE].step_s:.3f} s a step, n = {len(times_s)}; a checkpoint costs "
            f"{statistics.median(self.costs_s):.2f} s ({min(self.costs_s):.2f} to {max(self.costs_s):.2f}, "
            f"n = {len(self.costs_s)}), of which it blocks {statistics.median(self.blocking_s):.2f} s"
        )

    # With failures.

    def _run_defaults(self) -> None:
        """Measure one failure with JAX's defaults, not of the coordination service's host, whose loss ends all."""
        fault = ScheduledKill(step=WARM_STEPS + DEFAULTS_FAULT, host=self._hosts[-1])
        file = self._file(fault.step + QUIET_STEPS + 2, [fault])
        file = msgspec.structs.replace(file, every=DEFAULTS_EVERY, heartbeat_s=None)
        ran = self._start(BARE, file, "defaults", waits_for_all=True)
        (self.defaults_stall_s,) = measure_stalls(ran.timeline)
        self._say(f"one failure with JAX's defaults: {self.defaults_stall_s:.1f} s until the next step")

    def _run_rate(self, size: RunSize, seed: int) -> None:
        for system in OUR_SYSTEMS:
            self._run_system(system, size, seed, every=0)
        pace_s = self.paces[BARE].step_s
        best = compute_interval_steps(self.checkpoint_cost_s, size.failure_every * pace_s, pace_s)
        self._run_system(BEST, size, seed, every=best)
        found = {f"Orbax, n = {every}": every for every in self.scale.fixed}
        for system, every in found.items():
            self._run_system(system, size, seed, every=every)
        if self.defaults_stall_s is not None:
            self.runs += [
                with_longer_stalls(run, self.defaults_stall_s)
                for run in self.runs
                if (run.system, run.failure_every, run.seed) == (BEST, size.failure_every, seed)
            ]

    def _run_system(self, system: str, size: RunSize, seed: int, every: int) -> None:
        try:
            ran = self._ran(system, size, seed, every)
        except InternalError as error:
            self.failed.append(
                f"1 in {size.failure_every}, {system}, seed {seed}: {str(error).splitlines()[0]}"
            )
            self._say(f"did not come to its end: {self.failed[-1]}\n{error}")
            return
        base = self.paces[_kind_of(system)]
        pace = Pace(step_s=base.step_s, saving_s=self.checkpoint_cost_s / every if every else 0.0)
        figures = make_run_figures(
            system,
            size,
            ran.timeline,
            pace,
            seed=seed,
            checkpoint_every=every,
            hosts=self.scale.hosts,
            host_mib=ran.host_mib,
        )
        self.runs.append(figures)
        self.timelines.setdefault((system, size.failure_every), ran.timeline)
        self._say(
            f"one failure in {size.failure_every}, {system}{f' = {every}' if system == BEST else ''}: "
            f"{figures.tokens_per_s:.0f} tokens/s and device, goodput {figures.goodput:.3f}, stalls "
            f"{', '.join(f'{s:.1f}' for s in figures.stalls_s)} s, {figures.redone} steps redone"
        )

    def _ran(self, system: str, size: RunSize, seed: int, every: int) -> FinishedRun:
        """Return the run; rates that differ only in the padding share one."""
        kind = _kind_of(system)
        key = kind, every, size.measured, size.failures, seed
        if key not in self._done:
            faults = draw_faults(seed, size, self._hosts)
            file = self._file(size.total, faults, kind=kind)
            file = msgspec.structs.replace(
                file, every=every, digest_after=(size.total,) if kind == OURS else ()
            )
            ran = self._start(kind, file, f"run-{len(self._done)}")
            if kind == OURS and ran.digests[size.total] != self.digests[size.total]:
                self.unequal.append(f"seed {seed}, {size.failures} failures in {size.measured} steps")
            self._done[key] = ran
        return self._done[key]

    def _start(self, kind: str, file: BenchmarkJob, name: str, *, waits_for_all: bool = False) -> FinishedRun:
        cache = self.work / f"cache-{kind.replace(' ', '-')}"
        if kind in OUR_SYSTEMS:
            return run_resilient(JOBS / "resilient_job.py", file, self.work / name, cache)
        script = JOBS / "restart_job.py"
        return run_restarting(script, file, self.work / name, cache, waits_for_all=waits_for_all)

    def _say(self, line: str) -> None:
        # No markup: the line may quote the output of other programs.
        self.console.print(f"  {line}", highlight=False, markup=False)


def _kind_of(system: str) -> str:
    """Return the kind of job that a system runs: the baseline is one kind, whatever its checkpoint interval."""
    return system if system in OUR_SYSTEMS else BARE
