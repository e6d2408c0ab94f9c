"""Plans whose replicas are whole hosts, one or several, against all choices of hosts and axes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_layout import ReplicaAxes, make_layout
from resilient_jax.planning.errors import NoFeasiblePlan, PlanError
from resilient_jax.planning.plan_request import HostUse, PlanConstraints, constrain_to_hosts
from tests.support.plan_searches import search_plans
from tests.support.plan_topologies import cluster, small_profile, tight_bytes

PROFILE = small_profile()
ROWS = 12
MICROBATCHES = 12


def search(topology, top=1, **axes):
    constraints = constrain_to_hosts(
        {Axis(name): size for name, size in axes.items()}, ROWS, host_use=HostUse.SPANNING
    )
    return search_plans(PROFILE, topology, global_batch=ROWS * MICROBATCHES, constraints=constraints, top=top)


def make_cluster(hosts, devices=2, part=10.0):
    return cluster(
        [1.0] * hosts,
        devices=devices,
        memory_bytes=tight_bytes(PROFILE, part),
        inner=1e10,
        network=1e9,
    )


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_best_plan_of_whole_hosts_is_that_of_all_choices(hosts, devices):
    topology, steps = make_cluster(hosts, devices), []
    for width, fsdp in itertools.product(range(1, hosts + 1), (1, 2, 3, 4, 6, 12)):
        if (width * devices) % fsdp:
            continue
        given = {Axis.REPLICA: hosts // width, Axis.FSDP: fsdp, Axis.PIPELINE: 1, Axis.SEQUENCE: 1}
        try:
            plans = search_plans(
                PROFILE,
                topology,
                global_batch=ROWS * MICROBATCHES,
                constraints=PlanConstraints(given, microbatch_size=ROWS),
                top=100,
            )
        except PlanError:
            continue
        steps += [
            plan.step_time_s
            for plan in plans
            if plan.layout.axes.devices == width * devices
            and plan.layout.axes_in_host.devices == devices
            and plan.layout.is_contiguous
        ]
    assert search(topology)[0].step_time_s == min(steps)


@pytest.mark.parametrize("hosts", [1, 3, 4, 7])
def test_each_plan_has_as_many_replicas_of_whole_hosts_as_there_can_be(hosts):
    for plan in search(make_cluster(hosts), top=100):
        replica_hosts, rest = divmod(plan.layout.axes.devices, 2)
        assert not rest
        assert plan.layout.axes.sequence == 1, "no trainer has that axis"
        assert plan.replicas == hosts // replica_hosts
        assert sum(plan.quotas) == MICROBATCHES


def test_a_model_too_large_for_a_host_is_put_on_several():
    few, many = make_cluster(1, part=0.9), make_cluster(2, part=0.9)
    with pytest.raises(NoFeasiblePlan):
        search(few)
    assert search(many)[0].layout.axes.devices == 4


def test_hosts_that_have_lost_a_device_are_left_out():
    topology = make_cluster(4).without("host-02/1")
    for plan in search(topology, top=100):
        assert plan.replicas == 3 // (plan.layout.axes.devices // 2)


def test_given_axes_say_how_many_hosts_a_replica_has():
    plan = search(make_cluster(4), fsdp=4, tensor=1)[0]
    assert (plan.replicas, plan.layout.axes) == (2, ReplicaAxes(fsdp=4))
    with pytest.raises(
        PlanError, match="Expected given sizes that multiply to the devices of one host or several"
    ):
        search(make_cluster(4), fsdp=3, tensor=1)


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(tensor=SIZES, expert=SIZES, fsdp=SIZES, devices=st.sampled_from([1, 2, 4, 8]))
def test_a_layout_is_contiguous_where_each_host_has_a_run_of_the_mesh(tensor, expert, fsdp, devices):
    """The order of devices in a mesh: the outermost axis changes last, as hosts of a replica follow one another."""
    axes = ReplicaAxes(tensor=tensor, expert=expert, fsdp=fsdp)
    layout = make_layout(axes, devices, 1, 1, 1)
    if layout.axes_in_host.devices != devices:
        return
    inside = layout.axes_in_host
    # The host of each device, as the layout has them: parts of an axis that are inside of a host are neighbors.
    hosts = [
        (place[0] // inside.fsdp, place[1] // inside.expert, place[2] // inside.tensor)
        for place in itertools.product(range(fsdp), range(expert), range(tensor))
    ]
    runs = [tuple(set(hosts[first : first + devices])) for first in range(0, len(hosts), devices)]
    assert layout.is_contiguous == all(len(run) == 1 for run in runs)
