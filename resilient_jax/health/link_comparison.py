"""Which link is slow, from exchanges between pairs of hosts at the same time. Pure.

In each round every host exchanges the same bytes with one other host. What that takes is compared with what it took
while nothing was wrong: links of one job differ for good, by racks and switches. A host whose own link became slow is
slow in all of its rounds, its partners only in that with it. So what counts of a host is the round that differs least
from before.
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
        peer: index of the host at its other end; None: the host is slow with all that it was paired with.
        ratio: how many times as long an exchange takes as before.
        usual: the median of that of others at the same time.
    """

    host: int
    peer: int | None
    ratio: float
    usual: float


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
    """Return the link that has become slower most, by more than `min_ratio` times the median of others.

    None: all are alike, or what one of them takes is unknown.

    Args:
        rounds: as `pair_hosts` returned them.
        seconds: by host and round, what an exchange took; 0: unknown.
        before: the same while nothing was wrong.
        min_ratio: see above.
    """
    by_pair: dict[tuple[int, int], float] = {}
    for number, pairs in enumerate(rounds):
        for pair in pairs:
            # The ends of a pair wait for each other. Whatever else one of them waited for is in its own time alone.
            now_s, then_s = (
                min(of_host[number] for of_host in (told[pair[0]], told[pair[1]]))
                for told in (seconds, before)
            )
            if not now_s or not then_s:
                return None
            by_pair[pair] = now_s / then_s
    least = [
        min((r for pair, r in by_pair.items() if host in pair), default=1.0) for host in range(len(seconds))
    ]
    slowest = max(range(len(seconds)), key=least.__getitem__)
    usual = statistics.median(least[:slowest] + least[slowest + 1 :])
    if least[slowest] > min_ratio * usual:
        return SlowestLink(host=slowest, peer=None, ratio=least[slowest], usual=usual)
    worst = max(by_pair, key=by_pair.__getitem__)
    rest = [ratio for pair, ratio in by_pair.items() if pair != worst]
    if not rest or by_pair[worst] <= min_ratio * statistics.median(rest):
        return None
    return SlowestLink(host=worst[0], peer=worst[1], ratio=by_pair[worst], usual=statistics.median(rest))
