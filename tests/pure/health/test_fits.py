"""Fits of durations, change points and longest paths, against what is known or can be enumerated."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.health.change_points import HAZARD, MEAN_SPREAD, PRIOR_SHAPE, ChangePointDetector
from resilient_jax.health.duration_model import WorkSample, fit_durations
from resilient_jax.health.step_prediction import StepPath
from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.routes import make_route
from resilient_jax.pipeline_schedule.task_orders import order_tasks
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule, TaskKind

ALPHA, BETA = 3e-5, 2e-9


def draw_samples(seed: int, count: int, noise: float, outliers: int = 0) -> list[WorkSample]:
    chance = random.Random(seed)
    samples = []
    for index in range(count):
        lengths = [chance.choice((100, 500, 2000, 8000)) for _ in range(8)]
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        seconds = (ALPHA * tokens + BETA * squares) * chance.gauss(1.0, noise)
        samples.append(
            WorkSample(tokens=tokens, squares=squares, seconds=seconds * (20.0 if index < outliers else 1.0))
        )
    return samples


@given(seed=st.integers(0, 10**6), outliers=st.integers(0, 24))
def test_alpha_and_beta_are_found_although_a_fifth_of_the_samples_is_far_off(seed, outliers):
    model = fit_durations(draw_samples(seed, 120, 0.015, outliers))
    assert model.alpha == pytest.approx(ALPHA, rel=0.05)
    assert model.beta == pytest.approx(BETA, rel=0.1)
    assert model.spread == pytest.approx(0.015, rel=0.7)


def test_where_all_lengths_are_equal_only_alpha_is_fitted():
    flat = [
        WorkSample(tokens=4.0 * count, squares=16.0 * count, seconds=2.0 * count) for count in (1, 2, 3, 4, 5)
    ]
    model = fit_durations(flat)
    assert (model.beta, model.predict_s(40, 160)) == (0.0, pytest.approx(20.0))


def test_without_lengths_a_microbatch_is_the_unit():
    model = fit_durations([WorkSample(tokens=n, squares=0, seconds=0.1 * n) for n in (1, 2, 3)])
    assert model.predict_s(5, 0) == pytest.approx(0.5)


def log_evidence(values: list[float], spread: float) -> float:
    """Return the log of the marginal likelihood of values of one run, by the chain rule of the conjugate prior."""
    total, kappa, mean = 0.0, (spread / MEAN_SPREAD) ** 2, 0.0
    shape, scale = PRIOR_SHAPE, PRIOR_SHAPE * spread**2
    for value in values:
        variance = scale * (kappa + 1) / (shape * kappa)
        degrees = 2 * shape
        total += math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
        total -= 0.5 * math.log(degrees * math.pi * variance)
        total -= (degrees + 1) / 2 * math.log1p((value - mean) ** 2 / (variance * degrees))
        scale += kappa * (value - mean) ** 2 / (2 * (kappa + 1))
        mean = (kappa * mean + value) / (kappa + 1)
        kappa, shape = kappa + 1, shape + 0.5
    return total


def enumerate_change_probability(values: list[float], spread: float, window: int) -> float:
    """Return the probability of a change within the last values, summed over all ways to cut the series into runs."""
    found = other = 0.0
    places = range(1, len(values))
    for cuts in itertools.chain.from_iterable(itertools.combinations(places, n) for n in range(len(values))):
        bounds = [0, *cuts, len(values)]
        log_weight = sum(log_evidence(values[a:b], spread) for a, b in itertools.pairwise(bounds))
        log_weight += len(cuts) * math.log(HAZARD)
        log_weight += (len(values) - 1 - len(cuts)) * math.log1p(-HAZARD)
        if cuts and len(values) - cuts[-1] <= window:
            found += math.exp(log_weight)
        else:
            other += math.exp(log_weight)
    return found / (found + other)


@given(values=st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=7))
def test_change_probabilities_are_those_of_all_ways_to_cut_the_series(values):
    spread = 0.05
    detector = ChangePointDetector(spread, window=3)
    change = [detector.update(value) for value in values][-1]
    # Runs of little probability are dropped on the way.
    assert change.probability == pytest.approx(enumerate_change_probability(values, spread, 3), abs=2e-3)


def test_a_change_is_found_with_its_first_value_and_noise_is_none():
    chance = random.Random(1)
    detector = ChangePointDetector(0.02)
    quiet = [detector.update(chance.gauss(0.0, 0.02)).probability for _ in range(300)]
    assert max(quiet) < 0.9
    change = detector.update(0.3)
    assert change.probability > 0.9
    assert (change.length, change.mean) == (1, pytest.approx(0.3, abs=0.01))


@given(seed=st.integers(0, 10**6), stages=st.integers(1, 4), microbatches=st.integers(1, 6))
def test_the_longest_path_is_what_the_schedule_of_these_durations_takes(seed, stages, microbatches):
    chance = random.Random(seed)
    seconds = {
        (f"host-{s}", kind): chance.uniform(0.5, 2.0)
        for s in range(stages)
        for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
    }
    routes = tuple(
        make_route(i, [(HostName(f"host-{s}"), 1) for s in range(stages)]) for i in range(microbatches)
    )
    orders = order_tasks(
        routes, lambda host, kind, _: seconds[host, kind], schedule=PipelineSchedule.WHOLE_BACKWARD
    )
    path = StepPath(orders.orders, routes)
    assert path.predict_s(lambda task: seconds[task.hop.host, task.kind]) == pytest.approx(orders.makespan_s)
