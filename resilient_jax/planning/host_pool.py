"""The replicas that the available hosts can form: hosts by class, never one by one.

The hosts of a domain are sorted by speed and divided into consecutive replicas, so that slow ones are together. For
each speed this forms the most replicas of at least that speed: a group is as fast as its slowest host; j groups of n
that reach a speed have j n hosts that do, and the sorted order forms that many groups of these. A domain's remaining
hosts form no replica. So one more host never lowers the number of replicas of any speed.
"""

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from resilient_jax.planning.device_layout import DeviceLayout
from resilient_jax.topology import Accelerator, Host, Topology

T = TypeVar("T")

Composition = tuple[tuple[int, int], ...]
"""The hosts of a replica: index of the host kind and number of slots, fastest first."""

Domain = tuple[tuple[int, int], ...]
"""The hosts of a domain: index of the host kind and number of hosts, fastest first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostKind:
    """Hosts that are interchangeable in a plan: equal accelerators, devices and speed."""

    accelerator: Accelerator
    devices: int
    speed: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostPool:
    """The hosts that a plan may use.

    Attributes:
        kinds: host kinds, fastest first.
        domains: for each level from 1 outward, the domains with the number of equal ones. Level 0 is treated as level
            1: a topology of one level has one host.
        memory_bytes: the least memory of a device.
    """

    kinds: tuple[HostKind, ...]
    domains: tuple[tuple[tuple[Domain, int], ...], ...]
    memory_bytes: int

    @property
    def device_count(self) -> int:
        """Devices of all hosts in the pool."""
        # N = sum over domains (equal domains) (hosts of a kind in it) (devices of the kind).
        hosts: Counter[int] = Counter()
        for domain, count in self.domains[-1]:
            for kind, number in domain:
                hosts[kind] += number * count
        return sum(self.kinds[kind].devices * number for kind, number in hosts.items())

    @property
    def devices_per_host(self) -> int:
        """The most devices of any host."""
        return max(kind.devices for kind in self.kinds)

    def count_blocks(self, layout: DeviceLayout) -> tuple[tuple[Composition, int], ...]:
        """Return the compositions of the blocks of replicas, with counts; a block counts as its slowest replica."""
        found: Counter[Composition] = Counter()
        for domain, count in self.domains[max(layout.level - 1, 0)]:
            # A host of d devices has floor(d / devices per slot) slots. Slots are grouped to replicas, and replicas
            # to blocks; a block counts as its last replica, since hosts are sorted fastest first.
            cells = [
                (kind, hosts * (self.kinds[kind].devices // layout.devices_per_slot))
                for kind, hosts in domain
            ]
            for replicas, number in group_runs(group_runs(cells, layout.host_slots), layout.block_size):
                found[replicas[-1][0]] += number * count
        return tuple(found.items())


def group_runs(runs: Sequence[tuple[T, int]], size: int) -> list[tuple[tuple[tuple[T, int], ...], int]]:
    """Divide a run-length-encoded row into consecutive groups; the remainder at the end is in none.

    Args:
        runs: the row: item, and how many in sequence.

    Returns:
        Each group as runs, with the number of equal groups that follow one another.

    >>> group_runs([("fast", 5), ("slow", 2)], 2)
    [((('fast', 2),), 2), ((('fast', 1), ('slow', 1)), 1)]
    """
    groups: list[tuple[tuple[tuple[T, int], ...], int]] = []
    begun: list[tuple[T, int]] = []
    missing = size
    for what, number in runs:
        left = number
        if begun and left:
            # Complete the group that an earlier run began, then form groups of this run alone, then begin the next
            # group.
            taken = min(missing, left)
            begun.append((what, taken))
            missing, left = missing - taken, left - taken
            if missing == 0:
                groups.append((tuple(begun), 1))
                begun, missing = [], size
        if left >= size:
            groups.append((((what, size),), left // size))
            left %= size
        if left:
            begun, missing = [(what, left)], size - left
    return groups


def sort_host_kinds(hosts: Sequence[Host], number_format: str) -> tuple[HostKind, ...]:
    """Return the kinds of hosts, fastest first; of equal speed those with more devices first.

    Raises:
        TopologyError: an accelerator has no peak in this format.
    """
    kinds = {(id(host.accelerator), host.devices, host.speed): host for host in hosts}
    made = {
        HostKind(accelerator=h.accelerator, devices=h.devices, speed=h.speed): None for h in kinds.values()
    }
    return tuple(
        sorted(
            made,
            key=lambda kind: (
                -kind.accelerator.peak_flops_per_s(number_format) * kind.speed,
                -kind.devices,
                kind.accelerator.name,
            ),
        )
    )


def build_host_pool(topology: Topology, number_format: str, memory_bytes: int = 0) -> HostPool:
    """Return the hosts of a topology whose devices have at least so much memory; visits each host once.

    Args:
        number_format: number format of matrix products; hosts are sorted by their speed in this format.
        memory_bytes: least memory of a device; at least one host must have it.
    """
    hosts = [host for host in topology.hosts if host.accelerator.memory_bytes >= memory_bytes]
    kinds = sort_host_kinds(hosts, number_format)
    index = index_host_kinds(hosts, kinds)
    levels = max(len(topology.levels) - 1, 1)
    domains = []
    for level in range(1, levels + 1):
        counted: Counter[tuple[str, int]] = Counter()
        for host, kind in zip(hosts, index, strict=True):
            counted["" if level == levels else host.domains[level - 1], kind] += 1
        members: dict[str, list[tuple[int, int]]] = {}
        for (name, kind), number in counted.items():
            members.setdefault(name, []).append((kind, number))
        domains.append(tuple(Counter(tuple(sorted(runs)) for runs in members.values()).items()))
    return HostPool(
        kinds=kinds,
        domains=tuple(domains),
        memory_bytes=min(kind.accelerator.memory_bytes for kind in kinds),
    )


def index_host_kinds(hosts: Sequence[Host], kinds: Sequence[HostKind]) -> list[int]:
    """Return the index of each host's kind.

    Hosts are compared by identity of their accelerator first: its own hash visits all its peaks.
    """
    known: dict[tuple[int, int, float], int] = {}
    found = []
    for host in hosts:
        key = (id(host.accelerator), host.devices, host.speed)
        if key not in known:
            known[key] = kinds.index(
                HostKind(accelerator=host.accelerator, devices=host.devices, speed=host.speed)
            )
        found.append(known[key])
    return found


def find_stage_kinds(composition: Composition, layout: DeviceLayout) -> tuple[tuple[int, int], ...]:
    """Return the slowest host kind of each stage of a replica, as (kind, consecutive stages)."""
    stages = layout.axes.pipeline
    if len(composition) == 1:
        return ((composition[0][0], stages),)
    # A group of `size` slots has `stages_per_host` consecutive stages.
    groups = stages // layout.stages_per_host
    size = sum(number for _, number in composition) // groups
    ends = list(itertools.accumulate(number for _, number in composition))
    runs: list[tuple[int, int]] = []
    for group in range(1, groups + 1):
        # Hosts are sorted by speed, so the slowest is the last of a group.
        slowest = composition[bisect.bisect_left(ends, group * size)][0]
        before = runs.pop()[1] if runs and runs[-1][0] == slowest else 0
        runs.append((slowest, before + layout.stages_per_host))
    return tuple(runs)
