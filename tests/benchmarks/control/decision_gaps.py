"""Pauses between decisions, from the times at which generations were published. Pure."""

import itertools
from collections.abc import Sequence

import msgspec


class EtcdMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Output of the script that kills the leaders of an etcd cluster.

    Attributes:
        published_s: when an agent read each publication of a generation, ascending.
        killed_s: when a leader of etcd was killed.
        watched_s: for how long after each kill nothing else was done.
    """

    published_s: list[float]
    killed_s: list[float]
    watched_s: float


def find_longest_gap(published_s: Sequence[float], start_s: float, end_s: float) -> float:
    """Return the longest time between two publications, of which the second is in this interval.

    A pause that lasts until the end counts until there.

    >>> find_longest_gap([0.0, 1.0, 1.5, 4.0], 1.2, 5.0)
    2.5
    """
    before = [time_s for time_s in published_s if time_s < start_s]
    within = [time_s for time_s in published_s if start_s <= time_s <= end_s]
    times_s = [before[-1] if before else start_s, *within, end_s]
    return max(later - earlier for earlier, later in itertools.pairwise(times_s))


def list_gaps(measured: EtcdMeasurements) -> tuple[list[float], list[float]]:
    """Return the longest gap after each kill, and that of an equal time before the first kill."""
    watched_s, first_s = measured.watched_s, measured.killed_s[0]
    after = [
        find_longest_gap(measured.published_s, killed_s, killed_s + watched_s)
        for killed_s in measured.killed_s
    ]
    return after, [find_longest_gap(measured.published_s, first_s - watched_s, first_s)]
