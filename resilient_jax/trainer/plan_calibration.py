"""Fits the constants of the cost model to the steps of a running job, so that its estimates improve by themselves.

The measured step of each plan that this job has run counts once. The fit begins with the constants that the job was
given, and changes those least that the measured steps say little of (`planning.calibration_fit`).
"""

import math
import statistics
from collections import deque
from typing import Final, NamedTuple

from resilient_jax.compile.ahead_of_time import CancellationCheck
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.calibration_fit import (
    FITTED_CONSTANTS,
    JOB_SPREADS,
    CalibrationFit,
    StepMeasurement,
    estimate_step_s,
    fit_calibration,
)
from resilient_jax.planning.plan import Plan
from resilient_jax.protocol.plan_records import PlanConstants

FITTED_AFTER: Final = (8, 32, 128, 512)
"""The numbers of measured steps in a generation after which constants are fitted."""
MEDIAN_STEPS: Final = 64
"""A plan's step is the median of so many, the last ones."""
MAX_PLANS: Final = 8
"""The newest plans count: a fit estimates each some fifty times."""
LEAST_CHANGE: Final = 0.01
"""A constant that changes by less is not named."""


class JobFit(NamedTuple):
    """A fit to the steps of a job.

    Attributes:
        fit: constants fitted to the steps of all plans so far.
        given: the constants that the job began with.
    """

    plan: Plan
    fit: CalibrationFit
    given: Calibration

    @property
    def constants(self) -> PlanConstants:
        """The fitted constants by name."""
        return tuple((name, getattr(self.fit.calibration, name)) for name in FITTED_CONSTANTS)

    @property
    def estimated_s(self) -> float:
        """The estimate of a step of the plan that runs, with the constants that the job began with."""
        return estimate_step_s(self.plan, self.given)

    @property
    def calibrated_s(self) -> float:
        """The same with the fitted constants."""
        return estimate_step_s(self.plan, self.fit.calibration)

    def describe_changes(self) -> str:
        """Return what the fit has changed, such as "matrix_efficiency 0.75 to 0.31"."""
        return ", ".join(
            f"{name} {getattr(self.given, name):.3g} to {value:.3g}"
            for name, value in self.constants
            if not math.isclose(value, getattr(self.given, name), rel_tol=LEAST_CHANGE)
        )


class PlanCalibrator:
    """Measures the steps of plans, in all generations of a process.

    Attributes:
        given: the constants that the job began with.
    """

    def __init__(self, given: Calibration) -> None:
        self.given = given
        self._steps: deque[float] = deque(maxlen=MEDIAN_STEPS)
        """Of this generation, as is their number."""
        self._num_steps = 0
        self._measured: dict[tuple[str, int], StepMeasurement] = {}
        """By plan and its devices, the oldest first."""

    def forget_steps(self) -> None:
        """Measure another plan from now on."""
        self._steps.clear()
        self._num_steps = 0

    def end_step(self, plan: Plan, seconds: float) -> tuple[StepMeasurement, ...]:
        """Note a step of this generation that waited for no program.

        Returns:
            The measured steps of all plans, the step of this plan last, if constants are to be fitted now; else ().
        """
        self._steps.append(seconds)
        self._num_steps += 1
        if self._num_steps not in FITTED_AFTER:
            return ()
        key, step_s = (plan.shape, plan.device_count), statistics.median(self._steps)
        before = self._measured.pop(key, None)
        # What makes a step longer at times, such as a slow host or input that lags, is not the plan's.
        step_s = min(step_s, before.step_s) if before is not None else step_s
        self._measured[key] = StepMeasurement(plan=plan, step_s=step_s)
        return tuple(self._measured.values())[-MAX_PLANS:]


def fit_job(given: Calibration, measured: tuple[StepMeasurement, ...], check: CancellationCheck) -> JobFit:
    """Return the constants that fit the measured steps of a job; takes a tenth of a second of one core, or less.

    Args:
        given: the constants that the job began with.
        measured: measured steps of the job, those of the plan that runs last.
        check: raises if the fit is to end.
    """

    def estimate(plan: Plan, calibration: Calibration) -> float:
        check()
        return estimate_step_s(plan, calibration)

    fit = fit_calibration(measured, given, estimate=estimate, spreads=JOB_SPREADS)
    return JobFit(measured[-1].plan, fit, given)
