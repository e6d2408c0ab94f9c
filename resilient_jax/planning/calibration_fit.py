"""Fit of the cost model's constants to measured step times.

With estimates e_i(c) of measured times t_i, the constants c minimize `sqrt(mean_i ln(e_i(c) / t_i)^2)`: a short step
counts as much as a long one. In the logarithms of constants that is a problem of least squares, which the method of
Levenberg and Marquardt solves (Marquardt 1963, https://doi.org/10.1137/0111030), with differences for derivatives.

A running job has measured few plans, often one, which say nothing of most constants alone. Then each constant is drawn
back to where it began, as by a log-normal prior: those that matter most for the measured steps are changed most, and
what was not measured stays as it was.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

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
JOB_SPREADS: Final = {name: math.log(10.0 if name == "step_overhead_s" else 2.0) for name in FITTED_CONSTANTS}
"""Of a running job's constants: they are assumed right within a factor of two, for two thirds of them. What each step
takes besides is assumed right within a factor of ten: it also waits for input and for the user's code, which no plan
changes, and which must not be taken for slow devices."""
MEASURED_SPREAD = 0.05
"""Standard deviation of the logarithm of measured over estimated times with the best constants: docs/benchmarks.md."""
LEAST: Final = 1e-9
"""Lower bound of what a fit makes of a constant, so that a factor can change it again."""
DIFFERENCE: Final = 0.05
"""Of the logarithm of a constant, for a derivative: estimates have maxima and whole numbers in them."""
MAX_STEP: Final = 1.0
"""Of the logarithm of a constant, in an iteration: estimates are far from linear beyond."""
MAX_ITERATIONS: Final = 60
WORTHWHILE: Final = 1e-5
"""If an iteration lowers the squares by less than this part, it is the last one."""
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING, DAMPING_FACTOR = 1.0, 1e-4, 1e5, 4.0
FAR_BELOW: Final = -3.0
"""Logarithm of all constants over their start, for another beginning."""
LEAST_WEIGHT: Final = 1e-12
"""Of the prior, so that constants without influence stay as they were."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """A plan and its measured step time in seconds, the median of many steps."""

    plan: Plan
    step_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFit:
    """Result of a fit.

    Attributes:
        error: root mean square of ln(estimated / measured) with the fitted constants: 0.1 is about 10 %.
        error_before: the same root mean square with the constants that the fit began with.
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
    spreads: Mapping[str, float] | None = None,
) -> CalibrationFit:
    """Return the constants whose estimates are nearest to measured steps.

    Args:
        measurements: steps of several plans, best of several models; two constants that are never seen apart are fitted
            together, and constants without influence stay as they were.
        start: initial constants; None: those of the first plan.
        constants: names of the constants to fit; those that are 0 at the start stay 0.
        estimate: for steps of another program than a plan's own, such as one with another pipeline schedule.
        spreads: standard deviation of each constant's logarithm around its initial value; None: a constant may have any
            value.

    Raises:
        PlanError: there is no measurement, or a time is not positive.
    """
    if not measurements or any(not (m.step_s > 0 and math.isfinite(m.step_s)) for m in measurements):
        raise PlanError(
            f"measurements: found {[m.step_s for m in measurements]}, expected one or more steps that took a time > 0"
        )
    base = measurements[0].plan.request.calibration if start is None else start
    names = [name for name in constants if getattr(base, name) > 0]
    weights = np.array([LEAST_WEIGHT if spreads is None else spreads[name] ** -2 for name in names])
    fit = _Fit(measurements, names, estimate, base, weights)
    begins = [np.zeros(len(names))]
    # Far away from where it begins a part may belong at 0, and all that a step takes besides may be overhead.
    begins.append(np.full(len(names), FAR_BELOW) if spreads is None else fit.explain_by_overhead())
    _, best = min((_minimize(fit, begin) for begin in begins), key=lambda one: one[0])
    fitted = fit.calibrate(best)
    return CalibrationFit(
        calibration=fitted,
        error=find_error(measurements, fitted, estimate),
        error_before=find_error(measurements, base, estimate),
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
    weights: np.ndarray
    """Of the squares of each constant's logarithm [constants]."""

    def calibrate(self, logarithms: np.ndarray) -> Calibration:
        """Return the constants whose ratios to those at the start have these logarithms [constants], as allowed."""
        values = {}
        for name, logarithm in zip(self.constants, logarithms, strict=True):
            value = max(getattr(self.start, name) * math.exp(logarithm), LEAST)
            values[name] = min(value, 1.0) if name in _PARTS else value
        return dataclasses.replace(self.start, **values)

    def explain_by_overhead(self) -> np.ndarray:
        """Return the logarithms [constants] with which all that steps take beyond the estimates is overhead."""
        excess_s = min(one.step_s - self.estimate(one.plan, self.start) for one in self.measurements)
        overhead_s = self.start.step_overhead_s
        return np.array(
            [
                math.log1p(max(excess_s, 0.0) / overhead_s) if name == "step_overhead_s" else 0.0
                for name in self.constants
            ]
        )

    def limit(self, logarithms: np.ndarray) -> np.ndarray:
        """Return logarithms [constants] with which no part is above 1."""
        most = [
            -math.log(getattr(self.start, name)) if name in _PARTS else math.inf for name in self.constants
        ]
        return np.minimum(logarithms, most)

    def measure(self, logarithms: np.ndarray) -> np.ndarray:
        """Return ln(estimated / measured) [measurements] over its spread."""
        calibration = self.calibrate(logarithms)
        found = [math.log(self.estimate(one.plan, calibration) / one.step_s) for one in self.measurements]
        return np.array(found) / MEASURED_SPREAD

    def differentiate(self, logarithms: np.ndarray, here: np.ndarray) -> np.ndarray:
        """Return the derivatives [measurements, constants] of `measure`, which is `here` now."""
        # Downwards, because parts may be at 1.
        below = [self.measure(logarithms - DIFFERENCE * unit) for unit in np.eye(len(logarithms))]
        return (here[:, None] - np.stack(below, axis=1)) / DIFFERENCE


def _minimize(fit: _Fit, begin: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the least squares that are found from these logarithms on, and the logarithms [constants] with them."""
    # |r|^2 + sum_j w_j x_j^2 with residuals r(x), over their spread, and w_j = 1 / (spread of x_j)^2: twice the
    # negative logarithm of the posterior. A step s solves (J^T J + W + d diag(J^T J + W)) s = -(J^T r + W x), with
    # W = diag(w) and the damping d.
    weights, damping = fit.weights, FIRST_DAMPING
    x = begin
    r = fit.measure(x)
    squares = r @ r + weights @ x**2
    for _ in range(MAX_ITERATIONS):
        slopes = fit.differentiate(x, r)
        matrix = slopes.T @ slopes + np.diag(weights)
        gradient = slopes.T @ r + weights * x
        before = squares
        while squares == before and damping < MOST_DAMPING:
            step = -np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient)
            tried = fit.limit(x + np.clip(step, -MAX_STEP, MAX_STEP))
            found = fit.measure(tried)
            if (fewer := found @ found + weights @ tried**2) < squares:
                x, r, squares = tried, found, fewer
                damping = max(damping / DAMPING_FACTOR, LEAST_DAMPING)
            else:
                damping *= DAMPING_FACTOR
        if before - squares <= WORTHWHILE * before:
            break
    return float(squares), x
