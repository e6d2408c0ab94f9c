"""Who computes which microbatches of a step. Pure.

A step has a constant number of microbatches, whoever lives. They are dealt out in units of consecutive
microbatches; a unit is computed by one host, from its first microbatch to its last. What is done stays done:
after a failure only what is missing is dealt out again.
"""

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

from resilient_jax.errors import CallerError


def count_units(num_microbatches: int, unit_size: int) -> int:
    """How many units of `unit` microbatches there are; the last may be shorter.

    Raises:
        CallerError: one of the numbers is below 1.
    """
    for name, found in (("microbatches", num_microbatches), ("unit", unit_size)):
        if found < 1:
            raise CallerError(f"{name}: found {found}, expected at least 1")
    return -(-num_microbatches // unit_size)


def microbatches_of_unit(unit: int, num_microbatches: int, unit_size: int) -> range:
    """The microbatches of unit `number`."""
    return range(unit * unit_size, min((unit + 1) * unit_size, num_microbatches))


def apportion_units(num_units: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """How many of `count` equal pieces each host takes so that the last one is done soonest.

    Args:
        speeds: of each host, in any unit; equal ones give numbers that differ by one at most.

    Raises:
        CallerError: no host, or a speed that is not a positive number.
    """
    if not speeds or any(not (speed > 0 and math.isfinite(speed)) for speed in speeds):
        raise CallerError(f"speeds: found {list(speeds)}, expected a positive number for each of the hosts")
    shares = [0] * len(speeds)
    finish = [(1 / speed, host) for host, speed in enumerate(speeds)]
    heapq.heapify(finish)
    for _ in range(num_units):
        _, host = finish[0]
        shares[host] += 1
        heapq.heapreplace(finish, ((shares[host] + 1) / speeds[host], host))
    return tuple(shares)


def distribute_units(
    missing: Sequence[int], speeds: Sequence[float], host_of_begun_unit: Mapping[int, int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Which of the `missing` units each host computes, all starting now.

    Args:
        missing: numbers of units, ascending.
        speeds: of each host.
        begun: units that a host is in the middle of: its number by the unit's. It goes on with as many of
            them as its share allows.

    Returns:
        For each host its units, those begun first; together exactly the missing ones.
    """
    shares = apportion_units(len(missing), speeds)
    dealt: list[list[int]] = [[] for _ in speeds]
    taken = set()
    for unit, host in sorted((host_of_begun_unit or {}).items()):
        if unit in missing and len(dealt[host]) < shares[host]:
            dealt[host].append(unit)
            taken.add(unit)
    rest = iter([unit for unit in missing if unit not in taken])
    for host, share in enumerate(shares):
        while len(dealt[host]) < share:
            dealt[host].append(next(rest))
    return tuple(map(tuple, dealt))


def accept_disjoint_claims(claims: Sequence[Sequence[int]]) -> tuple[bool, ...]:
    """Whose claim of finished units counts, if the sums cannot be taken apart: each that meets none before it.

    Two hosts have the same unit when one was left out of a generation and came back in the same step.
    """
    taken: set[int] = set()
    accepted = []
    for claim in claims:
        accepted.append(taken.isdisjoint(claim))
        if accepted[-1]:
            taken.update(claim)
    return tuple(accepted)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The lock-step division of ReCoVer (arXiv 2605.11215): every replica runs `per_replica` microbatches.

    Attributes:
        per_replica: G, of every replica, spares included.
        majors: replicas that contribute all of their G.
        minor: what one more replica contributes; 0 if there is none.
        spares: replicas that contribute nothing, and stand in for one that dies.
    """

    per_replica: int
    majors: int
    minor: int
    spares: int


def find_roles(microbatches: int, replicas: int) -> Roles:
    """The roles of the next step, after a failure: `G = min{g : W g >= B}`."""
    count_units(microbatches, replicas)
    per_replica = -(-microbatches // replicas)
    majors, minor = divmod(microbatches, per_replica)
    return Roles(
        per_replica=per_replica, majors=majors, minor=minor, spares=replicas - majors - (1 if minor else 0)
    )


def extend_boundary_step(microbatches: int, contributed: int, survivors: int) -> tuple[int, int]:
    """In the step of the failure itself: how many more each survivor runs, and how many run one fewer.

    `G_ext = min{g >= 1 : C + W g >= B}`; of the W survivors, `W G_ext - (B - C)` do one fewer.
    """
    count_units(microbatches, survivors)
    lacking = microbatches - contributed
    extra = max(1, -(-lacking // survivors))
    return extra, survivors * extra - lacking


def deal_by_roles(missing: Sequence[int], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Which of the `missing` units each replica contributes under ReCoVer's roles: majors, the minor, the spares.

    All replicas run as many as a major does, so `deal`, which lets those without work wait, needs no more time and
    less energy; a spare's work stands in for a dead major's at once. For comparison, and for plans in lock step.
    """
    roles = find_roles(len(missing), replicas)
    shares = [roles.per_replica] * roles.majors + ([roles.minor] if roles.minor else []) + [0] * roles.spares
    ends = [sum(shares[: place + 1]) for place in range(replicas)]
    return tuple(tuple(missing[end - share : end]) for end, share in zip(ends, shares, strict=True))
