"""What `plan --decide` shows about slow devices of hosts that have lost some: as their agents select devices."""

import pytest

from resilient_jax.cli.plan_slow_hosts import decide_slow_hosts
from resilient_jax.planning.search import search_plan
from tests.support.plan_topologies import cluster, small_profile


@pytest.mark.parametrize(("after_loss", "num_used"), [("even", 4), ("all", 6)])
def test_a_host_of_eight_without_one_goes_on_with_what_its_agent_selects(after_loss, num_used):
    topology = cluster([1.0] * 2, devices=8).without("host-01/0")
    plan = search_plan(small_profile(), topology, global_batch=48)
    decisions = decide_slow_hosts(plan, topology, after_loss)
    (found,) = (one.slowdown for one in decisions if one.slow.name == "host-01/7" and one.slow.speed == 0.25)
    left = topology.without(*(f"host-01/{device}" for device in range(1 + num_used, 8)))
    best = search_plan(small_profile(), left, global_batch=48)
    assert found.fewer_devices == pytest.approx(plan.step_time_s / best.step_time_s)
