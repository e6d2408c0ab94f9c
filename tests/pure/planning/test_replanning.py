"""Replanning: decisions in order, Chameleon's score, bytes that move, and the least of them over all assignments."""

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
from resilient_jax.planning.next_plans import NextPlanSearch
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.replanning import replan
from resilient_jax.planning.search import search_plan
from resilient_jax.planning.state_migration import count_missing_bytes, plan_migration
from resilient_jax.policy.score import Phase, score_phases
from resilient_jax.protocol.recovery_records import RecoveryAction
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

    def score(samples, step_s, transition_s, next_failure_s):
        return score_phases((Phase(pause_s=transition_s, speed=samples / step_s),), next_failure_s)

    assert score(10, 2, 0, 20) == score(10, 1, 10, 20)
    assert score(10, 2, 0, 15) > score(10, 1, 10, 15)
    assert score(10, 2, 0, 40) < score(10, 1, 10, 40)
    assert score(10, 1, 10, 10) == 0


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
    after = replan(plan, FULL.without("host-01"), next_failure_s=1.0, is_compiled=lambda _: False)
    assert after.steps[0].choice.action in (RecoveryAction.SHRINK, RecoveryAction.KEEP_AXES)
    assert after.bytes_moved == 0
    assert isinstance(after.plan, Plan)
    assert after.plan.replicas == 3
    assert sum(after.plan.quotas) == after.plan.microbatches


def test_a_host_that_comes_back_gets_a_copy_from_one_that_has_it():
    plan = plan_of(FULL.without("host-01"), global_batch=94, fsdp=2, tensor=1, sequence=1, pipeline=1)
    after = replan(plan, FULL, compile_s=1e9, is_compiled=lambda _: False)
    (step,) = after.steps
    assert step.when == "when host-01 can join"
    assert step.choice.action in (RecoveryAction.JOIN, RecoveryAction.KEEP_AXES)
    assert after.plan.replicas == 4
    assert {move.target for move in after.transfers} == {"host-01"}
    assert after.bytes_moved == pytest.approx(PROFILE.parameter_bytes + PROFILE.optimizer_bytes)
    assert all(move.source in ("host-00", "host-02", "host-03") for move in after.transfers)


def test_the_reason_names_bytes_that_no_host_holds():
    plan = plan_of(fsdp=2, tensor=4, sequence=1, pipeline=1, replica=1)
    after = replan(plan, FULL.without("host-02"))
    lost = sum(move.bytes_moved for move in after.transfers if move.source is None)
    assert lost > 0
    assert after.steps[0].choice.action is RecoveryAction.RESTORE
    assert "are on no worker that is left" in after.reason


def test_hosts_swap_places_where_less_state_moves_then():
    plan = plan_of(pipeline=2, tensor=2, fsdp=1, sequence=1)  # a stage is a host: 0 and 1, 2 and 3
    search = NextPlanSearch()
    for lost in (("host-01", "host-02"), ("host-00", "host-03")):
        kept = search.search(plan, FULL.without(*lost), is_foreseen=True).kept
        assert kept is not None
        assert kept.migration.bytes_moved == 0  # host-01 has the second stage and keeps it


def test_new_axes_pay_only_if_the_next_failure_is_far():
    plan, left = plan_of(fsdp=1, tensor=2, sequence=1, pipeline=1, replica=4), FULL.without("host-01")
    soon, late = (
        replan(plan, left, next_failure_s=horizon, compile_s=50.0, is_compiled=lambda _: False)
        for horizon in (100.0, 1e9)
    )
    assert soon.steps[0].choice.action is RecoveryAction.KEEP_AXES
    assert late.steps[0].choice.action is RecoveryAction.SHRINK
    assert late.step_time_s < soon.step_time_s
    assert "to shrink would lose" in soon.reason


def test_no_option_has_fewer_than_min_replicas():
    plan = plan_of(pipeline=1, tensor=2, fsdp=1, sequence=1, replica=4)
    left = FULL.without("host-01")
    after = replan(plan, left, next_failure_s=1e3, min_replicas=3)
    assert all(option.plan.replicas >= 3 for option in after.steps[0].plans.values())
    with pytest.raises(PlanError, match="min_replicas: found 7"):
        replan(plan, left, min_replicas=7)


def test_a_stage_is_kept_with_the_plan_before_while_its_replica_computes_nothing():
    plan = plan_of(pipeline=2, tensor=2, fsdp=1, sequence=1)
    (step,) = replan(plan, FULL.without("host-01"), next_failure_s=1.0).steps
    kept = step.plans[RecoveryAction.KEEP_STAGES]
    half = NextPlanSearch().try_keep(plan, FULL.without("host-00", "host-01"))
    assert half is not None
    assert half.replicas == plan.replicas - 1
    assert kept.plan is plan
    assert kept.step_time_s == pytest.approx(half.step_time_s)
    assert kept.transition_s == kept.migration.bytes_moved == 0


