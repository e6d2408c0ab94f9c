"""Fit of the cost model's constants to measured step times.

With estimates e_i(c) of measured times t_i, the constants c minimize `sqrt(mean_i ln(e_i(c) / t_i)^2)`: a short step
counts as much as a long one. The minimum is found by a pattern search over factors of each constant, which needs no
derivatives of maxima and integers (Hooke and Jeeves 1961, https://doi.org/10.1145/321062.321069).

A running job has measured few plans, often one, which say nothing of most constants alone. Then each constant is drawn
back to where it began, as by a log-normal prior: those that matter most for the measured steps are changed most, and
what was not measured stays as it was.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.plan import Plan

FITTED_CONSTANTS = (
    "matrix_efficiency",
    "memory_efficiency",
    "link_efficiency",
    "latency_factor",
    "kernel_overhead_s",
    "step_overhead_s",
)
"""Fitted in this order, unless others are asked for. The steps of one job hardly tell the rest apart: its sequences
are equally long, so that attention is a fixed part of its products, and what overlaps is not seen alone."""
_PARTS = frozenset(
    {*FITTED_CONSTANTS[:3], "attention_efficiency", "fsdp_overlap", "activation_overlap", "usable_memory"}
)
JOB_SPREAD = math.log(2.0)
"""Of a running job's constants: assumed right within a factor of two, for two thirds of them."""
MEASURED_SPREAD = 0.05
"""Standard deviation of the logarithm of measured over estimated times with the best constants: docs/benchmarks.md."""
FIRST_FACTOR, LAST_FACTOR = 2.0, 1.002
WORTHWHILE = 0.99
"""If the error falls by less than this ratio, the factor is reduced."""
LEAST = 1e-9
"""Lower bound of constants that are not fractions, so that a factor can change them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """A plan and its measured step time in seconds, the median of many steps."""

    plan: Plan
    step_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFit:
    """Result of a fit.

    Attributes:
        calibration: the fitted constants.
        error: root mean square of ln(estimated / measured) with them: 0.1 is about 10 %.
        error_before: the same with the constants that the fit began with.
    """

    calibration: Calibration
    error: float
    error_before: float


def estimate_step_s(plan: Plan, calibration: Calibration) -> float:
    """Return the step time of a plan under other constants."""
    cost_model = CostModel(dataclasses.replace(plan.request, calibration=calibration))
    classes = {
        replica_class.composition: replica_class
        for replica_class in cost_model.find_block_classes(plan.layout, plan.microbatch)
    }
    ordered = [classes[composition] for composition in plan.compositions]
    return cost_model.estimate_plan(plan.layout, plan.microbatch, ordered, plan.blocks).step_s


Estimate = Callable[[Plan, Calibration], float]
"""Seconds of a step of a plan under given constants."""


def fit_calibration(
    measurements: Sequence[StepMeasurement],
    start: Calibration | None = None,
    *,
    constants: Sequence[str] = FITTED_CONSTANTS,
    estimate: Estimate = estimate_step_s,
    spread: float = math.inf,
) -> CalibrationFit:
    """Return the constants whose estimates are nearest to measured steps.

    Args:
        measurements: steps of several plans, best of several models; two constants that are never seen apart are fitted
            together, and constants without influence stay as they were.
        start: initial constants; None: those of the first plan.
        constants: names of the constants to fit, in this order.
        estimate: for steps of another program than a plan's own, such as one with another pipeline schedule.
        spread: standard deviation of the logarithm of each constant around where it begins; infinite: it may be any.

    Raises:
        PlanError: there is no measurement, or a time is not positive.
    """
    if not measurements or any(not (m.step_s > 0 and math.isfinite(m.step_s)) for m in measurements):
        raise PlanError(
            f"measurements: found {[m.step_s for m in measurements]}, expected one or more steps that took a time > 0"
        )
    base = measurements[0].plan.request.calibration if start is None else start
    fit = _Fit(measurements, constants, estimate, base, spread)
    error_before = base_error = fit.error(base)
    # Factors are 2, 2^(1/2), 2^(1/4), ...: one that lowers the error by less than 1 % is replaced by its root.
    factor = FIRST_FACTOR
    while factor > LAST_FACTOR:
        best, error = fit.explore(base, base_error, factor)
        if error >= base_error * WORTHWHILE:
            factor = math.sqrt(factor)
        # The pattern move of Hooke and Jeeves: repeat the last improvement while it improves.
        while error < base_error:
            ahead = fit.move_beyond(base, best)
            base, base_error = best, error
            best, error = fit.explore(ahead, fit.error(ahead), factor)
    return CalibrationFit(
        calibration=base, error=find_error(measurements, base, estimate), error_before=error_before
    )


def find_error(
    measurements: Sequence[StepMeasurement], calibration: Calibration, estimate: Estimate = estimate_step_s
) -> float:
    """Return the root mean square of ln(estimated / measured): 0.1 is about 10 %."""
    # sqrt(mean_i ln(e_i / t_i)^2), without unit; e_i estimated and t_i measured, both in s.
    squares = [math.log(estimate(m.plan, calibration) / m.step_s) ** 2 for m in measurements]
    return math.sqrt(sum(squares) / len(squares))


class _Fit(NamedTuple):
    """What is fitted to what."""

    measurements: Sequence[StepMeasurement]
    constants: Sequence[str]
    estimate: Estimate
    start: Calibration
    spread: float

    def explore(self, calibration: Calibration, error: float, factor: float) -> tuple[Calibration, float]:
        """Return the best calibration found by changing each constant by a factor in turn, and its error."""
        for name in self.constants:
            for times in (factor, 1 / factor):
                other = _with(calibration, {name: getattr(calibration, name) * times})
                if (found := self.error(other)) < error:
                    calibration, error = other, found
                    break
        return calibration, error

    def move_beyond(self, start: Calibration, end: Calibration) -> Calibration:
        """Return the calibration as far beyond `end` as `end` is from `start`, in factors."""
        # c_ahead = c_end (c_end / c_start) for each constant: the pattern move in logarithms.
        ratios = {name: getattr(end, name) / max(getattr(start, name), LEAST) for name in self.constants}
        return _with(end, {name: getattr(end, name) * ratio for name, ratio in ratios.items()})

    def error(self, calibration: Calibration) -> float:
        """Return what is minimized."""
        # sqrt(E^2 + (s_t / s_c)^2 / n sum_j ln(c_j / c_j0)^2): the mode of the posterior, with s_t the spread of times
        # and s_c that of constants.
        error = find_error(self.measurements, calibration, self.estimate)
        if math.isinf(self.spread):
            return error
        away = sum(
            math.log(max(getattr(calibration, name), LEAST) / max(getattr(self.start, name), LEAST)) ** 2
            for name in self.constants
        )
        return math.hypot(error, MEASURED_SPREAD / self.spread * math.sqrt(away / len(self.measurements)))


def _with(calibration: Calibration, values: Mapping[str, float]) -> Calibration:
    """Return the calibration with these constants, clipped to their ranges."""
    allowed = {
        name: min(value, 1.0) if name in _PARTS else max(value, LEAST) for name, value in values.items()
    }
    return dataclasses.replace(calibration, **allowed)
