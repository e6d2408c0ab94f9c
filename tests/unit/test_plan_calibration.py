"""When the constants of a running job are fitted, to which steps, and what is said of it."""

import pytest
from plan_topologies import cluster, small_profile

from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.search import search_plan
from resilient_jax.trainer.plan_calibration import FIRST_STEP, FITTED_AFTER, PlanCalibrator

TOPOLOGY = cluster([1.0] * 4)


def find_plan(*lost):
    topology = TOPOLOGY.without(*lost) if lost else TOPOLOGY
    return search_plan(small_profile(), topology, global_batch=48)


def run(calibrator, plan, step_s, *, steps=FITTED_AFTER[0] + 1):
    """Return the numbers of the steps after which constants are to be fitted."""
    return [number for number in range(steps) if calibrator.end_step(plan, number, step_s)]


def test_constants_are_fitted_after_some_steps_and_again_when_threads_have_compiled():
    calibrator, plan = PlanCalibrator(Calibration()), find_plan()
    assert run(calibrator, plan, 1.0, steps=FITTED_AFTER[-1] + 1) == list(FITTED_AFTER)


def test_the_first_steps_of_a_generation_and_those_of_the_one_before_do_not_count():
    calibrator, plan = PlanCalibrator(Calibration()), find_plan()
    run(calibrator, plan, 0.5)
    for number in range(FITTED_AFTER[0] + 1):
        calibrator.end_step(plan, number, 100.0 if number < FIRST_STEP else 2.0)
    found = calibrator.fit(lambda: None)
    assert (found.measured.step_s, found.num_plans) == (2.0, 1), (
        "the same plan counts once, the newest steps of it"
    )


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