def test_a_program_in_the_cache_costs_no_compilation():
    plan, left = plan_of(fsdp=1, tensor=2, sequence=1, pipeline=1, replica=4), FULL.without("host-01")
    cold, warm = (replan(plan, left, is_compiled=lambda _, known=known: known) for known in (False, True))
    assert [one.steps[0].plans[RecoveryAction.SHRINK].compile_s for one in (cold, warm)] == [60.0, 0.0]
    assert cold.steps[0].plans[RecoveryAction.KEEP_AXES].compile_s == 0


def test_what_a_job_has_compiled_ahead_costs_no_compilation():
    plan = plan_of(cluster([1.0] * 6, devices=2, network=1e10), fsdp=1, tensor=2, sequence=1, pipeline=1)
    names = [host.name for host in plan.request.topology.hosts]
    seconds = [
        replan(plan, plan.request.topology.without(*names[:number])).steps[0].plans[RecoveryAction.SHRINK]
        for number in (1, 2, 3)
    ]
    assert [one.compile_s for one in seconds] == [0.0, 0.0, 60.0]


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
    after = replan(plan, FULL.slowed("host-02", 0.8), next_failure_s=1e-5)
    (step,) = after.steps
    assert step.when == "with host-02 at 0.8 of its speed"
    assert step.choice.action is RecoveryAction.KEEP
    assert after.bytes_moved == step.chosen.transition_s == 0
    assert after.step_time_s <= plan.step_time_s / 0.8 + 1e-12
    assert "trains on as it is" in after.reason


def test_a_slow_host_is_taken_out_where_the_others_are_faster():
    plan = plan_of(pipeline=1, tensor=2, fsdp=1, sequence=1, replica=4)
    (step,) = replan(plan, FULL.slowed("host-02", 0.01), next_failure_s=1e6).steps
    (loss,) = replan(plan, FULL.without("host-02")).steps
    assert step.choice.action is RecoveryAction.TAKE_OUT
    assert step.chosen.step_time_s == loss.plans[RecoveryAction.SHRINK].step_time_s


def test_decisions_follow_each_other_as_a_job_meets_the_changes():
    plan = plan_of(pipeline=1, tensor=2, fsdp=1, sequence=1, replica=4)
    added = cluster([1.0] * 5, devices=2, network=1e10).host("host-04")
    now = FULL.without("host-01", "host-03/1").slowed("host-02", 0.5).with_hosts([added])
    after = replan(plan, now)
    assert [step.when for step in after.steps] == [
        "when host-01 is lost and host-03 has lost devices",
        "when host-03 is back with 1 device",
        "with host-02 at 0.5 of its speed",
        "when host-04 can join",
    ]
    assert after.plan is after.steps[-1].chosen.plan
    assert after.reason.startswith(
        "When host-01 is lost and host-03 has lost devices, the job goes on in place"
    )


def test_a_host_that_is_fast_again_is_not_slow():
    slow = FULL.slowed("host-02", 0.5)
    plan = plan_of(slow, pipeline=1, tensor=2, fsdp=1, sequence=1, replica=4)
    after = replan(plan, FULL)
    refusals = {option.action: option.why_not for option in after.steps[0].choice.options}
    assert after.steps[0].choice.action is RecoveryAction.KEEP
    assert refusals[RecoveryAction.TAKE_OUT] == "no host is slow"
    assert after.step_time_s <= plan.step_time_s


def test_nothing_is_decided_where_no_host_has_changed():
    plan = plan_of()
    after = replan(plan, FULL)
    assert (after.steps, after.plan, after.reason) == ((), plan, "No host has changed.")


def test_losing_a_spare_keeps_no_stage():
    five = cluster([1.0] * 5, devices=1)
    plan = plan_of(five, replica=2, pipeline=2, tensor=1, fsdp=1, sequence=1)
    (idle,) = {host.name for host in five.hosts} - {
        name for name, held in find_host_states(plan).items() if held
    }
    (step,) = replan(plan, five.without(idle), next_failure_s=1.0).steps
    assert RecoveryAction.KEEP_STAGES not in step.plans
    assert step.chosen.step_time_s == pytest.approx(plan.step_time_s)


@pytest.mark.parametrize("horizon", [float("inf"), float("nan")])
def test_the_time_to_the_next_failure_is_finite(horizon):
    with pytest.raises(PlanError, match="expected a finite time > 0"):
        replan(plan_of(), FULL, next_failure_s=horizon)
