"""Plans whose replicas are inside hosts, also where hosts have different numbers of devices."""

import contextlib
import itertools

import pytest

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.plan_request import PlanConstraints, constrain_to_hosts
from tests.support.plan_searches import search_plans
from tests.support.plan_topologies import cluster, small_profile, tight_bytes

PROFILE = small_profile()


def search(topology, *, microbatch_size=4, microbatches=16, **axes):
    constraints = constrain_to_hosts({Axis(name): size for name, size in axes.items()}, microbatch_size)
    batch = microbatch_size * microbatches
    return search_plans(PROFILE, topology, global_batch=batch, constraints=constraints)[0]


@pytest.mark.parametrize(
    ("lost", "width", "replicas"), [(0, 4, 2), (1, 4, 1), (1, 2, 3), (2, 2, 3), (1, 1, 7), (3, 1, 5)]
)
def test_a_host_has_as_many_replicas_as_its_devices_allow(lost, width, replicas):
    topology = cluster([1.0, 1.0], devices=4, inner=1e10, network=1e9)
    topology = topology.without(*(f"host-01/{index}" for index in range(lost)))
    if lost and width == 4:
        with pytest.raises(PlanError, match="found no axes for the 3 or 4 devices"):
            search(topology, tensor=4)
        return
    plan = search(topology, tensor=width, fsdp=1)
    assert plan.replicas == replicas
    assert plan.layout.axes.devices == width
    assert sum(plan.quotas) == 16


def test_the_fastest_widths_use_all_devices_where_they_fit():
    topology = cluster([1.0, 1.0], devices=4, inner=1e10, network=1e9).without("host-01/2")
    assert search(topology, microbatches=14).replicas == 7


def test_replicas_are_wider_where_one_device_cannot_hold_the_model():
    topology = cluster([1.0] * 2, devices=4, memory_bytes=tight_bytes(PROFILE, 0.9), inner=1e10, network=1e9)
    plan = search(topology.without("host-01/2"), microbatches=12)
    assert plan.layout.axes.devices > 1
    assert plan.replicas == sum(count // plan.layout.axes.devices for count in (4, 3))


@pytest.mark.parametrize("devices", [[4, 4], [4, 3], [6, 6], [8, 6, 7]])
@pytest.mark.parametrize("part", [2, 10])
def test_no_choice_of_axes_inside_hosts_is_faster(devices, part):
    topology = cluster(
        [1.0] * len(devices),
        devices=devices,
        memory_bytes=tight_bytes(PROFILE, part),
        inner=1e10,
        network=1e9,
    )
    steps = []
    for width, fsdp in itertools.product(range(1, min(devices) + 1), (1, 2, 3, 4, 6, 12)):
        if width % fsdp or (len(set(devices)) == 1 and devices[0] % width):
            continue
        replicas = sum(count // width for count in devices)
        axes = {Axis.REPLICA: replicas, Axis.FSDP: fsdp, Axis.PIPELINE: 1}
        constraints = PlanConstraints(axes, MicrobatchConfig(sequences=12 // fsdp))
        with contextlib.suppress(PlanError):
            plans = search_plans(PROFILE, topology, global_batch=288, constraints=constraints, top=100)
            steps += [
                plan.step_time_s
                for plan in plans
                if plan.layout.axes.devices == width and plan.layout.host_slots == 1
            ]
    assert search(topology, microbatch_size=12, microbatches=24).step_time_s == min(steps)


def test_a_replica_of_several_hosts_is_refused():
    with pytest.raises(PlanError, match="axis pipeline: found 2, expected none"):
        search(cluster([1.0, 1.0]), pipeline=2)
