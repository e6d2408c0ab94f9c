"""The hosts of a plan's replicas, in the order in which `host_pool` counts them."""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import groupby

from resilient_jax.ids import HostName
from resilient_jax.planning.device_layout import DeviceLayout
from resilient_jax.planning.host_pool import Composition, HostPool, index_host_kinds
from resilient_jax.topology import Host, Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostRange:
    """Consecutive hosts in the topology's order.

    Attributes:
        devices: used devices of each host.
    """

    first: HostName
    last: HostName
    hosts: int
    devices: int

    def __str__(self) -> str:
        span = self.first if self.hosts == 1 else f"{self.first} to {self.last}"
        return f"{span} ({self.hosts} x {self.devices})"


HostSlot = int
"""Index of a host in its topology, once for each group of its devices that is used together."""

PlacedReplicas = tuple[HostSlot, ...]
"""The slots of a replica, or the one slot of several replicas, stage by stage."""


def place_replicas(
    topology: Topology, pool: HostPool, layout: DeviceLayout, order: Sequence[Composition], blocks: int
) -> tuple[PlacedReplicas, ...]:
    """Return the slots of each replica, or of those that share a slot, fastest first.

    Args:
        order: compositions of the block classes, fastest first.
    """
    placed: dict[Composition, list[PlacedReplicas]] = {composition: [] for composition in order}
    for members in _domains(topology, pool, layout):
        cells = [
            (kind, place)
            for kind, place in members
            for _ in range(pool.kinds[kind].devices // layout.devices_per_slot)
        ]
        # Consecutive groups as `HostPool.count_blocks` forms them: a block is (slots of a replica) (replicas of a
        # block) slots, and its class is the composition of its last replica.
        size = layout.host_slots * layout.block_size
        for start in range(0, len(cells) - size + 1, size):
            block = cells[start : start + size]
            composition = _compose(kind for kind, _ in block[-layout.host_slots :])
            if composition in placed:
                placed[composition] += [
                    tuple(place for _, place in block[i : i + layout.host_slots])
                    for i in range(0, size, layout.host_slots)
                ]
    chosen = [replica for composition in order for replica in placed[composition]]
    return tuple(chosen[: blocks * layout.block_size])


def _compose(kinds: Iterable[int]) -> Composition:
    return tuple((kind, sum(1 for _ in same)) for kind, same in groupby(kinds))


def _domains(topology: Topology, pool: HostPool, layout: DeviceLayout) -> Iterable[list[tuple[int, int]]]:
    """Yield the usable hosts of each domain as (kind, index), fastest first, then in the topology's order."""
    usable = [
        (place, host)
        for place, host in enumerate(topology.hosts)
        if host.accelerator.memory_bytes >= pool.memory_bytes
    ]
    kinds = index_host_kinds([host for _, host in usable], pool.kinds)
    members: dict[str, list[tuple[int, int]]] = {}
    for (place, host), kind in zip(usable, kinds, strict=True):
        name = "" if layout.level in (0, layout.outermost_level) else host.domains[layout.level - 1]
        members.setdefault(name, []).append((kind, place))
    return [sorted(hosts) for hosts in members.values()]


def find_host_ranges(hosts: Sequence[Host], devices: Sequence[int]) -> tuple[HostRange, ...]:
    """Return ranges of consecutive hosts with equal numbers of used devices; hosts without any are left out."""
    ranges: list[HostRange] = []
    for count, group in groupby(zip(hosts, devices, strict=True), key=lambda pair: pair[1]):
        if count:
            names = [host.name for host, _ in group]
            ranges.append(HostRange(first=names[0], last=names[-1], hosts=len(names), devices=count))
    return tuple(ranges)
