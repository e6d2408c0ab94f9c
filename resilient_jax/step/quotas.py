"""How many microbatches of a step each replica computes. Pure.

A step has a constant number of microbatches, however many hosts are alive. After a failure only missing ones are
distributed again.
"""

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from resilient_jax.errors import CallerError


def apportion_microbatches(count: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return how many of `count` microbatches each replica takes so that the last one finishes soonest.

    Args:
        count: of all replicas together.
        speeds: of each replica, in any unit; equal speeds give counts that differ by one at most.

    Raises:
        CallerError: no replica, or a speed that is not a positive number.
    """
    if not speeds or any(not (speed > 0 and math.isfinite(speed)) for speed in speeds):
        raise CallerError(f"speeds: found {list(speeds)}, expected a positive number for each of the hosts")
    shares = [0] * len(speeds)
    # Minimize max_r n_r / v_r with sum_r n_r = count: greedily, each microbatch to the replica that would finish it
    # first, at (n_r + 1) / v_r. Optimal, because they are equal: on any other replica the last would end no sooner.
    finish_times = [(1 / speed, replica) for replica, speed in enumerate(speeds)]
    heapq.heapify(finish_times)
    for _ in range(count):
        _, replica = finish_times[0]
        shares[replica] += 1
        heapq.heapreplace(finish_times, ((shares[replica] + 1) / speeds[replica], replica))
    return tuple(shares)


def distribute_microbatches(missing: Sequence[int], speeds: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Return which of the `missing` microbatches each replica computes: runs of them, in order.

    Args:
        missing: their indexes, ascending.
        speeds: of each replica.
    """
    rest = iter(missing)
    return tuple(
        tuple(itertools.islice(rest, share)) for share in apportion_microbatches(len(missing), speeds)
    )


def accept_disjoint_claims(claims: np.ndarray) -> np.ndarray:
    """Return the claims of which no microbatch is accepted already, of the hosts in order; 0 in place of the others.

    A total cannot be taken apart. Two hosts claim the same microbatch when they were of one replica, or when one was
    left out of a generation and rejoined in the same step.

    Args:
        claims: int[hosts, microbatches]: which of a host's totals has the microbatch, from 1; 0 for none.
    """
    accepted = np.zeros_like(claims)
    for host, row in enumerate(claims):
        for total in range(1, 1 + row.max(initial=0)):
            has = row == total
            if not accepted[:, has].any():
                accepted[host, has] = total
    return accepted
