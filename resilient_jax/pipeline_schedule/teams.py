"""Replicas of a pipeline for any number of hosts, their cuts of the model, and how many microbatches each gets.

hosts, seconds of each block -> teams -> quotas -> routes
"""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.makespan import share_tasks
from resilient_jax.pipeline_schedule.routes import Team


def make_teams(
    hosts: Sequence[HostName],
    block_costs: Sequence[float],
    num_stages: int,
    speeds: Mapping[HostName, float] | None = None,
) -> list[Team]:
    """Return replicas of `num_stages` hosts each; hosts that are left over make some replicas longer.

    With fewer hosts than stages there is one replica of all of them. No replica has more hosts than there are blocks:
    where the hosts that are left over would make one that long, there is one replica more, of fewer hosts each.

    >>> [[count for _, count in team] for team in make_teams([HostName(name) for name in "abcde"], [1.0] * 6, 2)]
    [[2, 2, 2], [3, 3]]
    >>> make_teams([HostName("a"), HostName("b"), HostName("c")], [1.0] * 12, 3, {HostName("b"): 0.4})
    [[('a', 5), ('b', 2), ('c', 5)]]

    Args:
        hosts: hosts in the order in which replicas are made of them.
        block_costs: the relative time of each block.
        num_stages: hosts of a replica.
        speeds: speeds of hosts that are slower than their peers, as parts of the peers' speed: a slow host gets fewer
            blocks.
    """
    longest = min(len(hosts), len(block_costs))
    num_teams = max(len(hosts) // min(num_stages, longest), -(-len(hosts) // longest))
    size, longer = divmod(len(hosts), num_teams)
    teams: list[Team] = []
    costs = tuple(block_costs)
    rest = iter(hosts)
    for number in range(num_teams):
        own = list(itertools.islice(rest, size + (number < longer)))
        cut = _cut_once(costs, tuple((speeds or {}).get(host, 1.0) for host in own))
        teams.append(list(zip(own, cut, strict=True)))
    return teams


def find_device_speeds(num_devices: Mapping[HostName, int]) -> dict[HostName, float]:
    """Return the speeds of hosts that have fewer devices than others, as parts of the speed of these.

    >>> find_device_speeds({HostName("a"): 4, HostName("b"): 2})
    {'b': 0.5}
    """
    most = max(num_devices.values())
    return {host: count / most for host, count in num_devices.items() if count < most}


def combine_speeds(*speeds: Mapping[HostName, float]) -> dict[HostName, float]:
    """Return the speed of each host that has one in any of these, which are parts of the speed of its peers.

    >>> combine_speeds({HostName("a"): 0.5}, {HostName("a"): 0.5, HostName("b"): 0.25})
    {'a': 0.25, 'b': 0.25}
    """
    found: dict[HostName, float] = {}
    for one in speeds:
        for host, speed in one.items():
            found[host] = found.get(host, 1.0) * speed
    return found


def cut_by_speed(block_costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Return how many consecutive blocks each part has, one at least, so that the last one is done soonest.

    Formula: minimize `max_p C_p / v_p`, with the cost C_p and the speed v_p of part p (ResiHP, arXiv 2605.06374).

    >>> cut_by_speed([1.0] * 12, [1.0, 0.4, 1.0])
    [5, 2, 5]
    """
    count, num_parts = len(block_costs), len(speeds)
    sums = [0.0, *itertools.accumulate(block_costs)]
    # worst[b] of the last p parts: the least time of the slowest one, of blocks b and up.
    worst = [(sums[-1] - sums[first]) / speeds[-1] for first in range(count)]
    choices: list[list[int]] = []
    for parts in range(2, num_parts + 1):
        speed = speeds[-parts]
        ends = [
            min(
                range(first + 1, count - parts + 2),
                key=lambda end, first=first, worst=worst, speed=speed: max(
                    (sums[end] - sums[first]) / speed, worst[end]
                ),
                default=count,
            )
            for first in range(count)
        ]
        worst = [
            max((sums[end] - sums[first]) / speed, worst[end]) if end < count else float("inf")
            for first, end in enumerate(ends)
        ]
        choices.append(ends)
    found, first = [], 0
    for ends in reversed(choices):
        found.append(ends[first] - first)
        first = ends[first]
    return [*found, count - first]


@functools.lru_cache(maxsize=256)  # most replicas are alike, in one generation as in the next
def _cut_once(block_costs: tuple[float, ...], speeds: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(cut_by_speed(block_costs, speeds))


def list_complete_teams(teams: Sequence[Team], absent: Collection[HostName]) -> frozenset[int]:
    """Return the indexes of the replicas all of whose hosts are there."""
    return frozenset(
        number for number, team in enumerate(teams) if not any(host in absent for host, _ in team)
    )


def share_microbatches(
    teams: Sequence[Team],
    num_microbatches: int,
    absent: Collection[HostName] = (),
    speeds: Mapping[HostName, float] | None = None,
) -> tuple[int, ...]:
    """Return how many microbatches each replica computes: by the speed of its hosts, and none where one is absent.

    >>> share_microbatches([[("a", 1), ("b", 1), ("c", 1)], [("d", 3)]], 8)
    (6, 2)
    >>> share_microbatches([[("a", 1), ("b", 1)], [("c", 2)]], 6, ["b"])
    (0, 6)
    """
    complete = list_complete_teams(teams, absent)
    if not complete:
        return (0,) * len(teams)
    weights = [
        sum((speeds or {}).get(host, 1.0) for host, _ in team) if number in complete else 0.0
        for number, team in enumerate(teams)
    ]
    return share_tasks(num_microbatches, weights)
