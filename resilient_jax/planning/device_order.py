"""The order of a topology's devices in a plan's mesh."""

import itertools
from collections.abc import Iterator, Sequence

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_layout import DeviceLayout
from resilient_jax.planning.placement import PlacedReplicas, place_replicas
from resilient_jax.planning.plan import Plan

MESH_AXES = (Axis.REPLICA, Axis.PIPELINE, Axis.FSDP, Axis.EXPERT, Axis.SEQUENCE, Axis.TENSOR)
"""Axes of a plan's mesh, outermost first."""


def find_device_order(plan: Plan) -> list[int]:
    """Return the indexes of the devices in the order of the plan's mesh, `MESH_AXES`, the last axis changing fastest.

    Devices are numbered as the topology lists its hosts, each with all of its devices; spares are left out. The devices
    of replica r are those from `r n` to `(r + 1) n`, if a replica has n.
    """
    request, layout = plan.request, plan.layout
    hosts = request.topology.hosts
    free = list(itertools.accumulate((host.devices for host in hosts), initial=0))[:-1]
    placed = place_replicas(request.topology, request.pool, layout, plan.compositions, plan.blocks)
    order: list[int] = []
    for cells in placed:
        starts = []
        for place in cells:
            starts.append(free[place])
            free[place] += layout.devices_per_slot
        order += _order_replicas(layout, cells, starts)
    return order


def _order_replicas(layout: DeviceLayout, cells: PlacedReplicas, starts: Sequence[int]) -> Iterator[int]:
    """Yield the devices of one replica on its slots, or of the replicas that share one slot."""
    if layout.replicas_per_slot > 1:
        assert len(cells) == 1, "replicas that share a host have one cell"
        yield from range(starts[0], starts[0] + layout.devices_per_slot)
        return
    axes, inside = layout.axes, layout.axes_in_host
    # A coordinate c of an axis with p of its devices inside a host is slot `c // p` and position `c % p`; slots and
    # positions are mixed-radix numbers with tensor changing fastest, and pipeline is the outermost axis of a replica.
    for coordinates in itertools.product(*(range(size) for size in reversed(axes))):
        cell = slot = 0
        for coordinate, part, size in zip(coordinates, reversed(inside), reversed(axes), strict=True):
            outer, inner = divmod(coordinate, part)
            cell = cell * (size // part) + outer
            slot = slot * part + inner
        yield starts[cell] + slot
