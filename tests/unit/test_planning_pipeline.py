"""Pipeline times: the formula against the longest path, rerouting by Chameleon's vectors, microbatches in flight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError
from resilient_jax.planning.memory import count_in_flight
from resilient_jax.planning.pipeline import estimate_pipeline_s, estimate_rerouted_s, simulate_pipeline_s

times = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.25])


def test_chameleons_pipeline_times_are_reproduced():
    """Chameleon, arXiv 2508.21613: P = 4, N_m = 8, N_dp = 4, t = 1."""
    assert estimate_pipeline_s(4, 8, 1.0) == 11
    assert estimate_rerouted_s(4, 8, 4, [1, 0, 0, 0], 1.0) == pytest.approx(13.667, abs=5e-4)
    assert estimate_rerouted_s(4, 8, 4, [1, 1, 0, 0], 1.0) == pytest.approx(16.333, abs=5e-4)
    assert estimate_rerouted_s(4, 8, 4, [0, 0, 0, 0], 1.0) == 11
    assert estimate_rerouted_s(4, 8, 4, [4, 0, 0, 0], 1.0) is None


def test_failures_of_another_number_of_stages_are_refused():
    with pytest.raises(CallerError, match="found 3 numbers, expected one for each of 4"):
        estimate_rerouted_s(4, 8, 4, [1, 0, 0], 1.0)


@given(st.integers(1, 6), st.integers(1, 9), times, times)
def test_the_longest_path_of_equal_stages_is_the_formula(stages, microbatches, forward_s, backward_s):
    simulated = simulate_pipeline_s([forward_s] * stages, [backward_s] * stages, microbatches)
    assert simulated == pytest.approx(estimate_pipeline_s(stages, microbatches, forward_s + backward_s))


@given(st.lists(times, min_size=1, max_size=5), st.integers(1, 9))
def test_the_formula_is_never_less_than_the_longest_path(stage_s, microbatches):
    simulated = simulate_pipeline_s([s / 3 for s in stage_s], [2 * s / 3 for s in stage_s], microbatches)
    assert simulated <= estimate_pipeline_s(len(stage_s), microbatches, max(stage_s)) + 1e-9
    assert simulated >= microbatches * max(stage_s) - 1e-9


def test_pipeline_repeats_shorten_the_fill():
    assert estimate_pipeline_s(4, 8, 1.0, pipeline_repeats=3) == 9


def test_a_stage_keeps_one_microbatch_for_itself_and_each_stage_after_it():
    assert [count_in_flight(stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [count_in_flight(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]
