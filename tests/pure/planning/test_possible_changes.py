"""What a job would do about each possible change: the policy's choices, with the speeds of the cost model."""

import pytest

from resilient_jax.cli.plan_changes import decide_changes
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.next_plans import price_kept_stages_s
from resilient_jax.planning.plan_request import PlanConstraints
from resilient_jax.planning.replanning import replan
from resilient_jax.planning.search import search_plan
from resilient_jax.policy.devices_after_loss import DevicesAfterLoss
from resilient_jax.protocol.recovery_records import RecoveryAction
from tests.support.plan_searches import search_plans
from tests.support.plan_topologies import cluster, small_profile


def _decide(topology, plan, after_loss: DevicesAfterLoss = "even", **options):
    decided = decide_changes(
        topology, lambda now: replan(plan, now, devices_after_loss=after_loss, **options)
    )
    return {one.change.kind: one for one in decided["losses"]}


def _plan(topology, axes=None, batch=48):
    constraints = PlanConstraints(axes or {})
    return search_plans(small_profile(), topology, global_batch=batch, constraints=constraints)[0]


def test_after_the_loss_of_a_host_the_others_take_the_fastest_plan_that_a_job_runs_at_its_speed():
    topology = cluster([1.0] * 4, devices=2)
    plan = _plan(topology, {Axis.REPLICA: 4, Axis.FSDP: 2})
    (change,) = _decide(topology, plan)["a host"].steps
    left = topology.without("host-03")
    inside = [_plan(left, {Axis.REPLICA: 6}), _plan(left, {Axis.REPLICA: 3, Axis.PIPELINE: 1})]
    best_s = min(one.step_time_s for one in inside if one.layout.host_slots == 1)
    option = change.choice.options[0]
    assert option.action is RecoveryAction.SHRINK
    assert change.compute_speed(option) == pytest.approx(plan.step_time_s / best_s)


def test_a_pipeline_keeps_its_axes_and_none_becomes_one():
    topology = cluster([1.0] * 6, devices=1)
    pipeline = _plan(topology, {Axis.PIPELINE: 3, Axis.REPLICA: 2})
    (change,) = _decide(topology, pipeline)["a host"].steps
    assert change.plans[RecoveryAction.SHRINK].plan.shape.startswith("pipeline 3")
    for decision in _decide(topology, _plan(topology, {Axis.REPLICA: 6})).values():
        assert all("pipeline" not in plan.plan.shape for one in decision.steps for plan in one.plans.values())


def test_a_host_is_back_with_the_devices_that_its_agent_selects():
    topology = cluster([1.0] * 4, devices=4)
    plan = _plan(topology, {Axis.REPLICA: 4})
    first, second = _decide(topology, plan)["a device"].steps
    assert first.choice.action is RecoveryAction.SHRINK
    assert second.when == "when host-03 is back with 2 devices"
    assert second.choice.action is RecoveryAction.JOIN
    (only,) = _decide(topology, plan, "host")["a device"].steps
    assert only.when == "when host-03 is lost", "a host that uses none of the devices that are left is lost"


def test_a_spare_takes_the_place_of_one_host():
    topology = cluster([1.0] * 4, devices=2)
    plan = _plan(topology, {Axis.REPLICA: 4})
    decided = _decide(topology, plan, has_spare=True, min_replicas=8)
    (one,) = decided["a host"].steps
    assert (one.choice.action, one.compute_speed(one.choice.options[0])) == (RecoveryAction.REPLACE, 1.0)
    assert decided["two hosts"].steps == (), "of the second one nobody takes the place, so a replica lacks"
    (two,) = _decide(topology, plan, has_spare=True)["two hosts"].steps
    (alone,) = _decide(topology, plan)["a host"].steps
    assert two.choice.action is RecoveryAction.REPLACE
    assert two.compute_speed(two.choice.options[0]) == alone.compute_speed(alone.choice.options[0])


