"""Regret, rank correlation and memory errors of plans, compared with values computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.plan.estimate_errors import (
    CalibratedError,
    MemoryCase,
    PlanMeasurements,
    TimedModel,
    TimedPlan,
    correlate_ranks,
    make_program_figures,
    summarize_memory_errors,
)


def model(name, *rows):
    """Return a timed model; a row is a plan's (estimate, step, processor) in s; the last two are also its halves."""
    return TimedModel(
        name=name,
        plans=[
            TimedPlan(plan=f"plan {i}", estimated_s=e, step_s=s, cpu_s=c, halves_s=(s, c))
            for i, (e, s, c) in enumerate(rows)
        ],
        error_given=0.4,
        errors_calibrated=[CalibratedError(plans=1, error=0.3), CalibratedError(plans=4, error=0.1)],
    )


def case(estimated, measured):
    return MemoryCase(name=f"{estimated}", estimated_bytes=estimated, measured_bytes=measured)


def test_regret_is_the_excess_time_of_the_chosen_plan_over_the_best_in_the_worst_model():
    found = make_program_figures(
        PlanMeasurements(
            memory=[case(1.0, 1.0)],
            models=[
                model("right", (1, 10, 5), (2, 20, 6), (3, 30, 7)),
                model("wrong", (1, 12, 5), (2, 10, 6), (3, 30, 7)),
            ],
            calibrated_on="another",
            calibration={},
            fit_error=0.1,
            rounds=3,
        )
    )
    assert [one.regret for one in found.models] == [0, pytest.approx(0.2)]
    assert (found.models[1].chosen, found.models[1].best) == ("plan 0", "plan 1")
    assert found.models[1].regret_cpu == 0
    assert [one.repeatability for one in found.models] == [pytest.approx(1), pytest.approx(0.5)]
    assert (found.regret, found.rank_correlation) == (pytest.approx(0.2), pytest.approx(0.5))
    assert (found.estimate_error, found.estimate_error_calibrated) == (0.4, 0.1)
    assert found.models[0].estimate_errors_calibrated == {"1": 0.3, "4": 0.1}


def test_memory_errors_are_summarized_by_largest_and_median_absolute_error():
    assert summarize_memory_errors([case(90, 100), case(105, 100), case(100, 100)]) == {
        "largest": 0.1,
        "median": 0.05,
    }


def test_equal_values_share_a_rank():
    assert correlate_ranks([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)
    assert correlate_ranks([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=20, unique=True))
def test_an_increasing_function_of_the_estimates_has_rank_correlation_one(values):
    assert correlate_ranks(values, [value**3 for value in values]) == pytest.approx(1)
