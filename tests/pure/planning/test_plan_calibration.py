"""When the constants of a running job are fitted, to which steps, and what is said of it."""

import pytest

from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.search import search_plan
from resilient_jax.trainer.plan_calibration import FITTED_AFTER, PlanCalibrator, fit_job
from tests.support.plan_topologies import cluster, small_profile

TOPOLOGY = cluster([1.0] * 4)


def find_plan(*lost):
    topology = TOPOLOGY.without(*lost) if lost else TOPOLOGY
    return search_plan(small_profile(), topology, global_batch=48)


def run(calibrator, plan, step_s, *, steps=FITTED_AFTER[0]):
    """Return what is to be fitted after which steps of one generation."""
    calibrator.forget_steps()
    found = {number: calibrator.end_step(plan, step_s) for number in range(1, steps + 1)}
    return {number: measured for number, measured in found.items() if measured}


def test_constants_are_fitted_after_some_steps_of_each_generation_and_again_after_more():
    calibrator, plan = PlanCalibrator(Calibration()), find_plan()
    for _ in range(2):
        assert list(run(calibrator, plan, 1.0, steps=FITTED_AFTER[-1] + 1)) == list(FITTED_AFTER)


def test_a_plan_counts_once_with_the_shortest_step_of_its_generations():
    calibrator, plan = PlanCalibrator(Calibration()), find_plan()
    for step_s, expected_s in ((2.0, 2.0), (0.5, 0.5), (3.0, 0.5)):
        ((only,),) = run(calibrator, plan, step_s).values()
        assert (only.plan, only.step_s) == (plan, expected_s)


def test_the_plans_of_all_generations_count_and_how_far_off_the_estimates_were_is_known():
    calibrator, given = PlanCalibrator(Calibration()), Calibration()
    plans = find_plan(), find_plan("host-03")
    _, (measured,) = (run(calibrator, plan, 1.5 * plan.step_time_s).values() for plan in plans)
    assert [one.plan for one in measured] == list(plans)
    found = fit_job(given, measured, lambda: None)
    assert found.estimated_s == pytest.approx(measured[-1].step_s / 1.5)
    assert found.calibrated_s == pytest.approx(measured[-1].step_s, rel=0.1)
    assert found.fit.error < 0.1 < 0.4 < found.fit.error_before
    assert "step_overhead_s 0.001 to 0.0" in found.describe_changes()


def test_a_fit_ends_when_its_generation_does():
    plan = find_plan()
    (measured,) = run(PlanCalibrator(Calibration()), plan, 1.0).values()

    def check():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_job(Calibration(), measured, check)