def test_the_last_host_goes_on_in_place():
    topology = cluster([1.0] * 2, devices=2)
    (change,) = _decide(topology, _plan(topology, {Axis.REPLICA: 2}))["a host"].steps
    assert change.choice.action is RecoveryAction.SHRINK
    first, second = _decide(topology, _plan(topology, {Axis.REPLICA: 2}))["a device"].steps
    assert {option.action for option in first.choice.options if not option.why_not} == set(first.plans)
    postponed = {option.action: option.why_not for option in second.choice.options}[RecoveryAction.POSTPONE]
    assert postponed == "the next loss may be that of the state"


def test_a_host_with_fewer_devices_joins_with_axes_that_were_not_foreseen():
    topology = cluster([1.0] * 4, devices=2)
    _, second = _decide(topology, _plan(topology, {Axis.REPLICA: 4, Axis.FSDP: 2}))["a device"].steps
    refusals = {option.action: option.why_not for option in second.choice.options}
    assert refusals[RecoveryAction.KEEP_AXES] == "no planned axes are known for the hosts that would train"


def test_the_only_host_stops_if_it_uses_none_of_the_devices_that_are_left():
    topology = cluster([1.0], devices=4)
    decided = _decide(topology, _plan(topology), "host")["a device"]
    assert (decided.steps, decided.why_stop) == (
        (),
        "host-00 is the only host, and goes on without no device",
    )


def test_the_stage_of_a_host_that_had_none_is_not_kept():
    topology = cluster([1.0] * 4, devices=1)
    plan = _plan(topology, {Axis.PIPELINE: 3})
    assert price_kept_stages_s(plan, topology, {"host-03"}) == 0


def test_a_pipeline_may_keep_the_stage_of_a_lost_host_where_another_replica_is_complete():
    topology = cluster([1.0] * 6, devices=1)
    plan = _plan(topology, {Axis.PIPELINE: 3, Axis.REPLICA: 2})
    decided = _decide(topology, plan)
    options = {option.action: option for option in decided["a host"].steps[0].choice.options}
    assert options[RecoveryAction.KEEP_STAGES].why_not == ""
    kept = decided["a host"].steps[0].compute_speed(options[RecoveryAction.KEEP_STAGES])
    assert 0.5 <= kept < 0.6, "one of two replicas computes, and has nobody to add up gradients with"
    few = cluster([1.0] * 3, devices=1)
    one_replica = _decide(few, _plan(few, {Axis.PIPELINE: 3}))["a host"]
    (change,) = one_replica.steps
    assert change.choice.action is RecoveryAction.RESTORE
    assert change.bytes_lost > 0
    assert "come from a snapshot in memory, its parity, or a checkpoint" in change.reason


def test_one_host_that_loses_a_device_goes_on_from_a_snapshot():
    topology = cluster([1.0], devices=4)
    (change,) = _decide(topology, _plan(topology))["a device"].steps
    assert change.choice.action is RecoveryAction.RESTORE
    assert 0 < change.compute_speed(change.choice.options[0]) < 1


def test_a_loss_that_leaves_too_few_replicas_stops_the_job():
    topology = cluster([1.0] * 2, devices=1)
    decided = _decide(topology, _plan(topology, {Axis.REPLICA: 2}), min_replicas=2)
    assert decided["a host"].steps == ()
    assert "min_replicas: found 2" in decided["a host"].why_stop


@pytest.mark.parametrize(("after_loss", "num_used"), [("even", 4), ("all", 6)])
def test_a_host_of_eight_without_one_goes_on_with_what_its_agent_selects(after_loss, num_used):
    topology = cluster([1.0] * 2, devices=8).without("host-01/0")
    plan = search_plan(small_profile(), topology, global_batch=48)
    (step,) = replan(plan, topology.slowed("host-01/7", 0.25), devices_after_loss=after_loss).steps
    found = step.plans[RecoveryAction.FEWER_DEVICES]
    left = topology.without(*(f"host-01/{device}" for device in range(1 + num_used, 8)))
    best = search_plan(small_profile(), left, global_batch=48)
    assert found.step_time_s == pytest.approx(best.step_time_s)
