"""The figures of the detect benchmark, from known verdicts, and single simulated jobs."""

import math

import pytest

from resilient_jax.config import JobConfig
from resilient_jax.errors import CallerError
from resilient_jax.health.duration_model import WorkSample
from tests.benchmarks.detect.audit_cost import make_audit_cost
from tests.benchmarks.detect.command import Half, detect, make_job
from tests.benchmarks.detect.corrupt_hosts import (
    MAX_AUDITS,
    CorruptHostVerdict,
    find_share_found,
    judge_corrupt_hosts,
)
from tests.benchmarks.detect.figures import JobVerdict, make_detect_figures
from tests.benchmarks.detect.quiet_jobs import JOB_HOURS, judge_quiet_jobs
from tests.benchmarks.detect.real_work import make_real_work_figures
from tests.benchmarks.detect.slow_host import SETTLING_STEPS, find_median_step_s, make_slow_host_figures
from tests.benchmarks.detect.verdicts import judge_job
from tests.benchmarks.step_times import StepTime


def verdict(*, is_slow: bool, delay: int | None = None, false_alarms: int = 0, plain: int = 0) -> JobVerdict:
    return JobVerdict(
        is_slow=is_slow,
        delay_steps=delay,
        false_alarms=false_alarms,
        plain_delay_steps=None,
        plain_false_alarms=plain,
        microbatch_errors=[0.01, 0.03],
        step_errors=[0.02],
        detector_s=0.001,
        step_s=2.0,
        least_errors=[0.01],
    )


def test_figures_are_shares_of_the_jobs_that_they_are_about():
    figures = make_detect_figures(
        [
            verdict(is_slow=True, delay=2),
            verdict(is_slow=True, delay=3, false_alarms=1),
            verdict(is_slow=True),
            verdict(is_slow=False, plain=2),
        ]
    )
    assert figures.missed == pytest.approx(1 / 3, abs=1e-4)
    assert figures.plain_missed == 1.0
    assert (figures.false_alarms_per_job, figures.plain_false_alarms_per_job) == (0.25, 0.5)
    # Right are the first, and the healthy one, in which nothing was found.
    assert (figures.accuracy, figures.plain_accuracy) == (0.5, 0.0)
    assert figures.found_within_steps == (2, 3)
    assert (figures.error_microbatch, figures.error_step, figures.error_least) == (0.02, 0.02, 0.01)
    assert figures.detector_overhead == 0.0005


def test_without_a_slow_job_nothing_is_missed():
    figures = make_detect_figures([verdict(is_slow=False)])
    assert math.isnan(figures.missed)
    assert figures.accuracy == 1.0


def test_jobs_of_the_two_halves_and_of_two_numbers_differ_and_a_job_is_drawn_from_its_seed():
    jobs = [make_job("small", half, number) for half in Half for number in (1, 3)]
    seconds = [next(job.run()).seconds for job in jobs]
    assert len(set(seconds)) == 4
    assert next(make_job("small", Half.DEVELOPMENT, 1).run()).seconds == seconds[0]


def test_the_slow_device_of_a_job_is_found_and_a_healthy_job_has_no_finding():
    slow, healthy = (judge_job(make_job("small", Half.DEVELOPMENT, number)) for number in (1, 2))
    assert slow.delay_steps in (2, 3)
    assert (slow.false_alarms, healthy.false_alarms, healthy.delay_steps) == (0, 0, None)
    assert sum(healthy.microbatch_errors) / len(healthy.microbatch_errors) < 0.02


def test_a_size_that_is_not_known_is_refused():
    with pytest.raises(CallerError, match=r"huge.*expected 2 jobs or more, sizes of small, medium, large"):
        detect(sizes=["huge"])


def test_a_host_that_always_errs_is_named_in_its_first_audit_and_a_sound_one_never():
    verdicts = judge_corrupt_hosts(20, 1.0, "development")
    assert [verdict.audits for verdict in verdicts] == [1] * 20
    verdicts += judge_corrupt_hosts(20, 0.5, "development")
    assert not any(verdict.false_names for verdict in verdicts)
    assert not any(verdict.audits is not None for verdict in judge_corrupt_hosts(1, 0.0, "development"))


def test_a_host_counts_as_found_within_three_audits_of_it():
    found = [
        CorruptHostVerdict(audits=audits, false_names=0) for audits in (1, MAX_AUDITS, MAX_AUDITS + 1, None)
    ]
    assert find_share_found(found) == 0.5


def test_an_audit_costs_what_audited_steps_take_more_as_often_as_there_is_one_by_default():
    ends = [0.0, 1.0, 2.0, 3.0, 4.0, 5.5, 6.5, 8.0, 9.0]
    steps = [StepTime(process=1, step=step, generation=1, at_s=at_s) for step, at_s in enumerate(ends)]
    cost = make_audit_cost(steps, {5, 7}, num_microbatches=12, num_hosts=4)
    assert (cost.step_s, cost.audited_step_s, cost.audited_steps) == (1.0, 1.5, 2)
    assert cost.audit_overhead == pytest.approx(0.001 * 12 / 4 * 0.5)


def test_the_throughput_with_a_slow_host_is_a_share_of_what_all_speeds_add_up_to():
    figures = make_slow_host_figures(by_speed_s=0.25, even_s=0.4)
    # 16 microbatches of 0.05 s on 3.5 hosts: 0.229 s.
    assert (figures.slow_host_throughput, figures.slow_host_throughput_even) == (0.914, 0.571)


def test_steps_before_speeds_are_settled_do_not_count():
    ends = [
        0.5 * step if step <= SETTLING_STEPS else 0.5 * SETTLING_STEPS + (step - SETTLING_STEPS)
        for step in range(50)
    ]
    steps = [StepTime(process=1, step=step, generation=1, at_s=at_s) for step, at_s in enumerate(ends)]
    assert find_median_step_s(steps) == 1


def test_jobs_in_which_nothing_hangs_lose_no_host_unless_deadlines_are_too_short():
    calm = judge_quiet_jobs(JOB_HOURS, "test")
    assert (calm.job_hours, calm.false_kills) == (JOB_HOURS, 0)
    assert calm.longest_s > 5
    hasty = judge_quiet_jobs(JOB_HOURS, "test", JobConfig(hang_timeout_s=1.0, user_code_timeout_s=2.0))
    assert hasty.false_kills > 0


def test_real_microbatches_are_predicted_by_lengths():
    lengths = [(100.0, 1e4), (100.0, 2e3), (80.0, 6e3)] * 8
    samples = [WorkSample(tokens=n, squares=s, seconds=1e-3 * n + 1e-4 * s) for n, s in lengths]
    figures = make_real_work_figures(samples[:12], samples[12:])
    assert figures.error_microbatch_real == pytest.approx(0, abs=1e-6)
    assert figures.error_without_lengths > 0.3
