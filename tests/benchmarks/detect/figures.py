"""Figures of the detect benchmark, and the verdicts on single jobs that they come from. Pure."""

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from tests.benchmarks.detect.audit_cost import AuditCost
from tests.benchmarks.detect.corrupt_hosts import CorruptHostVerdict, find_share_found
from tests.benchmarks.detect.quiet_jobs import QuietFigures
from tests.benchmarks.detect.real_work import RealWorkFigures
from tests.benchmarks.detect.slow_host import SlowHostFigures


class JobVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the detectors made of one job.

    Attributes:
        is_slow: whether a device became slow.
        delay_steps: how many steps after that it was found, the first slow one counted; None: never, or none was.
        false_alarms: findings about others, or before it was slow.
        plain_delay_steps: the same of the plain detector, which names no host.
        plain_false_alarms: the same of the plain detector.
        microbatch_errors: |predicted / observed - 1| of ordinary microbatches, sampled.
        step_errors: the same of ordinary steps.
        detector_s: processor seconds of the detector for a step, median.
        step_s: simulated seconds of a step, median.
        least_errors: what `microbatch_errors` would be if alpha and beta were known.
    """

    is_slow: bool
    delay_steps: int | None
    false_alarms: int
    plain_delay_steps: int | None
    plain_false_alarms: int
    microbatch_errors: list[float]
    step_errors: list[float]
    detector_s: float
    step_s: float
    least_errors: list[float]


class DetectFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all jobs of a size, or of all sizes: the line of JSON.

    Attributes:
        error_microbatch: mean of |predicted / observed - 1| of ordinary microbatches.
        error_least: what it would be if alpha and beta were known: noise, and what takes long for no lasting reason.
        error_step: the same of the longest path, for steps.
        false_alarms_per_job: findings that are wrong.
        plain_false_alarms_per_job: of the plain detector.
        missed: share of jobs with a slow device in which it was not found.
        plain_missed: of the plain detector.
        found_within_steps: median and 95th percentile, the first slow step counted.
        accuracy: share of jobs with the right verdict: no finding, or just the slow device.
        plain_accuracy: of the plain detector, which need not name it.
        detector_overhead: processor time of the detector over the time of a step, median.
        jobs: their number.
    """

    error_microbatch: float
    error_least: float
    error_step: float
    false_alarms_per_job: float
    plain_false_alarms_per_job: float
    missed: float
    plain_missed: float
    found_within_steps: tuple[float, float]
    accuracy: float
    plain_accuracy: float
    detector_overhead: float
    jobs: int


class CorruptionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How well audits find hosts that compute wrongly.

    Attributes:
        sdc_found: share of hosts that were named within three audits of them, each result of which is wrong.
        sdc_found_half: the same where every second result is wrong.
        sdc_false: share of jobs in which another host was named.
        jobs: their number.
        cost: of audits in a real job; None: not measured.
    """

    sdc_found: float
    sdc_found_half: float
    sdc_false: float
    jobs: int
    cost: AuditCost | None


class DetectLine(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON: all sizes together first, then each.

    Attributes:
        half: which half of the seeds.
        corruption: of hosts that compute wrongly, and the audits that find them.
        slow_host: of a real job with a host at half speed; None: not measured.
        real_work: prediction of real microbatches; None: not measured.
        quiet: of jobs in which nothing hangs.
        by_size: the same figures by size.
        machine: that the overhead was measured on.
    """

    error_microbatch: float
    error_step: float
    false_alarms_per_job: float
    missed: float
    found_within_steps: tuple[float, float]
    accuracy: float
    detector_overhead: float
    corruption: CorruptionFigures
    slow_host: SlowHostFigures | None
    real_work: RealWorkFigures | None
    quiet: QuietFigures
    half: str
    total: DetectFigures
    by_size: dict[str, DetectFigures]
    machine: str


def make_detect_figures(verdicts: Sequence[JobVerdict]) -> DetectFigures:
    """Return the figures of some jobs, half of which should have a slow device."""
    slow = [v for v in verdicts if v.is_slow]
    delays = sorted(v.delay_steps for v in slow if v.delay_steps is not None)
    return DetectFigures(
        error_microbatch=_mean(error for v in verdicts for error in v.microbatch_errors),
        error_least=_mean(error for v in verdicts for error in v.least_errors),
        error_step=_mean(error for v in verdicts for error in v.step_errors),
        false_alarms_per_job=_mean(v.false_alarms for v in verdicts),
        plain_false_alarms_per_job=_mean(v.plain_false_alarms for v in verdicts),
        missed=_mean(v.delay_steps is None for v in slow),
        plain_missed=_mean(v.plain_delay_steps is None for v in slow),
        found_within_steps=(find_quantile(delays, 0.5), find_quantile(delays, 0.95)),
        accuracy=_mean(not v.false_alarms and (v.delay_steps is not None) == v.is_slow for v in verdicts),
        plain_accuracy=_mean(
            not v.plain_false_alarms and (v.plain_delay_steps is not None) == v.is_slow for v in verdicts
        ),
        detector_overhead=float(f"{statistics.median(v.detector_s / v.step_s for v in verdicts):.3g}"),
        jobs=len(verdicts),
    )


def find_quantile(values: Sequence[float], share: float) -> float:
    """Return the least of the ascending values that so great a share does not exceed; NaN of none.

    >>> find_quantile([1, 2, 3, 4], 0.5), find_quantile([1, 2, 3, 4], 0.95)
    (2, 4)
    """
    return values[math.ceil(share * len(values)) - 1] if values else math.nan


def make_corruption_figures(
    always: Sequence[CorruptHostVerdict], half_the_time: Sequence[CorruptHostVerdict], cost: AuditCost | None
) -> CorruptionFigures:
    """Return the figures of jobs with a host of which each result is wrong, or every second one."""
    jobs = [*always, *half_the_time]
    return CorruptionFigures(
        sdc_found=round(find_share_found(always), 4),
        sdc_found_half=round(find_share_found(half_the_time), 4),
        sdc_false=_mean(verdict.false_names > 0 for verdict in jobs),
        jobs=len(jobs),
        cost=cost,
    )


def make_detect_line(
    by_size: dict[str, list[JobVerdict]],
    corruption: CorruptionFigures,
    slow_host: SlowHostFigures | None,
    real_work: RealWorkFigures | None,
    quiet: QuietFigures,
    half: str,
    machine: str,
) -> DetectLine:
    """Return the line of JSON."""
    total = make_detect_figures([verdict for verdicts in by_size.values() for verdict in verdicts])
    return DetectLine(
        error_microbatch=total.error_microbatch,
        error_step=total.error_step,
        false_alarms_per_job=total.false_alarms_per_job,
        missed=total.missed,
        found_within_steps=total.found_within_steps,
        accuracy=total.accuracy,
        detector_overhead=total.detector_overhead,
        corruption=corruption,
        slow_host=slow_host,
        real_work=real_work,
        quiet=quiet,
        half=half,
        total=total,
        by_size={name: make_detect_figures(verdicts) for name, verdicts in by_size.items()},
        machine=machine,
    )


def _mean(values: Iterable[float]) -> float:
    found = [float(value) for value in values]
    return round(statistics.fmean(found), 5) if found else math.nan
