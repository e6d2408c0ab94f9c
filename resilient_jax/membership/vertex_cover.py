"""Smallest vertex covers: sets of hosts of which each of some pairs has one. Pure.

Exact by the usual branching: a cover has a host, or all that are its pairs' other ends; the host with the most pairs
first, so that `k` hosts cover at most `k` times as many pairs, which ends most branches at once.
"""

import collections
from collections.abc import Iterator
from typing import Final

from resilient_jax.ids import HostName

Pair = frozenset[HostName]
"""Two hosts."""

MAX_EXACT_HOSTS: Final = 24
"""In pairs: up to here the branching takes some thousand steps at most. Of more hosts one cover is found, by taking the
host with the most pairs again and again: the smallest where a switch cuts off some hosts from all others."""


def list_covers(pairs: frozenset[Pair], size: int) -> frozenset[frozenset[HostName]]:
    """Return the covers of exactly `size` hosts of which each is needed; of more than `MAX_EXACT_HOSTS` one at most."""
    is_small = len(frozenset().union(*pairs)) <= MAX_EXACT_HOSTS
    found = set(_branch(pairs, size)) if is_small else {_cover_greedily(pairs)}
    return frozenset(cover for cover in found if len(cover) == size and _is_each_needed(cover, pairs))


def _branch(pairs: frozenset[Pair], size: int) -> Iterator[frozenset[HostName]]:
    if not pairs:
        yield frozenset()
        return
    host, most = _find_busiest(pairs)
    if len(pairs) > size * most:
        return
    others = frozenset().union(*(pair for pair in pairs if host in pair)) - {host}
    for chosen in (frozenset({host}), others):
        if len(chosen) <= size:
            left = frozenset(pair for pair in pairs if not pair & chosen)
            yield from (chosen | rest for rest in _branch(left, size - len(chosen)))


def _cover_greedily(pairs: frozenset[Pair]) -> frozenset[HostName]:
    cover: set[HostName] = set()
    while pairs:
        host, _ = _find_busiest(pairs)
        cover.add(host)
        pairs = frozenset(pair for pair in pairs if host not in pair)
    return frozenset(cover)


def _find_busiest(pairs: frozenset[Pair]) -> tuple[HostName, int]:
    """Return the host with the most pairs, the last by name of several, and how many these are."""
    degrees = collections.Counter(host for pair in pairs for host in pair)
    most, host = max((count, host) for host, count in degrees.items())
    return host, most


def _is_each_needed(cover: frozenset[HostName], pairs: frozenset[Pair]) -> bool:
    """Return whether no host of a cover can be left out: each has a pair of which it is the only one."""
    alone = {host for pair in pairs if len(pair & cover) == 1 for host in pair & cover}
    return alone == cover
