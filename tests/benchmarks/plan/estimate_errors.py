"""How right the estimates of plans were: of memory, and of which plan is fastest. Pure."""

import statistics
from collections.abc import Sequence

import msgspec


class MemoryCase(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled plan: what was estimated for a device, and what XLA says it needs, in bytes."""

    name: str
    estimated_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """`estimated / measured - 1`."""
        return self.estimated_bytes / self.measured_bytes - 1


class TimedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan whose program ran.

    Attributes:
        plan: its axes.
        estimated_s: a step.
        step_s: the median of its measured steps.
        cpu_s: processor time of a step, which others on the machine change less: the median.
        halves_s: medians of every other step, and of those between.
    """

    plan: str
    estimated_s: float
    step_s: float
    cpu_s: float
    halves_s: tuple[float, float]


class TimedModel(msgspec.Struct, frozen=True, kw_only=True):
    """All feasible plans of one model."""

    name: str
    plans: list[TimedPlan]


class PlanMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """What the script measured.

    Attributes:
        memory: of the grid.
        models: that no constant was fitted to.
        calibrated_on: the model that the constants were fitted to.
        calibration: the constants.
        fit_error: root mean square of ln(estimated / measured) on that model.
        rounds: in which each step was timed.
    """

    memory: list[MemoryCase]
    models: list[TimedModel]
    calibrated_on: str
    calibration: dict[str, float]
    fit_error: float
    rounds: int


class ModelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model: regret and rank correlation by the time of a step, and by processor time.

    Attributes:
        plans: that ran.
        chosen, best: the plan with the least estimate, and with the least measured step.
        regret: `step of the chosen / step of the best - 1`.
        rank_correlation: Spearman's, of estimates and measured steps.
        repeatability: the same of the measured steps and the others: more than this says nothing.
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


class ProgramFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the line of JSON: of programs that were compiled and ran.

    Attributes:
        memory_error: `largest` and `median`, without signs.
        memory_cases: each program's `estimated / measured - 1`.
        regret, rank_correlation: of the worst model.
        models: each.
        calibrated_on, calibration, fit_error: where the constants come from.
        programs_n: rounds.
    """

    memory_error: dict[str, float]
    memory_cases: dict[str, float]
    regret: float
    rank_correlation: float
    models: list[ModelFigures]
    calibrated_on: str
    calibration: dict[str, float]
    fit_error: float
    programs_n: int


def make_program_figures(found: PlanMeasurements) -> ProgramFigures:
    """Gives the figures; of several models the worst counts."""
    models = [make_model_figures(model) for model in found.models]
    return ProgramFigures(
        memory_error=summarize_memory_errors(found.memory),
        memory_cases={case.name: round(case.error, 4) for case in found.memory},
        regret=max(model.regret for model in models),
        rank_correlation=min(model.rank_correlation for model in models),
        models=models,
        calibrated_on=found.calibrated_on,
        calibration=found.calibration,
        fit_error=round(found.fit_error, 4),
        programs_n=found.rounds,
    )


def make_model_figures(model: TimedModel) -> ModelFigures:
    """Gives how good the choice of the estimates was."""
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
    )


def summarize_memory_errors(cases: Sequence[MemoryCase]) -> dict[str, float]:
    """Gives the largest and the median error, without their signs."""
    errors = [abs(case.error) for case in cases]
    return {"largest": round(max(errors), 4), "median": round(statistics.median(errors), 4)}


def correlate_ranks(one: Sequence[float], other: Sequence[float]) -> float:
    """Gives Spearman's rank correlation: Pearson's of the ranks, equal values sharing the mean of theirs.

    >>> correlate_ranks([1, 2, 3, 4], [10, 30, 20, 40])
    0.8
    """
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
