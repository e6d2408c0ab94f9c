"""Replanning: Chameleon's score, the bytes that move between hosts, and the least of them over all assignments."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.planning.assignment import solve_assignment
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.errors import NoFeasiblePlan, PlanError
from resilient_jax.planning.host_state import (
    StateRegion,
    count_layer_bytes,
    count_region_bytes,
    find_host_states,
    intersect_regions,
)
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.replanning import ReplanAction, replan
from resilient_jax.planning.rerouted_step import price_rerouted_s
from resilient_jax.planning.search import search_plan
from resilient_jax.planning.state_migration import count_missing_bytes, plan_migration
from resilient_jax.policy.score import compute_score
from resilient_jax.topology import UnknownHost
from tests.support.plan_topologies import cluster, small_profile

PROFILE = small_profile()
FULL = cluster([1.0] * 4, devices=2, network=1e10)


def plan_of(topology=FULL, *, global_batch=48, **axes):
    return search_plan(
        PROFILE, topology, global_batch=global_batch, axes={Axis[k.upper()]: n for k, n in axes.items()}
    )


def test_chameleons_score_is_reproduced():
    """Chameleon, arXiv 2508.21613: B = 10, rerouting (2 s, 0), new plan (1 s, 10 s): equal scores at 20 s."""
    assert compute_score(10, 2, 0, 20) == compute_score(10, 1, 10, 20)
    assert compute_score(10, 2, 0, 15) > compute_score(10, 1, 10, 15)
    assert compute_score(10, 2, 0, 40) < compute_score(10, 1, 10, 40)
    assert compute_score(10, 1, 10, 10) == 0


@given(st.integers(1, 6), st.data())
def test_no_other_assignment_costs_less(size, data):
    row = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    costs = data.draw(st.lists(row, min_size=size, max_size=size))
    found = solve_assignment(np.array(costs))
    assert sorted(found) == list(range(size))
    best = min(sum(costs[i][j] for i, j in enumerate(p)) for p in itertools.permutations(range(size)))
    assert sum(costs[i][j] for i, j in enumerate(found)) == best


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
)
def test_a_replica_holds_the_state_once(fsdp, tensor, pipeline, replicas):
    topology = cluster([1.0] * fsdp * tensor * pipeline * replicas, devices=1)
    plan = plan_of(topology, fsdp=fsdp, tensor=tensor, pipeline=pipeline, sequence=1, replica=replicas)
    weights = count_layer_bytes(PROFILE)
    held = [box for boxes in find_host_states(plan).values() for box in boxes]
    distinct = set(held)
    assert len(held) == len(distinct) * replicas
    assert sum(count_region_bytes(box, weights) for box in distinct) == pytest.approx(
        PROFILE.parameter_bytes + PROFILE.optimizer_bytes
    )
    assert not any(intersect_regions(one, other) for one, other in itertools.combinations(distinct, 2))


def test_missing_bytes_are_those_outside_all_regions_of_the_host():
    whole = StateRegion((0, 2), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0))
    half = StateRegion((0, 2), (0.0, 0.5), (0.0, 1.0), (0.0, 1.0))
    corner = StateRegion((1, 2), (0.25, 1.0), (0.0, 1.0), (0.0, 1.0))
    weights = (10.0, 20.0)
    assert count_missing_bytes(frozenset(), frozenset([whole]), weights) == 30
    assert count_missing_bytes(frozenset([half]), frozenset([whole]), weights) == 15
    assert count_missing_bytes(frozenset([half, corner]), frozenset([whole]), weights) == 5
    assert count_missing_bytes(frozenset([whole]), frozenset([half, corner]), weights) == 0


def test_the_same_plan_on_the_same_hosts_moves_nothing():
    plan = plan_of(fsdp=2, tensor=2, pipeline=2)
    assert plan_migration(plan, plan).transfers == ()


def test_a_lost_replica_leaves_nothing_to_move():
    plan = plan_of(global_batch=94, fsdp=2, tensor=1, sequence=1, pipeline=1)
    assert plan.replicas == 4
    after = replan(plan, FULL.without("host-01"), next_failure_s=1.0, compile_s=10.0)
    assert after.chosen.action is ReplanAction.KEEP
    assert after.bytes_moved == 0
    assert isinstance(after.plan, Plan)
    assert after.plan.replicas == 3
    assert sum(after.plan.quotas) == after.plan.microbatches


def test_a_host_that_comes_back_gets_a_copy_from_one_that_has_it():
    plan = plan_of(FULL.without("host-01"), global_batch=94, fsdp=2, tensor=1, sequence=1, pipeline=1)
    after = replan(plan, FULL, compile_s=1e9)
    assert after.plan.replicas == 4
    assert {move.target for move in after.transfers} == {"host-01"}
    assert after.bytes_moved == pytest.approx(PROFILE.parameter_bytes + PROFILE.optimizer_bytes)
    assert all(move.source in ("host-00", "host-02", "host-03") for move in after.transfers)


def test_the_reason_names_bytes_that_no_host_holds():
    plan = plan_of(fsdp=2, tensor=4, sequence=1, pipeline=1, replica=1)
    after = replan(plan, FULL.without("host-02"))
    lost = sum(move.bytes_moved for move in after.transfers if move.source is None)
    assert lost > 0
    assert "are on no host that is left" in after.reason


def test_hosts_swap_places_where_less_state_moves_then():
    plan = plan_of(pipeline=2, tensor=2, fsdp=1, sequence=1)  # a stage is a host: 0 and 1, 2 and 3
    after = replan(plan, FULL.without("host-01", "host-02"), compile_s=1e9, next_failure_s=1.0)
    kept = next(o for o in (after.chosen, *after.others) if o.action is ReplanAction.KEEP)
    assert kept.migration.bytes_moved == 0
    swapped = replan(plan, FULL.without("host-00", "host-03"), compile_s=1e9, next_failure_s=1.0)
    kept = next(o for o in (swapped.chosen, *swapped.others) if o.action is ReplanAction.KEEP)
    assert kept.migration.bytes_moved == 0  # host-01 has the second stage and keeps it


def test_a_new_plan_pays_only_if_the_next_failure_is_far():
    plan = plan_of(pipeline=2, tensor=2, fsdp=1, sequence=1)
    left = FULL.without("host-01")
    soon = replan(plan, left, next_failure_s=1.0, compile_s=0.999)
    late = replan(plan, left, next_failure_s=1e6, compile_s=0.999)
    assert soon.chosen.action is not ReplanAction.NEW
    assert late.chosen.action is ReplanAction.NEW
    assert late.step_time_s < soon.step_time_s
    assert "Not new" in soon.reason


def test_no_option_has_fewer_than_min_replicas():
    """Rerouting leaves as many copies of the state as the stage has that lost the most."""
    plan = plan_of(pipeline=2, tensor=2, fsdp=1, sequence=1, replica=2)
    left = FULL.without("host-01")
    some, more = (replan(plan, left, next_failure_s=1e3, min_replicas=least) for least in (1, 2))
    assert ReplanAction.REROUTE in {option.action for option in (some.chosen, *some.others)}
    assert ReplanAction.REROUTE not in {option.action for option in (more.chosen, *more.others)}
    assert all(option.plan.replicas >= 2 for option in (more.chosen, *more.others))


@pytest.mark.parametrize(("host", "stage"), [("host-00", 0), ("host-01", 1)])
def test_rerouting_takes_as_much_longer_as_simulated_pipelines_without_the_lost_stage(host, stage):
    plan = plan_of(pipeline=2, tensor=2, fsdp=1, sequence=1)
    after = replan(plan, FULL.without(host), next_failure_s=1.0, compile_s=10.0)
    rerouted = next(o for o in (after.chosen, *after.others) if o.action is ReplanAction.REROUTE)
    team = plan.replica_classes[0]
    assert team.transfer_s > 0
    simulated, before = (
        price_rerouted_s(2, plan.quotas, lost, team.stage_s, transfer_s=team.transfer_s)
        for lost in ([(0, stage)], [])
    )
    assert simulated is not None
    assert before is not None
    assert rerouted.step_time_s == pytest.approx(plan.step_time_s + simulated - before)
    assert rerouted.step_time_s > plan.step_time_s
    assert rerouted.transition_s == 0


def test_a_program_in_the_cache_costs_no_compilation():
    plan = plan_of(pipeline=2, tensor=2, fsdp=1, sequence=1)
    left = FULL.without("host-01")
    cold, warm = (replan(plan, left, is_compiled=lambda _, known=known: known) for known in (False, True))
    assert [o.compile_s for o in (cold.chosen, *cold.others) if o.action is ReplanAction.NEW] == [60.0]
    assert [o.compile_s for o in (warm.chosen, *warm.others) if o.action is ReplanAction.NEW] == [0.0]


def test_a_change_that_leaves_too_little_memory_is_refused_with_what_would_suffice():
    topology = cluster([1.0] * 4, devices=1, memory_bytes=74_600_000)
    plan = search_plan(PROFILE, topology, global_batch=12)
    with pytest.raises(NoFeasiblePlan, match="What would suffice"):
        replan(plan, topology.without("host-00", "host-01", "host-02"))


def test_a_host_that_does_not_exist_is_refused():
    with pytest.raises(UnknownHost, match="found no such host"):
        replan(plan_of(), FULL.without("host-77"))


def test_impossible_times_are_refused():
    with pytest.raises(PlanError, match="expected a finite time > 0"):
        replan(plan_of(), FULL, next_failure_s=0)


def test_where_a_host_is_only_slower_all_state_may_stay_in_place():
    plan = plan_of(pipeline=2, tensor=2, fsdp=1, sequence=1)
    slowed = FULL.slowed("host-02", 0.8)
    soon, never = (replan(plan, slowed, next_failure_s=horizon) for horizon in (1e-5, 1e9))
    assert soon.chosen.action is ReplanAction.KEEP
    assert soon.chosen.transition_s == soon.bytes_moved == 0
    assert soon.chosen.score > 0
    assert soon.step_time_s == pytest.approx(plan.step_time_s / 0.8)
    assert "unchanged; all wait for the slowest" in soon.reason
    assert "does not fit" not in soon.reason + never.reason
    assert never.step_time_s <= soon.step_time_s


def test_losing_a_spare_reroutes_nothing():
    five = cluster([1.0] * 5, devices=1)
    plan = plan_of(five, replica=2, pipeline=2, tensor=1, fsdp=1, sequence=1)
    (idle,) = {host.name for host in five.hosts} - {
        name for name, held in find_host_states(plan).items() if held
    }
    after = replan(plan, five.without(idle), next_failure_s=1.0)
    assert ReplanAction.REROUTE not in {option.action for option in (after.chosen, *after.others)}


@pytest.mark.parametrize("horizon", [float("inf"), float("nan")])
def test_the_time_to_the_next_failure_is_finite(horizon):
    with pytest.raises(PlanError, match="expected a finite time > 0"):
        replan(plan_of(), FULL, next_failure_s=horizon)
