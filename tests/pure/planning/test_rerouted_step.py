"""The price of rerouting: simulated, in words of microbatch times; by Chameleon's formula where a step is too large."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.pipeline.stage_losses import StageLayout, estimate_stage_losses, make_even_seconds
from resilient_jax.pipeline_schedule.tasks import DEFAULT_SCHEDULE
from resilient_jax.planning.pipeline import estimate_rerouted_s, time_pipeline
from resilient_jax.planning.rerouted_step import MAX_TASKS, price_rerouted_s


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4))
def test_without_a_lost_stage_the_pipelines_take_what_the_search_estimates(stages, quota, replicas):
    priced = price_rerouted_s(stages, [quota] * replicas, [], 0.25, transfer_s=0.01)
    time = time_pipeline(stages, 0.25, 0.01)
    estimated = quota * time.microbatch_s + time.fill_s
    assert 0.8 * estimated <= priced <= estimated + 1e-9


@pytest.mark.parametrize(("replicas", "expected"), [(3, 8 + 4), (4, 8 + 3), (8, 8 + 2)])
def test_peers_of_the_last_stage_compute_whole_microbatches_of_the_lost_one(replicas, expected):
    priced = price_rerouted_s(4, [8] * replicas, [(0, 3)], 0.25)
    assert expected * 0.25 <= priced <= (expected + 3) * 0.25


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 8), st.data())
def test_the_price_is_no_less_than_the_work_of_the_hosts_that_are_left(stages, replicas, quota, data):
    cells = [(replica, stage) for replica in range(replicas) for stage in range(stages)]
    lost = data.draw(st.sets(st.sampled_from(cells), max_size=3))
    failed = [sum(1 for _, stage in lost if stage == i) for i in range(stages)]
    priced = price_rerouted_s(stages, [quota] * replicas, lost, 1.0)
    if max(failed) == replicas:
        assert priced is None
    else:
        most = max(math.ceil(quota * replicas / (replicas - count)) for count in failed)
        assert priced is not None
        assert priced >= most - 1e-9


def test_lost_stages_of_one_replica_overlap_where_the_formula_adds_them_up():
    priced = price_rerouted_s(4, [8] * 4, [(0, 1), (0, 2)], 1.0)
    formula = estimate_rerouted_s(4, 8, 4, [0, 1, 1, 0], time_pipeline(4, 1.0))
    assert priced is not None
    assert formula is not None
    assert priced < formula


def test_a_step_that_is_too_large_to_simulate_is_priced_by_the_formula():
    quota = MAX_TASKS // (2 * 4 * 3) + 1
    priced = price_rerouted_s(4, [quota] * 2, [(1, 0)], 0.5)
    assert priced == estimate_rerouted_s(4, quota, 2, [1, 0, 0, 0], time_pipeline(4, 0.5))


@pytest.mark.parametrize(
    ("stages", "replicas", "quota"),
    [(2, 2, 4), (4, 2, 8), (2, 4, 8), (2, 16, 8), (4, 8, 8), (4, 8, 16), (8, 4, 8)],
)
def test_a_lost_stage_is_priced_no_slower_than_a_job_runs_it(stages, replicas, quota):
    """A job keeps the stage for its host, by the same schedule: `pipeline.stage_losses`."""
    teams = tuple(
        [(HostName(f"{replica}-{stage}"), 1) for stage in range(stages)] for replica in range(replicas)
    )
    layout = StageLayout(
        teams=teams,
        quotas=(quota,) * replicas,
        absent=frozenset(),
        num_stages=stages,
        schedule=DEFAULT_SCHEDULE,
        block_costs=(1.0,) * stages,
        block_seconds=make_even_seconds([1.0] * stages, DEFAULT_SCHEDULE),
        block_bytes=(1.0,) * stages,
        bytes_per_s=1.0,
    )
    in_job = {loss.hosts[0]: loss.kept for loss in estimate_stage_losses(layout)}
    undisturbed = price_rerouted_s(stages, [quota] * replicas, [], 1.0)
    for stage in range(stages):
        priced = price_rerouted_s(stages, [quota] * replicas, [(0, stage)], 1.0)
        assert undisturbed is not None
        assert priced is not None
        assert undisturbed / priced >= in_job[teams[0][stage][0]] - 1e-3
