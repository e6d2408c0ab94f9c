"""How many units of a step each host computes. Pure.

A step has a constant number of microbatches, however many hosts are alive. They are grouped into units of consecutive
microbatches; a unit is computed by one host, from its first microbatch to its last. After a failure only missing units
are distributed again.
"""

import heapq
import math
from collections.abc import Mapping, Sequence

from resilient_jax.errors import CallerError


def count_units(num_microbatches: int, unit_size: int) -> int:
    """Return how many units there are; the last may be smaller.

    Raises:
        CallerError: one of the numbers is below 1.
    """
    for name, found in (("num_microbatches", num_microbatches), ("unit_size", unit_size)):
        if found < 1:
            raise CallerError(f"{name}: found {found}, expected at least 1")
    # ceil(microbatches / unit size).
    return -(-num_microbatches // unit_size)


def microbatches_of_unit(unit: int, num_microbatches: int, unit_size: int) -> range:
    """Return the indexes of the microbatches of a unit."""
    return range(unit * unit_size, min((unit + 1) * unit_size, num_microbatches))


def apportion_units(num_units: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return how many of `num_units` equal units each host takes so that the last one finishes soonest.

    Args:
        num_units: of all hosts together.
        speeds: of each host, in any unit; equal speeds give counts that differ by one at most.

    Raises:
        CallerError: no host, or a speed that is not a positive number.
    """
    if not speeds or any(not (speed > 0 and math.isfinite(speed)) for speed in speeds):
        raise CallerError(f"speeds: found {list(speeds)}, expected a positive number for each of the hosts")
    shares = [0] * len(speeds)
    # Minimize max_h n_h / v_h with sum_h n_h = units: greedily, each unit to the host that would finish it first, at
    # (n_h + 1) / v_h. Optimal for equal units: on any other host the last unit would end no sooner.
    finish_times = [(1 / speed, host) for host, speed in enumerate(speeds)]
    heapq.heapify(finish_times)
    for _ in range(num_units):
        _, host = finish_times[0]
        shares[host] += 1
        heapq.heapreplace(finish_times, ((shares[host] + 1) / speeds[host], host))
    return tuple(shares)


def distribute_units(
    missing: Sequence[int], speeds: Sequence[float], host_of_begun_unit: Mapping[int, int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return which of the `missing` units each host computes.

    Args:
        missing: units, ascending.
        speeds: of each host.
        host_of_begun_unit: the host that has accumulated a part of a unit. It continues with as many of these units as
            its share allows.

    Returns:
        For each host its units, begun ones first; together exactly the missing ones.
    """
    shares = apportion_units(len(missing), speeds)
    units: list[list[int]] = [[] for _ in speeds]
    taken = set()
    # Begun units first, up to the share of their host; all others fill the shares in order, and sum(shares) = missing.
    for unit, host in sorted((host_of_begun_unit or {}).items()):
        if unit in missing and len(units[host]) < shares[host]:
            units[host].append(unit)
            taken.add(unit)
    rest = iter([unit for unit in missing if unit not in taken])
    for host, share in enumerate(shares):
        while len(units[host]) < share:
            units[host].append(next(rest))
    return tuple(map(tuple, units))


def accept_disjoint_claims(claims: Sequence[Sequence[int]]) -> tuple[bool, ...]:
    """Return which claims of finished units are accepted: each that overlaps no accepted claim before it.

    For pooled totals, which cannot be taken apart. Two hosts claim the same unit when one was left out of a generation
    and rejoined in the same step.
    """
    taken: set[int] = set()
    accepted = []
    for claim in claims:
        accepted.append(taken.isdisjoint(claim))
        if accepted[-1]:
            taken.update(claim)
    return tuple(accepted)
