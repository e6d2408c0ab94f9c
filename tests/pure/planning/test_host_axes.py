"""Plans in which hosts with other numbers of devices have replicas with other axes, against all combinations."""

import contextlib
import itertools
import math

import pytest

from resilient_jax.pipeline_schedule.makespan import assign_tasks
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import DEFAULT_CALIBRATION
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.plan_request import NO_FIXED_AXES, HostUse, constrain_to_hosts, make_request
from resilient_jax.planning.team_reduction import TeamReduction
from resilient_jax.planning.unequal_plan import list_machines
from resilient_jax.planning.unequal_search import MIN_GAIN, search_host_axes_plan
from tests.support.plan_searches import search_plans
from tests.support.plan_topologies import AMPLE_BYTES, cluster, small_profile, tight_bytes

PROFILE = small_profile()
ROWS = 12
ALL = 100
"""More plans than there are axes inside a host."""


def hosts_with(devices, memory_bytes=AMPLE_BYTES):
    return cluster([1.0] * len(devices), devices=devices, memory_bytes=memory_bytes, inner=1e10, network=1e9)


def search_equal(topology, microbatches=24, rows=ROWS):
    return list_plans(topology, microbatches, rows, host_use=HostUse.FILLED)[0]


def list_plans(topology, microbatches, rows=ROWS, shared_examples=None, host_use=HostUse.INSIDE):
    """Return the plans whose replicas are inside hosts, the fastest first."""
    return search_plans(
        PROFILE,
        topology,
        global_batch=microbatches * rows,
        constraints=constrain_to_hosts(NO_FIXED_AXES, rows, shared_examples)._replace(host_use=host_use),
        top=ALL,
    )


def search(
    topology, microbatches, *, equal_step_s=math.inf, axes=NO_FIXED_AXES, rows=ROWS, shared_examples=None
):
    request = make_request(PROFILE, topology, global_batch=microbatches * rows)
    constraints = constrain_to_hosts(axes, rows, shared_examples)
    return search_host_axes_plan(request, constraints, equal_step_s=equal_step_s)


def list_all_steps(topology, microbatches):
    """Return (step in seconds, whether all hosts have the same axes) of every choice of axes."""
    numbers = sorted({host.devices for host in topology.hosts}, reverse=True)
    choices = []
    for number in numbers:
        others = [host.name for host in topology.hosts if host.devices != number]
        part = topology.without(*others) if others else topology
        choices.append(list_plans(part, microbatches))
    reduction = TeamReduction(PROFILE, topology, DEFAULT_CALIBRATION)
    for plans in itertools.product(*choices):
        machines = [one for plan in plans for one in list_machines(plan)]
        step_s = (
            assign_tasks(microbatches, machines).makespan_s
            + reduction.estimate_s(plans)
            + max(plan.step_breakdown.optimizer_s for plan in plans)
        )
        yield step_s, len({plan.layout.axes for plan in plans}) == 1


@pytest.mark.parametrize("devices", [[4, 3], [4, 2], [4, 3, 3], [4, 3, 2], [8, 7]])
@pytest.mark.parametrize("microbatches", [12, 24, 25])
def test_the_best_of_all_combinations_of_axes_is_found_where_it_is_worth_it(devices, microbatches):
    topology = hosts_with(devices)
    steps = list(list_all_steps(topology, microbatches))
    equal_s = min((step_s for step_s, is_equal in steps if is_equal), default=float("inf"))
    unequal_s = min((step_s for step_s, is_equal in steps if not is_equal), default=float("inf"))
    found = search(topology, microbatches)
    if unequal_s < (1 - MIN_GAIN) * equal_s:
        assert found is not None
        assert found.step_time_s == pytest.approx(unequal_s)
        assert sum(team.microbatches for team in found.teams) == microbatches
        assert {host.name for team in found.teams for host in team.plan.request.topology.hosts} == {
            host.name for host in topology.hosts
        }
    else:
        assert found is None


def test_four_and_three_devices_take_axes_of_their_own_where_that_is_faster():
    topology = hosts_with([4, 3])
    found = search(topology, 24)
    assert found is not None
    assert [team.plan.layout.axes.devices for team in found.teams] == [2, 3]
    assert found.devices_spare == 0
    equal = search_equal(topology)
    assert found.step_time_s < (1 - MIN_GAIN) * equal.step_time_s
    assert search(topology, 24, equal_step_s=found.step_time_s) is None, "not for nothing"
    assert "fsdp 3 on 3 devices" in found.reason


def test_hosts_with_as_many_devices_have_no_unequal_plan():
    assert search(hosts_with([4, 4]), 24) is None


def test_given_axes_that_one_team_cannot_have_leave_no_unequal_plan():
    assert search(hosts_with([4, 3]), 24, axes={Axis.FSDP: 4}) is None


def test_a_model_that_fits_on_no_equal_replicas_is_planned_on_unequal_ones():
    for part in (0.5, 0.6, 0.7, 0.8, 0.9):
        topology = hosts_with([4, 3], tight_bytes(PROFILE, part))
        try:
            search_equal(topology)
        except PlanError:
            if (found := search(topology, 24)) is not None:
                assert len({team.plan.layout.axes for team in found.teams}) == 2


def test_a_team_may_leave_a_device_out_where_the_model_is_too_large_for_one():
    # Seven is a prime: replicas that fill seven devices have one or all of them.
    rows, microbatches = 24, 48
    found = []
    for part in (1.5, 2, 2.5, 3):
        topology = hosts_with([8, 7], tight_bytes(PROFILE, part))
        plan = search(topology, microbatches, rows=rows)
        if plan is not None:
            found.append(plan)
            with contextlib.suppress(PlanError):
                equal = search_equal(topology, microbatches, rows)
                assert plan.step_time_s < equal.step_time_s
    widths = {tuple(team.plan.layout.axes.devices for team in plan.teams) for plan in found}
    assert (4, 6) in widths, widths


def test_fsdp_divides_the_microbatches_of_an_evaluation_too():
    topology = hosts_with([4, 3])
    assert "fsdp 3" in str(search(topology, 24))
    found = search(topology, 24, shared_examples=4)
    teams = [] if found is None else [team.plan for team in found.teams]
    assert all(8 % plan.axis_sizes[Axis.FSDP] == 0 for plan in teams)
    plans = list_plans(hosts_with([3]), 24, shared_examples=4)
    assert {plan.axis_sizes[Axis.FSDP] for plan in plans} == {1, 2}
