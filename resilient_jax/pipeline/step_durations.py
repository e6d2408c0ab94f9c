"""How much longer steps take since something in a pipeline became slow that no task's time shows. Pure."""

import collections
import statistics
from typing import Final

MAX_STEPS: Final = 512
"""Whose durations are kept."""
NEWEST_STEPS: Final = 16
"""Whose median is what a step takes now."""
MIN_STEPS: Final = 8
"""Before and after; fewer say nothing."""


class StepDurations:
    """What the last steps of a generation took, from the begin of one to that of the next."""

    def __init__(self) -> None:
        self._seconds: collections.deque[tuple[int, float]] = collections.deque(maxlen=MAX_STEPS)

    def add(self, step: int, seconds: float) -> None:
        """Note what a step took."""
        self._seconds.append((step, seconds))

    def copy(self) -> "StepDurations":
        """Return what is known now, for another thread."""
        found = StepDurations()
        found._seconds.extend(self._seconds)
        return found

    def compute_growth(self, since_step: int) -> float:
        """Return how many times as long steps take now as before a step; 1: no longer, or that is not known.

        >>> durations = StepDurations()
        >>> for step in range(40):
        ...     durations.add(step, 0.1 if step < 20 else 0.3)
        >>> round(durations.compute_growth(20), 2)
        3.0
        """
        before = [seconds for step, seconds in self._seconds if step < since_step]
        newest = [seconds for step, seconds in self._seconds if step >= since_step][-NEWEST_STEPS:]
        if min(len(before), len(newest)) < MIN_STEPS:
            return 1.0
        return max(1.0, statistics.median(newest) / statistics.median(before))
