"""The bytes of the state that move between hosts when a plan follows another, and the assignment of hosts to places.

Hosts of one kind in one domain may change places. Among these the assignment that moves the least is found by the
Hungarian method (as in Chameleon, arXiv 2508.21613); for more than `MAX_EXACT_HOSTS` of them greedily, the largest
common part first, and `StateMigration.is_exact` is False then.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from resilient_jax.ids import HostName
from resilient_jax.planning.assignment import solve_assignment
from resilient_jax.planning.host_state import (
    HostState,
    StateRegion,
    count_layer_bytes,
    count_region_bytes,
    find_host_states,
    intersect_regions,
)
from resilient_jax.planning.plan import Plan
from resilient_jax.topology import Host

MAX_EXACT_HOSTS = 64
"""Hosts that are assigned exactly: some 64^3 operations, a tenth of a second."""
NOTHING: HostState = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostTransfer:
    """Bytes from one host to another.

    `source` is None for what no remaining host holds: it comes from parity, or from a checkpoint.
    """

    source: HostName | None
    target: HostName
    bytes_moved: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateMigration:
    """All transfers of a change of plans.

    Attributes:
        transfers: each pair of hosts once.
        is_exact: no other assignment moves less.
    """

    transfers: tuple[HostTransfer, ...]
    is_exact: bool

    @property
    def bytes_moved(self) -> float:
        """The bytes of all transfers together, those without a source (`bytes_lost`) included."""
        return sum(move.bytes_moved for move in self.transfers)

    @property
    def bytes_lost(self) -> float:
        """Bytes that no remaining host holds."""
        return sum(move.bytes_moved for move in self.transfers if move.source is None)

    def count_max_host_bytes(self) -> float:
        """Return the most bytes that one host receives or sends."""
        # max over hosts of bytes received and of bytes sent: links carry both directions at once.
        loads: Counter[tuple[str, str]] = Counter()
        for move in self.transfers:
            loads["in", move.target] += move.bytes_moved  # type: ignore[assignment]
            if move.source is not None:
                loads["out", move.source] += move.bytes_moved  # type: ignore[assignment]
        return float(max(loads.values(), default=0.0))


def plan_migration(before: Plan, after: Plan) -> StateMigration:
    """Return what moves from the hosts of one plan to those of the next."""
    weights, held = count_layer_bytes(after.request.program_cost), _find_held(before, [after])
    wanted, is_exact = _assign(after, held, find_host_states(after), weights)
    return StateMigration(transfers=tuple(_find_sources(held, wanted, weights)), is_exact=is_exact)


def plan_team_migration(before: Plan, teams: Sequence[Plan]) -> StateMigration:
    """Return what moves to unequal teams; each host stays where the search put it, so fewer bytes might do."""
    weights, held = count_layer_bytes(before.request.program_cost), _find_held(before, teams)
    wanted: dict[HostName, HostState] = {}
    for team in teams:
        for name, regions in find_host_states(team).items():
            wanted[name] = wanted.get(name, NOTHING) | regions
    return StateMigration(transfers=tuple(_find_sources(held, wanted, weights)), is_exact=False)


def _find_held(before: Plan, after: Sequence[Plan]) -> dict[HostName, HostState]:
    """Return what hosts of a plan hold that are there in what follows."""
    alive = {host.name for plan in after for host in plan.request.topology.hosts}
    return {name: regions for name, regions in find_host_states(before).items() if name in alive}


def count_lost_bytes(plan: Plan, lost: Collection[str]) -> float:
    """Return the bytes of the state that only these hosts hold."""
    weights = count_layer_bytes(plan.request.program_cost)
    states = find_host_states(plan)
    held = NOTHING.union(*(state for host, state in states.items() if host not in lost))
    gone = NOTHING.union(*(state for host, state in states.items() if host in lost))
    return count_missing_bytes(held, gone, weights)


def count_missing_bytes(held: HostState, wanted: HostState, weights: tuple[float, ...]) -> float:
    """Return the bytes of what is wanted and not held."""
    return sum(count_region_bytes(part, weights) for region in wanted for part in _subtract(region, held))


def _subtract(region: StateRegion, held: Iterable[StateRegion]) -> list[StateRegion]:
    """Return what is left of a region, as disjoint regions."""
    left = [region]
    for other in held:
        left = [part for one in left for part in _subtract_one(one, other)]
    return left


def _subtract_one(region: StateRegion, other: StateRegion) -> list[StateRegion]:
    common = intersect_regions(region, other)
    if common is None:
        return [region]
    # Peel off, dim by dim, what is below and above the common interval; then shrink the rest to it. The parts are
    # disjoint.
    parts = []
    rest = list(region)
    for dim, (low, high) in enumerate(common):
        for piece in ((rest[dim][0], low), (high, rest[dim][1])):
            if piece[0] < piece[1]:
                parts.append(StateRegion(*rest[:dim], piece, *rest[dim + 1 :]))  # type: ignore[arg-type]
        rest[dim] = (low, high)
    return parts


def _assign(
    after: Plan,
    held: Mapping[HostName, HostState],
    planned: Mapping[HostName, HostState],
    weights: tuple[float, ...],
) -> tuple[dict[HostName, HostState], bool]:
    """Return the planned states with equal hosts permuted, and whether the assignment is exact."""
    all_axes: dict[tuple[object, ...], list[Host]] = {}
    for host in after.request.topology.hosts:
        # Hosts may change places only within a domain of the plan's level and with hosts of equal kind and speed.
        level = after.layout.level
        domain = "" if level in (0, after.layout.outermost_level) else host.domains[level - 1]
        all_axes.setdefault((domain, host.accelerator.name, host.devices, host.speed), []).append(host)
    assigned: dict[HostName, HostState] = {}
    is_exact = True
    for hosts in all_axes.values():
        names = [host.name for host in hosts]
        mine = [held.get(name, NOTHING) for name in names]
        slots = [planned.get(name, NOTHING) for name in names]
        places = _assign_alike(mine, slots, weights)
        is_exact &= len(names) <= MAX_EXACT_HOSTS or mine == slots
        assigned |= {name: slots[place] for name, place in zip(names, places, strict=True)}
    return assigned, is_exact


def _assign_alike(
    mine: Sequence[HostState], slots: Sequence[HostState], weights: tuple[float, ...]
) -> Sequence[int]:
    # c_ij = bytes that host i lacks of the state of place j; equal states have equal costs, computed once.
    costs: dict[tuple[HostState, HostState], float] = {}
    for has in set(mine):
        for wants in set(slots):
            costs[has, wants] = count_missing_bytes(has, wants, weights)
    if len(mine) <= MAX_EXACT_HOSTS:
        return solve_assignment(np.array([[costs[has, wants] for wants in slots] for has in mine]))
    # Greedy: pairs of states by the bytes that stay, bytes of the place - c_ij, the most first.
    free: dict[HostState, list[int]] = {}
    for place, wants in reversed(list(enumerate(slots))):
        free.setdefault(wants, []).append(place)
    waiting: dict[HostState, list[int]] = {}
    for row, has in reversed(list(enumerate(mine))):
        waiting.setdefault(has, []).append(row)
    found = [0] * len(mine)
    saved = {pair: count_missing_bytes(NOTHING, pair[1], weights) - cost for pair, cost in costs.items()}
    for has, wants in sorted(saved, key=lambda pair: -saved[pair]):
        while waiting[has] and free[wants]:
            found[waiting[has].pop()] = free[wants].pop()
    return found


def _find_sources(
    held: Mapping[HostName, HostState], wanted: Mapping[HostName, HostState], weights: tuple[float, ...]
) -> Iterable[HostTransfer]:
    """Return the transfers; each missing part comes from the holder that has sent least."""
    holders: dict[StateRegion, list[HostName]] = {}
    for name, regions in held.items():
        for region in regions:
            holders.setdefault(region, []).append(name)
    sent: Counter[HostName] = Counter()
    total: dict[tuple[HostName | None, HostName], float] = {}
    for target, regions in wanted.items():
        left = [part for region in regions for part in _subtract(region, held.get(target, NOTHING))]
        for owned, names in holders.items() if left else ():
            common = [part for one in left if (part := intersect_regions(one, owned)) is not None]
            if common:
                # Of the hosts with equal regions the one that has sent the least so far sends next.
                source = min(names, key=sent.__getitem__)
                size = sum(count_region_bytes(part, weights) for part in common)
                sent[source] += size  # type: ignore[assignment]
                total[source, target] = total.get((source, target), 0.0) + size
                left = [part for one in left for part in _subtract_one(one, owned)]
        if lost := sum(count_region_bytes(part, weights) for part in left):
            total[None, target] = lost
    return [
        HostTransfer(source=source, target=target, bytes_moved=size)
        for (source, target), size in total.items()
    ]
