"""Fitted constants are recovered from step times that were computed with them."""

import dataclasses
import math

import pytest

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.calibration_fit import (
    FITTED_CONSTANTS,
    JOB_SPREADS,
    StepMeasurement,
    estimate_step_s,
    find_error,
    fit_calibration,
)
from resilient_jax.planning.device_layout import NO_LAYER_LIMITS
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.search import search_plan
from tests.support.plan_topologies import cluster, small_profile

DEFAULT = Calibration()
TRUE = Calibration(
    matrix_efficiency=0.41,
    link_efficiency=0.55,
    latency_factor=3.0,
    kernel_overhead_s=8e-5,
    step_overhead_s=3e-3,
)


def plans_of(profile):
    """Return plans with different axes, searched with the default constants."""
    topology = cluster([1.0] * 4)
    wishes = [{}, {Axis.TENSOR: 4}, {Axis.FSDP: 8}, {Axis.PIPELINE: 3}, {Axis.REPLICA: 8}, {Axis.SEQUENCE: 2}]
    return [search_plan(profile, topology, global_batch=48, axes=axes) for axes in wishes]


def test_an_estimate_with_the_plans_own_constants_is_the_plans_step_time():
    for plan in plans_of(small_profile()):
        assert estimate_step_s(plan, plan.request.calibration) == pytest.approx(plan.step_time_s)


def test_an_estimate_of_a_pipeline_with_layer_limits_is_the_plans_step_time():
    profile = small_profile(layers=6, vocabulary_tokens=4)
    topology = cluster([0.6, 1.0, 1.0, 1.0], devices=1, network=1e7)
    plan = search_plan(profile, topology, global_batch=2, axes={Axis.REPLICA: 2, Axis.PIPELINE: 2})
    assert plan.layout.layer_limits != NO_LAYER_LIMITS
    assert estimate_step_s(plan, plan.request.calibration) == pytest.approx(plan.step_time_s)


def test_constants_fitted_to_one_model_estimate_another():
    measured = [StepMeasurement(plan=p, step_s=estimate_step_s(p, TRUE)) for p in plans_of(small_profile())]
    fit = fit_calibration(measured)
    assert fit.error < 0.02 < fit.error_before
    for plan in plans_of(small_profile(layers=6, width=128)):
        assert estimate_step_s(plan, fit.calibration) == pytest.approx(estimate_step_s(plan, TRUE), rel=0.1)


def test_constants_without_influence_stay_as_they_were():
    alone = search_plan(small_profile(), cluster([1.0], devices=1), global_batch=48)
    fit = fit_calibration([StepMeasurement(plan=alone, step_s=2 * alone.step_time_s)])
    assert fit.calibration.link_efficiency == Calibration().link_efficiency
    assert fit.calibration.fsdp_overlap == Calibration().fsdp_overlap
    assert fit.error < 0.01


def test_one_measured_plan_changes_most_what_its_step_depends_on_most():
    plan = search_plan(small_profile(width=512, sequence_tokens=256), cluster([1.0] * 4), global_batch=480)
    measured = [StepMeasurement(plan=plan, step_s=3 * plan.step_time_s)]
    fit = fit_calibration(measured, spreads=JOB_SPREADS)
    assert fit.error < 0.02 < 1 < fit.error_before
    influence = {
        name: abs(
            estimate_step_s(plan, dataclasses.replace(DEFAULT, **{name: getattr(DEFAULT, name) / 1.1}))
            / plan.step_time_s
            - 1
        )
        for name in FITTED_CONSTANTS
    }
    changes = {
        name: abs(math.log(getattr(fit.calibration, name) / getattr(DEFAULT, name)))
        for name in FITTED_CONSTANTS
    }
    assert max(changes, key=changes.__getitem__) == max(influence, key=influence.__getitem__)
    least = min(influence, key=influence.__getitem__)
    assert changes[least] < 0.1, "the step says nothing of it"


def test_a_short_step_that_takes_much_longer_waits_for_something_else():
    plan = search_plan(small_profile(), cluster([1.0] * 4), global_batch=48)
    fit = fit_calibration([StepMeasurement(plan=plan, step_s=plan.step_time_s + 0.2)], spreads=JOB_SPREADS)
    assert fit.error < 0.1
    assert fit.calibration.step_overhead_s > 0.1
    assert fit.calibration.matrix_efficiency > DEFAULT.matrix_efficiency / 2


def test_a_constant_that_is_given_as_0_stays_0():
    plan = search_plan(small_profile(), cluster([1.0] * 4), global_batch=48)
    given = dataclasses.replace(DEFAULT, latency_factor=0.0)
    fit = fit_calibration([StepMeasurement(plan=plan, step_s=2 * plan.step_time_s)], given)
    assert fit.calibration.latency_factor == 0
    assert fit.error < 0.01


def test_a_plan_that_was_not_run_is_estimated_better_after_the_fit_to_one_that_was():
    plans = plans_of(small_profile())
    fit = fit_calibration(
        [StepMeasurement(plan=plans[0], step_s=estimate_step_s(plans[0], TRUE))], spreads=JOB_SPREADS
    )
    others = [StepMeasurement(plan=plan, step_s=estimate_step_s(plan, TRUE)) for plan in plans[1:]]
    assert find_error(others, fit.calibration) < find_error(others, DEFAULT)


def test_no_measurement_is_refused():
    plan = plans_of(small_profile())[0]
    with pytest.raises(PlanError, match="expected one or more steps"):
        fit_calibration([])
    with pytest.raises(PlanError, match=r"found \[0\.0\]"):
        fit_calibration([StepMeasurement(plan=plan, step_s=0.0)])


def test_fitted_constants_are_in_range_for_any_measurement():
    plan = plans_of(small_profile())[0]
    fit = fit_calibration([StepMeasurement(plan=plan, step_s=plan.step_time_s / 1000)])
    assert all(getattr(fit.calibration, field.name) >= 0 for field in dataclasses.fields(Calibration))
    assert fit.calibration.matrix_efficiency <= 1


def test_only_the_constants_that_are_asked_for_are_fitted():
    plans = plans_of(small_profile())
    true = dataclasses.replace(Calibration(), attention_efficiency=0.2)
    measured = [StepMeasurement(plan=plan, step_s=estimate_step_s(plan, true)) for plan in plans]
    fit = fit_calibration(measured, Calibration(), constants=["attention_efficiency"])
    assert fit.calibration.attention_efficiency == pytest.approx(0.2, rel=0.02)
    assert dataclasses.replace(fit.calibration, attention_efficiency=0.7) == Calibration()


def test_steps_of_another_program_are_fitted_by_its_own_estimate():
    plans = plans_of(small_profile())
    measured = [StepMeasurement(plan=plan, step_s=3.0) for plan in plans]
    fit = fit_calibration(
        measured,
        Calibration(),
        constants=["matrix_efficiency"],
        estimate=lambda _, constants: 1 / constants.matrix_efficiency,
    )
    assert fit.calibration.matrix_efficiency == pytest.approx(1 / 3, rel=0.01)
