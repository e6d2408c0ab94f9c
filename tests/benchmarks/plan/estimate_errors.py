"""Errors of the estimates of plans: of memory, and of which plan is fastest. Pure."""

import math
import statistics
from collections.abc import Sequence

import msgspec


class MemoryCase(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a compiled plan on one device, in bytes: the estimate, and what XLA reports."""

    name: str
    estimated_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """`estimated / measured - 1`."""
        return self.estimated_bytes / self.measured_bytes - 1


class TimedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a plan's step: estimated and measured.

    Attributes:
        plan: axes of the plan.
        estimated_s: step time by the estimate.
        step_s: median of the measured step times.
        cpu_s: median processor time of a step, which depends less on the load of the machine.
        halves_s: medians of the even and of the odd measured steps.
    """

    plan: str
    estimated_s: float
    step_s: float
    cpu_s: float
    halves_s: tuple[float, float]


class CalibratedError(msgspec.Struct, frozen=True, kw_only=True):
    """How far off estimates are after a job has fitted constants to the steps of its plans.

    Attributes:
        plans: that it has run: those with the least estimates.
        error: root mean square of ln(estimated / measured) over the others.
    """

    plans: int
    error: float


class TimedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with all of its feasible plans.

    Attributes:
        name: of the model.
        plans: with the constants that were fitted to another model.
        error_given: root mean square of ln(estimated / measured) with the constants that a job is given.
        errors_calibrated: after a job that was given these has run some plans.
    """

    name: str
    plans: list[TimedPlan]
    error_given: float
    errors_calibrated: list[CalibratedError]


class PlanMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Output of the script `plan_programs.py`.

    Attributes:
        memory: cases of the memory grid.
        models: to which no constant was fitted.
        calibrated_on: name of the model to which the constants were fitted.
        calibration: the constants.
        fit_error: root mean square of ln(estimated / measured) on that model.
        rounds: how often the step of each plan was timed.
    """

    memory: list[MemoryCase]
    models: list[TimedModel]
    calibrated_on: str
    calibration: dict[str, float]
    fit_error: float
    rounds: int


class ModelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Regret and rank correlation of one model, by step time and (`_cpu`) by processor time.

    Attributes:
        plans: number of plans that ran.
        chosen, best: the plan with the least estimate, and the plan with the least measured step time.
        regret: `step time of the chosen / step time of the best - 1`.
        rank_correlation: Spearman's, of estimates and measured step times.
        repeatability: Spearman's, of the even and the odd measured steps; a `rank_correlation` above it means nothing.
        estimate_error: root mean square of ln(estimated / measured) with the constants that a job is given.
        estimate_errors_calibrated: the same of the plans that a job has not run yet, by the number of those that it has
            run and fitted its constants to.
    """

    name: str
    plans: int
    chosen: str
    best: str
    regret: float
    rank_correlation: float
    repeatability: float
    regret_cpu: float
    rank_correlation_cpu: float
    estimate_error: float
    estimate_errors_calibrated: dict[str, float]


class ProgramFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the line of JSON for programs that were compiled and timed.

    Attributes:
        memory_error: `largest` and `median` absolute error.
        memory_cases: `estimated / measured - 1` of each program.
        regret, rank_correlation: of the worst model.
        estimate_error, estimate_error_calibrated: root mean square over the models, the latter after the most plans.
        models: figures of each model.
        calibrated_on, calibration, fit_error: as in `PlanMeasurements`.
        programs_n: number of rounds.
    """

    memory_error: dict[str, float]
    memory_cases: dict[str, float]
    regret: float
    rank_correlation: float
    estimate_error: float
    estimate_error_calibrated: float
    models: list[ModelFigures]
    calibrated_on: str
    calibration: dict[str, float]
    fit_error: float
    programs_n: int


class RatioFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Published over estimated time: above 1 the estimate is too fast. `error`: root mean square of its logarithm."""

    least: float
    median: float
    most: float
    error: float


class LayoutRatios(msgspec.Struct, frozen=True, kw_only=True):
    """Ratios with the assumed constants, and with fitted ones, of models that nothing was fitted to."""

    n: int
    assumed: RatioFigures
    fitted: RatioFigures


class GridCorrelation(msgspec.Struct, frozen=True, kw_only=True):
    """Rank correlation of estimated and published time per token in a grid; `is_fitted`: of a development model."""

    n: int
    assumed: float
    fitted: float
    is_fitted: bool


class PublishedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the line of JSON for published layouts.

    Attributes:
        published_ratio: by source.
        published_rank_correlation: by grid.
        published_constants: fitted constants, by source.
        published_layouts: by source and grid, the estimates of each layout.
    """

    published_ratio: dict[str, LayoutRatios]
    published_rank_correlation: dict[str, GridCorrelation]
    published_constants: dict[str, dict[str, float]]
    published_layouts: dict[str, dict[str, tuple[float, float, float]]]


def make_program_figures(found: PlanMeasurements) -> ProgramFigures:
    """Return the figures; regret and rank correlation are those of the worst model."""
    models = [make_model_figures(model) for model in found.models]
    return ProgramFigures(
        memory_error=summarize_memory_errors(found.memory),
        memory_cases={case.name: round(case.error, 4) for case in found.memory},
        regret=max(model.regret for model in models),
        rank_correlation=min(model.rank_correlation for model in models),
        estimate_error=_find_mean([model.error_given for model in found.models]),
        estimate_error_calibrated=_find_mean([model.errors_calibrated[-1].error for model in found.models]),
        models=models,
        calibrated_on=found.calibrated_on,
        calibration=found.calibration,
        fit_error=round(found.fit_error, 4),
        programs_n=found.rounds,
    )


def make_model_figures(model: TimedModel) -> ModelFigures:
    """Return how good the plan with the least estimate was, compared with the measured best."""
    chosen = min(model.plans, key=lambda plan: plan.estimated_s)
    best = min(model.plans, key=lambda plan: plan.step_s)
    estimates = [plan.estimated_s for plan in model.plans]
    return ModelFigures(
        name=model.name,
        plans=len(model.plans),
        chosen=chosen.plan,
        best=best.plan,
        regret=round(chosen.step_s / best.step_s - 1, 4),
        rank_correlation=round(correlate_ranks(estimates, [plan.step_s for plan in model.plans]), 4),
        repeatability=round(correlate_ranks(*zip(*(plan.halves_s for plan in model.plans), strict=True)), 4),
        regret_cpu=round(chosen.cpu_s / min(plan.cpu_s for plan in model.plans) - 1, 4),
        rank_correlation_cpu=round(correlate_ranks(estimates, [plan.cpu_s for plan in model.plans]), 4),
        estimate_error=round(model.error_given, 4),
        estimate_errors_calibrated={str(one.plans): round(one.error, 4) for one in model.errors_calibrated},
    )


def _find_mean(errors: Sequence[float]) -> float:
    """Return the root mean square."""
    return round(math.sqrt(statistics.fmean(error**2 for error in errors)), 4)


def summarize_memory_errors(cases: Sequence[MemoryCase]) -> dict[str, float]:
    """Return the largest and the median absolute error."""
    errors = [abs(case.error) for case in cases]
    return {"largest": round(max(errors), 4), "median": round(statistics.median(errors), 4)}


def correlate_ranks(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation: Pearson's of the ranks, where equal values share their mean rank.

    >>> correlate_ranks([1, 2, 3, 4], [10, 30, 20, 40])
    0.8
    """
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
