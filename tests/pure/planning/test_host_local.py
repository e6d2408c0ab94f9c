"""Plans whose replicas are inside hosts, also where hosts have different numbers of devices."""

import pytest

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.host_local_search import search_host_local_plan
from resilient_jax.planning.microbatch_request import MicrobatchRequest
from tests.support.plan_topologies import cluster, small_profile, tight_bytes

PROFILE = small_profile()


def search(topology, *, microbatch_size=4, microbatches=16, **axes):
    return search_host_local_plan(
        MicrobatchRequest(
            program_cost=PROFILE,
            topology=topology,
            microbatch_size=microbatch_size,
            num_microbatches=microbatches,
            axes={Axis(name): size for name, size in axes.items()},
        )
    )


@pytest.mark.parametrize(
    ("lost", "width", "replicas"), [(0, 4, 2), (1, 4, 1), (1, 2, 3), (2, 2, 3), (1, 1, 7), (3, 1, 5)]
)
def test_a_host_has_as_many_replicas_as_its_devices_allow(lost, width, replicas):
    topology = cluster([1.0, 1.0], devices=4, inner=1e10, network=1e9)
    topology = topology.without(*(f"host-01/{index}" for index in range(lost)))
    if lost and width == 4:
        with pytest.raises(PlanError, match="found no plan"):
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
