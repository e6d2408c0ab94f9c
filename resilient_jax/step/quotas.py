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
