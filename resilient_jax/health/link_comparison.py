"""Which link is slow, from exchanges between pairs of hosts at the same time. Pure.

In each round every host exchanges the same bytes with one other host. What that takes is compared with the least that
it ever took: links of one job differ for good, by racks and switches, and a busy moment can only make them seem slower.
A host whose own link became slow is slow in all of its rounds, its partners only in that with it. So what counts of a
host is the round that differs least from before.

A link is slow if it is slower than it was, and more so than others are now. That the others are faster than they were
says only that they were measured in a busy moment.
"""

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

Pairs = tuple[tuple[int, int], ...]
"""Of one round: hosts, each at most once, by their indexes."""
MAX_ROUNDS: Final = 3
"""Enough to tell a host's own link from that of a partner, also if one of its partners has a slow link, too."""


class SlowestLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that is slower than others.

    Attributes:
        host: index of the host.
        peer: index of the host at the other end of the link; None: the host is slow with all that it was paired with.
        ratio: how many times as long an exchange takes as before.
        usual: median ratio of other links at the same time.
    """

    host: int
    peer: int | None
    ratio: float
    usual: float
    seconds: float
    before_s: float


def pair_hosts(num_hosts: int) -> tuple[Pairs, ...]:
    """Return who exchanges with whom, round by round: each pair once, or only `MAX_ROUNDS` rounds.

    Of an odd number of hosts, one has no partner in each round.

    >>> pair_hosts(4)
    (((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    >>> pair_hosts(3)
    (((0, 1),), ((0, 2),), ((1, 2),))
    """
    # The circle method: the first stays, the others move by one place after each round.
    places: list[int | None] = [*range(num_hosts)]
    if num_hosts % 2:
        places = [None, *places]
    rounds: list[Pairs] = []
    for _ in range(min(len(places) - 1, MAX_ROUNDS)):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(tuple((min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return tuple(rounds)


def find_slow_link(
    rounds: Sequence[Pairs],
    seconds: Sequence[Sequence[float]],
    before: Sequence[Sequence[float]],
    min_ratio: float,
) -> SlowestLink | None:
    """Return the link that has become slower most: to more than `min_ratio` times what it took, and what others do.

    None: all are alike, or what one of them takes is unknown.

    Args:
        rounds: rounds as `pair_hosts` returned them.
        seconds: seconds of an exchange by host and round; 0: unknown.
        before: least seconds of an exchange before, by host and round; see `keep_fastest`.
        min_ratio: a link with a lesser ratio is not slow.
    """
    now_s, then_s = list_pair_seconds(rounds, seconds), list_pair_seconds(rounds, before)
    if not all(now_s.values()) or not all(then_s.values()):
        return None
    by_pair = {pair: taken_s / then_s[pair] for pair, taken_s in now_s.items()}
    fastest = [
        min((pair for pair in by_pair if host in pair), key=by_pair.__getitem__, default=None)
        for host in range(len(seconds))
    ]
    least = [1.0 if pair is None else by_pair[pair] for pair in fastest]
    slowest = max(range(len(seconds)), key=least.__getitem__)
    usual, pair = statistics.median(least[:slowest] + least[slowest + 1 :]), fastest[slowest]
    if pair is not None and least[slowest] > min_ratio * max(usual, 1.0):
        return _make_slowest(slowest, None, usual, now_s[pair], then_s[pair])
    worst = max(by_pair, key=by_pair.__getitem__)
    rest = [ratio for pair, ratio in by_pair.items() if pair != worst]
    if not rest or by_pair[worst] <= min_ratio * max(statistics.median(rest), 1.0):
        return None
    return _make_slowest(*worst, statistics.median(rest), now_s[worst], then_s[worst])


def list_pair_seconds(
    rounds: Sequence[Pairs], seconds: Sequence[Sequence[float]]
) -> dict[tuple[int, int], float]:
    """Return what an exchange of each pair took, by what is known at both of its ends; 0: unknown.

    The ends wait for each other. Whatever else one of them waited for is in its own time alone.

    Args:
        rounds: rounds as `pair_hosts` returned them.
        seconds: seconds of an exchange by host and round; 0: unknown.

    >>> list_pair_seconds(pair_hosts(2), [[0.5], [0.4]])
    {(0, 1): 0.4}
    """
    return {
        pair: min(seconds[host][number] for host in pair)
        for number, pairs in enumerate(rounds)
        for pair in pairs
    }


def keep_fastest(
    known: Sequence[Sequence[float]] | None, seconds: Sequence[Sequence[float]]
) -> Sequence[Sequence[float]]:
    """Return the least that exchanges ever took, by host and round; 0: unknown.

    Args:
        known: the least of the measurements before; None: there was none.
        seconds: seconds of a further measurement of the same rounds.

    >>> keep_fastest([[3.0, 0.0]], [[5.0, 2.0]])
    [[3.0, 2.0]]
    """
    if known is None:
        return seconds
    return [
        [min(now, then) or max(now, then) for now, then in zip(*of_host, strict=True)]
        for of_host in zip(seconds, known, strict=True)
    ]


def _make_slowest(host: int, peer: int | None, usual: float, now_s: float, then_s: float) -> SlowestLink:
    return SlowestLink(
        host=host, peer=peer, ratio=now_s / then_s, usual=usual, seconds=now_s, before_s=then_s
    )
