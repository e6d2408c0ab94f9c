"""How fast hosts compute microbatches, and when it is worth giving fast ones more. Pure: no clock, no collective.

Each host measures whole microbatches of its own: whatever makes it slow (another chip, a cap on its clock, its input),
all others would wait for it.
"""

import collections
import statistics
from collections.abc import Sequence
from typing import Final

import numpy as np

from resilient_jax.step.assignment import ReplicaLocation, replica_speeds
from resilient_jax.step.quotas import apportion_microbatches

WINDOW: Final = 16
"""The last accumulations whose median is a host's speed: one that compiled, or was stopped, does not count."""
MIN_MEASURED: Final = 4
"""Fewer say nothing: the first ones compile."""
MIN_GAIN: Final = 1.1
"""The microbatches of a step must be done this many times sooner, or hosts keep those that they have. Noise alone does
not move work to and fro, which would waste what is read ahead."""


class MeasuredSpeed:
    """What a host measures of its own microbatches in one accumulation, over all generations."""

    def __init__(self) -> None:
        self._seconds: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._estimate_s = 0.0
        self._num_idle = 0

    def add(self, seconds: float) -> None:
        """Note what a microbatch took, as the mean over those of one accumulation."""
        self._seconds.append(seconds)
        self._num_idle = 0

    def add_idle(self) -> None:
        """Note an accumulation of which this host computed no microbatch."""
        self._num_idle += 1

    def estimate(self) -> float:
        """Return the seconds that a microbatch takes on this host, 0 while they are unknown; once for each exchange."""
        if self._num_idle >= MIN_MEASURED:
            # Too slow to get any microbatch, so nothing is measured: it may have become faster, and is tried again.
            self._seconds.clear()
            self._estimate_s /= 2
        elif len(self._seconds) >= MIN_MEASURED:
            self._estimate_s = statistics.median(self._seconds)
        return self._estimate_s


def choose_speeds(
    present: np.ndarray, seconds: np.ndarray, locations: Sequence[ReplicaLocation], num_microbatches: int
) -> np.ndarray:
    """Return float[hosts], the speeds by which microbatches are assigned: measured ones if that pays, else `present`.

    Args:
        present: float[hosts], those by which they are assigned now.
        seconds: float[hosts], of a microbatch; 0: unknown, so the host counts as the median of the others.
        locations: of the replicas.
        num_microbatches: of a step.
    """
    is_known = seconds > 0
    if not is_known.any():
        return present
    measured = 1 / np.where(is_known, seconds, np.median(seconds[is_known]))
    present_s, best_s = (
        _find_finish_s(speeds, measured, locations, num_microbatches) for speeds in (present, measured)
    )
    return measured if present_s > MIN_GAIN * best_s else present


def _find_finish_s(
    speeds: np.ndarray, measured: np.ndarray, locations: Sequence[ReplicaLocation], num_microbatches: int
) -> float:
    """Return when the last replica is done if microbatches are assigned by `speeds` and computed as `measured`."""
    shares = apportion_microbatches(num_microbatches, replica_speeds(locations, speeds))
    return max(
        share / speed for share, speed in zip(shares, replica_speeds(locations, measured), strict=True)
    )
