"""How many microbatches of a step each replica computes. Pure.

A step has a constant number of microbatches, however many hosts are alive. After a failure only missing ones are
distributed again.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from resilient_jax.pipeline_schedule.makespan import share_tasks


def distribute_microbatches(missing: Sequence[int], speeds: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Return which of the `missing` microbatches each replica computes: runs of them, in order, all done soonest.

    Args:
        missing: indexes of the microbatches that no host has, ascending.
        speeds: one for each replica, in any unit.
    """
    rest = iter(missing)
    return tuple(tuple(itertools.islice(rest, share)) for share in share_tasks(len(missing), speeds))


def accept_disjoint_claims(claims: np.ndarray) -> np.ndarray:
    """Return the claims of which no microbatch is accepted already, of the hosts in order; 0 in place of the others.

    Two hosts claim the same microbatch when they were of one replica, or when one was left out of a generation and
    rejoined in the same step. A total cannot be taken apart: where one of its microbatches is accepted already, all of
    it is refused, and the others of its microbatches are computed again.

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


def accept_complete_claims(claims: np.ndarray, holders: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the accepted claims of hosts that each have some shards of a total; 0 in place of the others.

    A microbatch counts if for each group of shards a host's claim to it is accepted. A total with one that does not
    count is refused, since it cannot be taken apart.

    Args:
        claims: int[hosts, microbatches], see `accept_disjoint_claims`.
        holders: for each group of shards the hosts that have it. Claims of hosts without any are refused.
    """
    left = claims.copy()
    while True:
        accepted = np.zeros_like(claims)
        for hosts in holders:
            accepted[list(hosts)] = accept_disjoint_claims(left[list(hosts)])
        is_complete = np.all([accepted[list(hosts)].any(axis=0) for hosts in holders], axis=0)
        # The totals with a microbatch of which other shards are missing, by host.
        refused = [
            (host, total) for host, total in zip(*np.nonzero(accepted), strict=True) if not is_complete[total]
        ]
        if not refused:
            return accepted
        for host, index in refused:
            left[host, accepted[host] == accepted[host, index]] = 0
