"""Which link is slow, from exchanges between pairs of hosts at the same time. Pure.

In each round every host exchanges the same bytes with one other host. A host whose own link is slow is slow in all of
its rounds, its partners only in that with it. So what counts of a host is its fastest round.
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
        seconds: what an exchange over it takes.
        usual_s: the median of others at the same time.
    """

    host: int
    peer: int | None
    seconds: float
    usual_s: float

    @property
    def ratio(self) -> float:
        """How many times as long an exchange takes."""
        return self.seconds / self.usual_s


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
    rounds: Sequence[Pairs], seconds: Sequence[Sequence[float]], min_ratio: float
) -> SlowestLink | None:
    """Return the slowest link that takes more than `min_ratio` times what others take; None: all are alike, or unknown.

    Args:
        rounds: as `pair_hosts` returned them.
        seconds: by host and round, what an exchange took; 0: unknown.
        min_ratio: see above.
    """
    by_pair = {
        # The ends of a pair wait for each other. Whatever else one of them waited for is in its own time alone.
        pair: min(seconds[host][number] for host in pair)
        for number, pairs in enumerate(rounds)
        for pair in pairs
    }
    if not all(by_pair.values()):
        return None
    fastest = [
        min((taken for pair, taken in by_pair.items() if host in pair), default=0.0)
        for host in range(len(seconds))
    ]
    slowest = max(range(len(seconds)), key=fastest.__getitem__)
    others = fastest[:slowest] + fastest[slowest + 1 :]
    found = SlowestLink(host=slowest, peer=None, seconds=fastest[slowest], usual_s=statistics.median(others))
    if found.ratio > min_ratio:
        return found
    worst = max(by_pair, key=by_pair.__getitem__)
    rest = [taken for pair, taken in by_pair.items() if pair != worst]
    if not rest:
        return None
    found = SlowestLink(host=worst[0], peer=worst[1], seconds=by_pair[worst], usual_s=statistics.median(rest))
    return found if found.ratio > min_ratio else None
