"""Plans of unequal teams: every device can work, and replanning takes them."""

from resilient_jax.planning.replanning import ReplanAction, replan
from resilient_jax.planning.search import search_plan
from resilient_jax.planning.unequal_search import search_unequal_plan
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
    plan = search_unequal_plan(DEEP, topology, global_batch=256)
    assert plan is not None
    assert plan.step_time_s < equal.step_time_s
    assert plan.devices_spare == 0
    assert len({team.plan.layout.axes for team in plan.teams}) > 1
    assert sum(team.sequences for team in plan.teams) == 256
    assert plan.replicas == sum(team.plan.replicas for team in plan.teams)
    assert all(team.plan.memory.total <= team.plan.usable_bytes for team in plan.teams)


def test_hosts_none_of_which_can_hold_the_model_have_no_plan_of_unequal_teams():
    topology = cluster([1.0] * 2, devices=2, memory_bytes=tight_bytes(DEEP, 0.01)).without("host-01/0")
    assert search_unequal_plan(DEEP, topology, global_batch=8) is None


def test_no_device_is_in_two_teams():
    topology = uneven(lost=1, hosts=3)
    plan = search_unequal_plan(DEEP, topology, global_batch=128)
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
    plan = search_unequal_plan(DEEP, topology, global_batch=256, min_replicas=2)
    assert plan is not None
    assert plan.replicas >= 2
    assert search_unequal_plan(DEEP, topology, global_batch=256, min_replicas=100) is None


def test_a_slow_device_is_left_out_or_in_a_team_of_its_own():
    """ResiHP's vector: of a group with speeds 1, 1, 1, 0.4 all four together would be as slow as the slowest."""
    topology = cluster([1.0], devices=4, inner=1e12).slowed("host-00/3", 0.4)
    together = search_plan(DEEP, topology, global_batch=64)
    plan = search_unequal_plan(DEEP, topology, global_batch=64)
    assert plan is not None
    assert plan.step_time_s < together.step_time_s
    assert together.step_time_s / plan.step_time_s > 1.2


def test_replanning_takes_unequal_teams_where_they_are_faster():
    before = search_plan(
        DEEP,
        cluster([1.0, 1.0], devices=4, memory_bytes=tight_bytes(DEEP, 0.45), inner=1e10, network=1e9),
        global_batch=256,
    )
    now = uneven()
    late = replan(before, now, next_failure_s=1e9, compile_s=1.0)
    assert late.chosen.action is ReplanAction.UNEQUAL
    assert late.step_time_s < min(option.step_time_s for option in late.others)
    assert "Unequal teams" in late.reason
    held = {move.target for move in late.transfers}
    assert held <= {host.name for host in now.hosts}


def test_equal_hosts_that_all_work_are_offered_no_unequal_teams():
    topology = cluster([1.0] * 3, devices=1, network=1e10)
    before = search_plan(PROFILE, topology, global_batch=300)
    after = replan(before, topology.slowed("host-02", 0.6))
    options = (after.chosen, *after.others)
    assert not any(option.plan.devices_spare for option in options)
    assert all(option.action is not ReplanAction.UNEQUAL for option in options)
