"""The plain detector to compare with: change points of the step times alone, without a prediction."""

import math
import statistics
from typing import Final

from resilient_jax.health.change_points import ChangePointDetector
from resilient_jax.health.work_series import CHANGE_PROBABILITY, MIN_SPREAD, MIN_STREAK, SHIFT, WARM_UP_STEPS

WINDOW: Final = 16


class PlainDetector:
    """Says when step times have changed; it cannot say on which host."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._detector: ChangePointDetector | None = None
        self._level = 0.0

    def observe(self, step_s: float) -> bool:
        """Take in a step; return whether it raises an alarm: steps have become more than 10 % longer."""
        value = math.log(step_s)
        if self._detector is None:
            self._values.append(value)
            if len(self._values) == WARM_UP_STEPS:
                self._level = statistics.fmean(self._values)
                spread = max(statistics.stdev(self._values), MIN_SPREAD)
                self._detector = ChangePointDetector(spread, WINDOW)
            return False
        change = self._detector.update(value - self._level)
        if change.probability <= CHANGE_PROBABILITY or change.length < MIN_STREAK:
            return False
        shift, self._level = change.mean, self._level + change.mean
        spread = max(statistics.stdev(self._values), MIN_SPREAD)
        self._detector = ChangePointDetector(spread, WINDOW)
        return shift > math.log(SHIFT)
