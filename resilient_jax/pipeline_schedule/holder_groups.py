"""Which hosts add up the gradients of which blocks, and in which order they do.

A *group* is the blocks that the same hosts hold. Tied weights belong to several blocks: their sums are added to each
other, so all holders of the tied blocks are one group's.

Collectives of groups that are used in a cyclic order deadlock (0-1, 1-2, 2-0: each host waits in another one). Any
order of all groups that every host keeps prevents that. Here it is by round, and in a round by first block; groups of a
round share no host, so they run at once.
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.rerouting import Holders, find_living_holders


class HolderGroup(msgspec.Struct, frozen=True, order=True):
    """Blocks with the same holders.

    Attributes:
        blocks: the blocks, ascending; those of a group need not follow each other.
        hosts: the hosts that add up their gradients, sorted.
    """

    blocks: tuple[int, ...]
    hosts: tuple[HostName, ...]


def group_blocks(
    holders: Holders, *, dead: Collection[HostName] = frozenset(), tied: Iterable[Collection[int]] = ()
) -> tuple[HolderGroup, ...]:
    """Return the groups by their first block; every block is in one.

    Args:
        holders: of each block.
        dead: hosts that take part in nothing any more.
        tied: sets of blocks that share a weight. Each set's blocks are in one group, with the holders of all of them.

    Raises:
        HoldersLost: a block has no living holder.

    >>> a, b, c = map(HostName, "abc")
    >>> [group.blocks for group in group_blocks([{a, b}, {a, c}, {b, a}])]
    [(0, 2), (1,)]
    """
    hosts = list(find_living_holders(holders, dead))
    # A block in two sets ties their blocks to each other: repeat until nothing changes.
    sets = [sorted(blocks) for blocks in tied]
    is_changed = True
    while is_changed:
        is_changed = False
        for blocks in sets:
            union = frozenset().union(*(hosts[block] for block in blocks))
            is_changed |= any(hosts[block] != union for block in blocks)
            for block in blocks:
                hosts[block] = union
    by_hosts: dict[frozenset[HostName], list[int]] = {}
    for block, found in enumerate(hosts):
        by_hosts.setdefault(found, []).append(block)
    return tuple(HolderGroup(tuple(blocks), tuple(sorted(found))) for found, blocks in by_hosts.items())


def make_rounds(groups: Sequence[HolderGroup]) -> tuple[tuple[HolderGroup, ...], ...]:
    """Return the groups in rounds: those of a round share no host, and hosts go from round to round.

    Each group goes, in the given order, to the first round without its hosts. Where groups are in order of first block
    and each host has consecutive ones, as of stages, no fewer rounds are possible: so many groups has one of the hosts.
    """
    # It is a coloring of an interval graph by first fit from the left, which is optimal: the groups before g that share
    # a host with it all have the host that reaches from the first of them to g.
    rounds: list[list[HolderGroup]] = []
    for group in groups:
        free = (found for found in rounds if not any(set(group.hosts) & set(other.hosts) for other in found))
        chosen = next(free, None)
        if chosen is None:
            rounds.append([group])
        else:
            chosen.append(group)
    return tuple(map(tuple, rounds))
