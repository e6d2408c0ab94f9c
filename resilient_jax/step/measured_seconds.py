"""What this host takes for a task of each kind, by its last steps. Pure: no clock.

In data-parallel steps the tasks of an accumulation are microbatches; in a pipeline they are those of its schedule.
"""

import collections
import math
import statistics
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

Kind = TypeVar("Kind", bound=str)

WINDOW: Final = 16
"""The last steps whose median is what tasks take: one that compiled, or was stopped, does not count."""
MIN_MEASURED: Final = 4
"""Fewer say nothing: the first ones compile."""


class MeasuredSeconds(Generic[Kind]):
    """The mean times of tasks in each of the last steps, by kind, without waits for other hosts."""

    def __init__(self) -> None:
        self._means: collections.deque[Mapping[Kind, float]] = collections.deque(maxlen=WINDOW)
        self._estimate: dict[Kind, float] = {}
        self._num_idle = 0

    def add(self, means: Mapping[Kind, float]) -> None:
        """Note the mean seconds of a task of each kind in one step; {}: this host had no task."""
        if means:
            self._means.append(means)
        self._num_idle = 0 if means else self._num_idle + 1

    def estimate(self) -> dict[Kind, float]:
        """Return the seconds of a task of each kind, {} while they are unknown; once for each exchange."""
        if self._num_idle >= MIN_MEASURED:
            # Too slow to get any task, so nothing is measured: the host may have become faster, and is tried again.
            self._means.clear()
            self._estimate = {kind: seconds / 2 for kind, seconds in self._estimate.items()}
        elif len(self._means) >= MIN_MEASURED:
            # The median of the sum, not of each kind: a processor that stops for a while in each step stops in one.
            usual_s = statistics.median(sum(means.values()) for means in self._means)
            total_s = math.fsum(seconds for means in self._means for seconds in means.values()) or 1.0
            self._estimate = {
                kind: usual_s * (math.fsum(means.get(kind, 0.0) for means in self._means) / total_s)
                for kind in sorted({kind for means in self._means for kind in means})
            }
        return self._estimate
