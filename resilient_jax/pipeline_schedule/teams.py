"""Replicas of a pipeline for any number of hosts, their cuts of the model, and how many microbatches each gets.

hosts, seconds of each block -> teams -> quotas -> routes
"""

import itertools
from collections.abc import Sequence

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.routes import Team


def make_teams(hosts: Sequence[HostName], block_costs: Sequence[float], num_stages: int) -> list[Team]:
    """Return replicas of `num_stages` hosts each; hosts that are left over make some replicas longer.

    With fewer hosts than stages there is one replica of all of them. No replica has more hosts than there are blocks:
    where the hosts that are left over would make one that long, there is one replica more, of fewer hosts each.

    >>> [[count for _, count in team] for team in make_teams([HostName(name) for name in "abcde"], [1.0] * 6, 2)]
    [[2, 2, 2], [3, 3]]

    Args:
        hosts: in the order in which they make replicas.
        block_costs: the relative time of each block.
        num_stages: hosts of a replica.
    """
    longest = min(len(hosts), len(block_costs))
    num_teams = max(len(hosts) // min(num_stages, longest), -(-len(hosts) // longest))
    size, longer = divmod(len(hosts), num_teams)
    teams: list[Team] = []
    rest = iter(hosts)
    for number in range(num_teams):
        own = list(itertools.islice(rest, size + (number < longer)))
        teams.append(list(zip(own, cut_evenly(block_costs, len(own)), strict=True)))
    return teams


def cut_evenly(block_costs: Sequence[float], num_parts: int) -> list[int]:
    """Return how many consecutive blocks each part has, one at least, so that the most costly part costs least.

    >>> cut_evenly([1.0, 1.0, 1.0, 1.0, 4.0], 2)
    [4, 1]
    """
    count = len(block_costs)
    sums = [0.0, *itertools.accumulate(block_costs)]
    # worst[b] of p parts: the least cost of the most costly part of blocks b and up.
    worst = [sums[-1] - sums[first] for first in range(count)]
    choices: list[list[int]] = []
    for parts in range(2, num_parts + 1):
        ends = [
            min(
                range(first + 1, count - parts + 2),
                key=lambda end, first=first, worst=worst: max(sums[end] - sums[first], worst[end]),
                default=count,
            )
            for first in range(count)
        ]
        worst = [
            max(sums[end] - sums[first], worst[end]) if end < count else float("inf")
            for first, end in enumerate(ends)
        ]
        choices.append(ends)
    found, first = [], 0
    for ends in reversed(choices):
        found.append(ends[first] - first)
        first = ends[first]
    return [*found, count - first]


def share_microbatches(teams: Sequence[Team], num_microbatches: int) -> list[int]:
    """Return how many microbatches each replica computes: in proportion to its hosts.

    >>> share_microbatches([[("a", 1), ("b", 1), ("c", 1)], [("d", 3)]], 8)
    [6, 2]
    """
    return share_in_proportion([len(team) for team in teams], num_microbatches)


def share_in_proportion(weights: Sequence[int], num_microbatches: int) -> list[int]:
    """Return how many microbatches each replica computes: in proportion to its weight.

    >>> share_in_proportion([5, 1], 3)
    [3, 0]
    """
    exact = [num_microbatches * weight / sum(weights) for weight in weights]
    quotas = [int(share) for share in exact]
    by_rest = sorted(range(len(weights)), key=lambda number: (quotas[number] - exact[number], number))
    for number in by_rest[: num_microbatches - sum(quotas)]:
        quotas[number] += 1
    return quotas
