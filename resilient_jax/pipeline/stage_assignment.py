"""Which hosts get which stages after a change of hosts, so that the fewest blocks move.

    order of the hosts before, hosts now -> order of the hosts now, by which `teams.make_teams` makes replicas

1. A host that had just the blocks of a new stage gets such a stage, as many hosts as there are. Nothing better is lost
   by that: with blocks R of the host and of the stage, S of the stage that it would have otherwise and H of the host
   that the stage would have, |R & S| + |R & H| = |R & (S | H)| + |R & S & H| <= |R| + |S & H|.
2. The others are assigned exactly (`planning.assignment`): the sum of blocks that stay is greatest.

Blocks are those of hosts of equal speed, so that a slow host's fewer layers do not hide which stage it has.
"""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.routes import list_stages
from resilient_jax.pipeline_schedule.teams import make_teams
from resilient_jax.planning.assignment import solve_assignment

Stage = range
"""The blocks of a stage."""


def assign_stages(
    hosts: Sequence[HostName], before: Sequence[HostName], block_costs: Sequence[float], num_stages: int
) -> tuple[HostName, ...]:
    """Return the hosts in an order by which the fewest blocks move; without one before, as they are given.

    >>> assign_stages("bcda", "abcd", [1.0] * 4, 2)
    ('a', 'b', 'c', 'd')

    Args:
        hosts: hosts that make replicas now.
        before: hosts that made replicas before, in their order; a host that is among them is taken to have its blocks.
        block_costs: the relative time of each block.
        num_stages: hosts of a replica.
    """
    held = dict(list_stages(make_teams(before, block_costs, num_stages))) if before else {}
    places = [HostName(str(place)) for place in range(len(hosts))]
    stages = [stage for _, stage in list_stages(make_teams(places, block_costs, num_stages))]
    candidates = _sort_candidates(hosts, before, block_costs, num_stages)
    found: list[HostName | None] = [None] * len(stages)
    waiting: dict[Stage, collections.deque[HostName]] = {}
    for host in candidates:
        if host in held:
            waiting.setdefault(held[host], collections.deque()).append(host)
    for place, stage in enumerate(stages):
        if waiting.get(stage):
            found[place] = waiting[stage].popleft()
    placed = set(found)
    left = [host for host in candidates if host not in placed]
    free = [place for place, host in enumerate(found) if host is None]
    moves = [
        [len(stages[place]) - _count_common(held.get(host, range(0)), stages[place]) for place in free]
        for host in left
    ]
    for host, column in zip(left, solve_assignment(np.array(moves, np.int64)), strict=True):
        found[free[column]] = host
    assert None not in found, "there are as many hosts as stages"
    return tuple(host for host in found if host is not None)


def follow_stages(
    groups: Sequence[Sequence[HostName]], block_costs: Sequence[float], num_stages: int
) -> tuple[HostName, ...]:
    """Return the order of the last hosts, after changes from each group of hosts to the next; the first is an order."""
    order: tuple[HostName, ...] = ()
    for hosts in groups:
        order = assign_stages(hosts, order, block_costs, num_stages) if order else tuple(hosts)
    return order


def _sort_candidates(
    hosts: Sequence[HostName], before: Sequence[HostName], block_costs: Sequence[float], num_stages: int
) -> list[HostName]:
    """Return the hosts, those of replicas that have lost none first: hosts of a replica stay together."""
    present = set(hosts)
    teams = make_teams(before, block_costs, num_stages) if before else []
    complete = {host for team in teams if all(host in present for host, _ in team) for host, _ in team}
    places: Mapping[HostName, int] = {host: place for place, host in enumerate(before)}
    given = {host: place for place, host in enumerate(hosts)}
    return sorted(hosts, key=lambda host: (host not in complete, places.get(host, len(places)), given[host]))


def _count_common(one: Stage, other: Stage) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))
