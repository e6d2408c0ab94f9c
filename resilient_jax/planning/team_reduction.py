"""The all-reduce of gradients over teams whose replicas differ: first inside of hosts, then between them."""

import math
from collections.abc import Sequence
from typing import Final

from resilient_jax.ids import HostName
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.collectives import estimate_collective_s, find_device_links
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.program_cost import CollectiveKind, ProgramCost
from resilient_jax.planning.state_bytes import StateCounter
from resilient_jax.topology import Host, Topology

ROUNDED: Final = 1e-2
"""Part of a copy of the gradients that counts as none: the ends of a pipeline hold unequal parts."""


class TeamReduction:
    """Estimates the all-reduce for one program on one topology."""

    def __init__(self, program_cost: ProgramCost, topology: Topology, calibration: Calibration) -> None:
        self._program_cost = program_cost
        self._topology = topology
        self._links = find_device_links(topology, calibration.link_efficiency, calibration.latency_factor)
        self._counter = StateCounter(program_cost)
        self._gradient_bytes: dict[tuple[object, ...], float] = {}

    def estimate_s(self, plans: Sequence[Plan]) -> float:
        """Return the time of the all-reduce over the replicas of all teams: first inside of hosts, then between them.

        With G bytes of gradients, of which d devices of a host hold H after they have added up their r copies of it,
        and n copies on all hosts: `2 M (r - 1) / r` bytes of the fullest device inside, then `2 H / d (n - 1) / n`.
        """
        whole = self._program_cost.parameter_count * self._program_cost.gradient_bytes
        held: dict[HostName, list[tuple[int, float]]] = {}
        for plan in plans:
            most = self._count_gradients(plan)
            for host in plan.request.topology.hosts:
                held.setdefault(host.name, []).append((host.devices, most))
        fullest = {name: max(most for _, most in teams) for name, teams in held.items()}
        together = {name: sum(devices * most for devices, most in teams) for name, teams in held.items()}
        devices = {name: sum(number for number, _ in teams) for name, teams in held.items()}
        level = _find_level(self._topology, [host for plan in plans for host in plan.request.topology.hosts])
        copies = math.ceil(sum(min(size, whole) for size in together.values()) / whole - ROUNDED)
        inside = between = 0.0
        for most, size, number in {(fullest[name], together[name], devices[name]) for name in held}:
            parts = math.ceil(size / whole - ROUNDED)
            inside = max(inside, self._all_reduce_s(most, parts, 0))
            between = max(between, self._all_reduce_s(min(size, whole) / number, copies, level))
        return inside + between

    def _all_reduce_s(self, message_bytes: float, parts: int, level: int) -> float:
        factors = [1] * len(self._links)
        factors[level] = max(parts, 1)
        return estimate_collective_s(CollectiveKind.ALL_REDUCE, message_bytes, tuple(factors), self._links)

    def _count_gradients(self, plan: Plan) -> float:
        """Return the bytes of gradients on the fullest device of a plan."""
        splits = tuple(one.layers for one in plan.replica_classes)
        key = (plan.layout.axes, splits)
        if key not in self._gradient_bytes:
            state = self._counter.count(plan.layout.axes)
            self._gradient_bytes[key] = max(
                state.count_stage(layers, is_first=index == 0, is_last=index == len(split) - 1).gradients
                for split in splits
                for index, layers in enumerate(split)
            )
        return self._gradient_bytes[key]


def _find_level(topology: Topology, hosts: Sequence[Host]) -> int:
    """Return the index of the innermost level that connects these hosts."""
    outermost = len(topology.levels) - 1
    inner = range(1, outermost)
    return next(
        (level for level in inner if len({host.domains[level - 1] for host in hosts}) == 1), outermost
    )
