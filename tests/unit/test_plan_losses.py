"""What `plan --decide` shows about losses: the choices of the leader's policy, with the speeds of the cost model."""

import pytest
from plan_topologies import cluster, small_profile

from resilient_jax.cli.plan_losses import decide_losses, describe_loss
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.plan_request import PlanConstraints
from resilient_jax.planning.search import search_plan, search_plans
from resilient_jax.protocol.recovery_records import RecoveryAction


def _decide(topology, plan, after_loss="even", **options):
    return {one.loss.kind: one for one in decide_losses(plan, topology, after_loss, **options)}


def _plan(topology, axes=None, batch=48):
    constraints = PlanConstraints(axes or {})
    return search_plans(small_profile(), topology, global_batch=batch, constraints=constraints)[0]


def test_after_the_loss_of_a_host_the_others_take_the_fastest_plan_at_its_speed():
    topology = cluster([1.0] * 4, devices=2)
    plan = _plan(topology, {Axis.REPLICA: 4})
    (change,) = _decide(topology, plan)["a host"].changes
    best = search_plan(small_profile(), topology.without("host-03"), global_batch=48)
    option = change.choice.options[0]
    assert option.action is RecoveryAction.SHRINK
    assert change.find_speed(option) == pytest.approx(plan.step_time_s / best.step_time_s)


def test_a_host_is_back_with_the_devices_that_its_agent_selects():
    topology = cluster([1.0] * 4, devices=4)
    plan = _plan(topology, {Axis.REPLICA: 4})
    first, second = _decide(topology, plan)["a device"].changes
    assert first.choice.action is RecoveryAction.SHRINK
    assert second.when == "when host-03 is back with 2 devices"
    assert second.choice.action is RecoveryAction.JOIN
    (only,) = _decide(topology, plan, "host")["a device"].changes
    assert only.when == "", "a host that uses none of the devices that are left is lost"


def test_a_spare_takes_the_place_of_one_host():
    topology = cluster([1.0] * 4, devices=2)
    decided = _decide(topology, _plan(topology, {Axis.REPLICA: 4}), has_spare=True)
    (one,), (two,) = decided["a host"].changes, decided["two hosts"].changes
    assert one.choice.action is RecoveryAction.REPLACE
    assert one.find_speed(one.choice.options[0]) == 1.0
    assert two.choice.action is RecoveryAction.SHRINK


def test_a_pipeline_may_keep_the_stage_of_a_lost_host_where_another_replica_is_complete():
    topology = cluster([1.0] * 6, devices=1)
    plan = _plan(topology, {Axis.PIPELINE: 3, Axis.REPLICA: 2})
    decided = _decide(topology, plan)
    options = {option.action: option for option in decided["a host"].changes[0].choice.options}
    assert options[RecoveryAction.KEEP_STAGES].why_not == ""
    kept = decided["a host"].changes[0].find_speed(options[RecoveryAction.KEEP_STAGES])
    assert 0.5 <= kept < 0.6, "one of two replicas computes, and has nobody to add up gradients with"
    few = cluster([1.0] * 3, devices=1)
    one_replica = _decide(few, _plan(few, {Axis.PIPELINE: 3}))["a host"]
    assert one_replica.changes[0].choice.action is RecoveryAction.RESTORE
    assert describe_loss(one_replica)["changes"][0]["bytes_lost"] > 0


def test_one_host_that_loses_a_device_goes_on_from_a_snapshot():
    topology = cluster([1.0], devices=4)
    (change,) = _decide(topology, _plan(topology))["a device"].changes
    assert change.choice.action is RecoveryAction.RESTORE
    assert 0 < change.find_speed(change.choice.options[0]) < 1


def test_a_loss_that_leaves_too_few_replicas_stops_the_job():
    topology = cluster([1.0] * 2, devices=1)
    decided = _decide(topology, _plan(topology, {Axis.REPLICA: 2}), min_replicas=2)
    assert decided["a host"].changes == ()
    assert "min_replicas: found 2" in decided["a host"].why_stop
