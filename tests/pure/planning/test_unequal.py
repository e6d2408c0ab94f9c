"""Plans of unequal teams: every device can work, and replanning takes them."""

from resilient_jax.planning.replanning import replan
from resilient_jax.planning.search import search_plan
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.protocol.recovery_records import RecoveryAction
from tests.support.plan_searches import search_unequal
from tests.support.plan_topologies import cluster, small_profile, tight_bytes

DEEP = small_profile(layers=10, vocabulary_tokens=4)
"""A model of which a device holds less than half, below; its layers divide badly over seven stages."""
PROFILE = small_profile()


def uneven(lost=1, hosts=2, devices=4):
    """Return hosts of which the last lost devices, with memory for a third of the model's state on each."""
    topology = cluster(
        [1.0] * hosts, devices=devices, memory_bytes=tight_bytes(DEEP, 0.45), inner=1e10, network=1e9
    )
    return topology.without(*(f"host-{hosts - 1:02}/{index}" for index in range(lost)))


def test_unequal_teams_use_devices_that_equal_replicas_leave_out():
    topology = uneven()
    equal = search_plan(DEEP, topology, global_batch=256)
    plan = search_unequal(DEEP, topology, global_batch=256)
    assert plan is not None
    assert plan.step_time_s < equal.step_time_s
    assert plan.devices_spare == 0
    assert len({team.plan.layout.axes for team in plan.teams}) > 1
    assert sum(team.sequences for team in plan.teams) == 256
    assert plan.replicas == sum(team.plan.replicas for team in plan.teams)
    assert all(team.plan.memory.total <= team.plan.usable_bytes for team in plan.teams)


def test_hosts_none_of_which_can_hold_the_model_have_no_plan_of_unequal_teams():
    topology = cluster([1.0] * 2, devices=2, memory_bytes=tight_bytes(DEEP, 0.01)).without("host-01/0")
    assert search_unequal(DEEP, topology, global_batch=8) is None


def test_no_device_is_in_two_teams():
    topology = uneven(lost=1, hosts=3)
    plan = search_unequal(DEEP, topology, global_batch=128)
    assert plan is not None
    for host in topology.hosts:
        used = sum(
            other.devices
            for team in plan.teams
            for other in team.plan.request.topology.hosts
            if other.name == host.name
        )
        assert used <= host.devices


def test_a_plan_of_unequal_teams_has_as_many_replicas_as_requested():
    topology = uneven()
    plan = search_unequal(DEEP, topology, global_batch=256, min_replicas=2)
    assert plan is not None
    assert plan.replicas >= 2
    assert search_unequal(DEEP, topology, global_batch=256, min_replicas=100) is None


def test_a_slow_device_is_left_out_or_in_a_team_of_its_own():
    """ResiHP's vector: of a group with speeds 1, 1, 1, 0.4 all four together would be as slow as the slowest."""
    topology = cluster([1.0], devices=4, inner=1e12).slowed("host-00/3", 0.4)
    together = search_plan(DEEP, topology, global_batch=64)
    plan = search_unequal(DEEP, topology, global_batch=64)
    assert plan is not None
    assert plan.step_time_s < together.step_time_s
    assert together.step_time_s / plan.step_time_s > 1.2


def test_replanning_names_faster_unequal_teams_that_no_job_runs():
    before = search_plan(
        DEEP,
        cluster([1.0, 1.0], devices=4, memory_bytes=tight_bytes(DEEP, 0.45), inner=1e10, network=1e9),
        global_batch=256,
    )
    now = uneven()
    after = replan(before, now, next_failure_s=1e9, compile_s=1.0, devices_after_loss="all")
    (named,) = (step.unequal for step in after.steps if step.unequal is not None)
    assert isinstance(named.plan, UnequalPlan)
    assert named.step_time_s < after.step_time_s
    assert "teams that no job runs" in after.reason
    assert {move.target for move in named.migration.transfers} <= {host.name for host in now.hosts}


def test_replanning_takes_unequal_teams_of_whole_hosts_where_they_are_faster():
    topology = cluster([1.0] * 2, devices=8, memory_bytes=tight_bytes(DEEP, 0.45), inner=1e10, network=1e9)
    before = search_plan(DEEP, topology, global_batch=256)
    first, last = replan(before, topology.without("host-01/0"), next_failure_s=1e9).steps
    assert last.choice.action is RecoveryAction.JOIN
    assert isinstance(last.chosen.plan, UnequalPlan)
    assert last.chosen.step_time_s < first.chosen.step_time_s
    assert all(team.plan.layout.host_slots == 1 for team in last.chosen.plan.teams)


def test_equal_hosts_that_all_work_are_offered_no_unequal_teams():
    topology = cluster([1.0] * 3, devices=1, network=1e10)
    before = search_plan(PROFILE, topology, global_batch=300)
    (step,) = replan(before, topology.slowed("host-02", 0.6)).steps
    assert step.choice.action is RecoveryAction.KEEP
    assert not any(isinstance(option.plan, UnequalPlan) for option in step.plans.values())
