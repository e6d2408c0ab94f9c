"""When the constants of a running job are fitted, to which steps, and what is said of it."""

import pytest
from plan_topologies import cluster, small_profile

from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.search import search_plan
from resilient_jax.trainer.plan_calibration import FITTED_AFTER, PlanCalibrator

TOPOLOGY = cluster([1.0] * 4)


def find_plan(*lost):
    topology = TOPOLOGY.without(*lost) if lost else TOPOLOGY
    return search_plan(small_profile(), topology, global_batch=48)


def run(calibrator, plan, step_s, *, steps=FITTED_AFTER[0]):
    """Return the numbers of the steps of one generation after which constants are to be fitted."""
    calibrator.begin_generation()
    return [number for number in range(1, steps + 1) if calibrator.end_step(plan, step_s)]


def test_constants_are_fitted_after_some_steps_of_each_generation_and_again_after_more():
    calibrator, plan = PlanCalibrator(Calibration()), find_plan()
    for _ in range(2):
        assert run(calibrator, plan, 1.0, steps=FITTED_AFTER[-1] + 1) == list(FITTED_AFTER)


def test_a_plan_counts_once_with_the_steps_of_its_newest_generation():
    calibrator, plan = PlanCalibrator(Calibration()), find_plan()
    for step_s in (0.5, 2.0):
        run(calibrator, plan, step_s)
    found = calibrator.fit(lambda: None)
    assert (found.measured.step_s, found.num_plans) == (2.0, 1)


def test_the_plans_of_all_generations_count_and_how_far_off_the_estimates_were_is_known():
    calibrator = PlanCalibrator(Calibration())
    for plan in (find_plan(), find_plan("host-03")):
        run(calibrator, plan, 3 * plan.step_time_s)
    found = calibrator.fit(lambda: None)
    step_s = found.measured.step_s
    assert (found.measured.plan, found.num_plans) == (find_plan("host-03"), 2)
    assert found.estimated_s == pytest.approx(step_s / 3)
    assert found.calibrated_s == pytest.approx(step_s, rel=0.1)
    assert found.fit.error < 0.1 < 1 < found.fit.error_before
    assert "matrix_efficiency 0.75 to 0." in found.describe_changes()


def test_a_fit_ends_when_its_generation_does():
    calibrator, plan = PlanCalibrator(Calibration()), find_plan()
    run(calibrator, plan, 1.0)

    def check():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrator.fit(check)
