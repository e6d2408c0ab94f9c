"""The way of each microbatch through hosts.

A *block* is the smallest part of a model that is never cut: 0 to n - 1, from the embedding to the loss. A *hop* is a
range of blocks on a host, a *route* the hops of one microbatch. Stages are hops that many routes share; pipelines of
unequal cuts or lengths are routes like any other.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.errors import RouteError

Team = Sequence[tuple[HostName, int]]
"""The hosts of a replica in order, each with its number of blocks."""


def list_stages(teams: Iterable[Team]) -> Iterator[tuple[HostName, range]]:
    """Yield each host of the replicas with the blocks that it has there.

    >>> list(list_stages([[("a", 2), ("b", 1)]]))
    [('a', range(0, 2)), ('b', range(2, 3))]
    """
    for team in teams:
        first = 0
        for host, count in team:
            yield host, range(first, first + count)
            first += count


class Hop(msgspec.Struct, frozen=True, order=True):
    """A range of blocks that a host computes for a microbatch, as one task.

    Attributes:
        end_block: one past the last block of the hop.

    Raises:
        RouteError: the range is empty or begins below 0.
    """

    host: HostName
    first_block: int
    end_block: int

    def __post_init__(self) -> None:
        if not 0 <= self.first_block < self.end_block:
            raise RouteError(
                f"hop on {self.host}: found blocks {self.first_block} to {self.end_block} (exclusive), expected one "
                "block at least, from 0 on"
            )

    @property
    def blocks(self) -> range:
        """The blocks of the hop, ascending."""
        return range(self.first_block, self.end_block)


class Route(msgspec.Struct, frozen=True, order=True):
    """The hops of one microbatch: every block exactly once, in order.

    Attributes:
        microbatch: index of the microbatch in the step.
        hops: hops from the first block to the last. A host may have several.

    Raises:
        RouteError: there is no hop, or a hop does not begin where the one before ends.
    """

    microbatch: int
    hops: tuple[Hop, ...]

    def __post_init__(self) -> None:
        if not self.hops or self.microbatch < 0:
            raise RouteError(
                f"route of microbatch {self.microbatch}: found {len(self.hops)} hops, expected an index from 0 on and "
                "one hop at least"
            )
        expected = 0
        for hop in self.hops:
            if hop.first_block != expected:
                raise RouteError(
                    f"route of microbatch {self.microbatch}: found block {hop.first_block} as the first on {hop.host}, "
                    f"expected {expected}: every block exactly once, in order"
                )
            expected = hop.end_block

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the model."""
        return self.hops[-1].end_block


Routes = tuple[Route, ...]
"""The routes of a step, by microbatch, ascending."""


def make_route(microbatch: int, team: Team) -> Route:
    """Return the route of a microbatch through all hosts of a team.

    >>> [str(hop.host) for hop in make_route(0, [(HostName("a"), 3), (HostName("b"), 5)]).hops]
    ['a', 'b']
    """
    ends = list(itertools.accumulate(count for _, count in team))
    return Route(
        microbatch,
        tuple(Hop(host, end - count, end) for (host, count), end in zip(team, ends, strict=True)),
    )


def make_routes(teams: Sequence[Team], quotas: Sequence[int]) -> Routes:
    """Return the routes of a step: runs of microbatches, in order, to each team.

    Args:
        teams: replicas, which may differ in hosts, number of hosts and cuts.
        quotas: microbatches of each team.

    Raises:
        RouteError: there are not as many quotas as teams, one is negative, or the teams differ in their number of
            blocks.
    """
    if len(teams) != len(quotas) or any(quota < 0 for quota in quotas):
        raise RouteError(
            f"quotas: found {list(quotas)}, expected a number from 0 on for each of {len(teams)} teams"
        )
    owners = [team for team, quota in zip(teams, quotas, strict=True) for _ in range(quota)]
    return validate_routes(make_route(microbatch, team) for microbatch, team in enumerate(owners))


def validate_routes(routes: Iterable[Route]) -> Routes:
    """Return the routes by microbatch.

    Raises:
        RouteError: two routes are of one microbatch, or the routes differ in their number of blocks.
    """
    found = tuple(sorted(routes))
    for before, route in itertools.pairwise(found):
        if route.microbatch == before.microbatch:
            raise RouteError(f"routes: found two of microbatch {route.microbatch}, expected one of each")
        if route.num_blocks != before.num_blocks:
            raise RouteError(
                f"routes: found {before.num_blocks} blocks for microbatch {before.microbatch} and "
                f"{route.num_blocks} for microbatch {route.microbatch}, expected as many blocks everywhere"
            )
    return found


def list_microbatches(routes: Iterable[Route], host: HostName) -> list[int]:
    """Return the microbatches of which a host computes some blocks, in the order of routes."""
    return [route.microbatch for route in routes if any(hop.host == host for hop in route.hops)]


def find_holders(teams: Sequence[Team]) -> tuple[frozenset[HostName], ...]:
    """Return for each block the hosts that have it in a team, whatever the quota of the team."""
    routes = validate_routes([make_route(index, team) for index, team in enumerate(teams)])
    blocks = range(routes[0].num_blocks) if routes else range(0)
    return tuple(
        frozenset(hop.host for route in routes for hop in route.hops if block in hop.blocks)
        for block in blocks
    )
