"""One series of durations: predicted by a fit of its own past, and watched for changes.

1. Warm-up: samples are only collected, then a model is fitted.
2. Each step has a ratio, observed / predicted, and that over the median ratio of its peers in this step, r. What slows
   all alike is in no r. r > 1.25 makes a suspect.
3. A suspect is slow after k suspicious steps in a row, if a change is recent with probability above 0.9 and the shift
   is above 10 %. k is such that by chance k in a row are less likely than 1 in 100,000, from how many ordinary steps
   look suspicious: two in a quiet job, more where other programs use the same processors.
4. A slow one is healthy again after as many steps in a row with r < 1.10.
5. The model is fitted again to newer samples, from time to time, of steps in which nothing is suspicious.
"""

import collections
import math
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from resilient_jax.health.change_points import ChangePointDetector
from resilient_jax.health.duration_model import DurationModel, WorkSample, fit_durations

SUSPECT_RATIO: Final = 1.25
"""Observed over predicted (ResiHP): below it a change is not worth an action."""
SHIFT: Final = 1.10
"""Of a change, and from the median of peers (ResiHP); and within it a series counts as healthy."""
CHANGE_PROBABILITY: Final = 0.9
WARM_UP_STEPS: Final = 20
MIN_EARLY_STEPS: Final = 4
"""Of a fit before the warm-up is over."""
MAX_SAMPLES: Final = 256
"""Kept for fits."""
MAX_STREAK_SAMPLES: Final = 256
"""Of suspicious steps in a row, the last ones, from which it follows what they take longer."""
MAX_REFIT_INTERVAL: Final = 128
MIN_SPREAD: Final = 0.01
"""Of residuals, so that exact times (a test, a simulation) do not make everything a change."""
CHANCE: Final = 1e-5
"""Of a finding about a series in a step by chance alone."""
MIN_STREAK, MAX_STREAK = 2, 12


class SuspicionRate:
    """How many ordinary steps look suspicious, of all series of a job together."""

    def __init__(self) -> None:
        self._suspicious = 0.2
        self._total = 1.0

    def add(self, is_suspicious: bool) -> None:
        """Count one step of one series."""
        self._suspicious += is_suspicious
        self._total += 1

    @property
    def streak(self) -> int:
        """How many suspicious steps in a row are no chance any more."""
        rate = self._suspicious / self._total
        wanted = math.log(CHANCE) / math.log(min(rate, 0.5))
        return max(MIN_STREAK, min(MAX_STREAK, math.ceil(wanted)))


class SeriesState(msgspec.Struct, frozen=True, kw_only=True):
    """What a series says after a step.

    Attributes:
        ratio: observed over predicted, over the median of peers.
        typical_ratio: the median ratio of the suspicious steps in a row, which one long step does not change; else the
            ratio of this step.
        is_healthy: the ratio has been within 10 % for long enough.
        streak: suspicious steps in a row, `MAX_STREAK_SAMPLES` at most.
        since_step: first of the suspicious steps in a row.
    """

    ratio: float
    typical_ratio: float
    is_slow: bool
    is_healthy: bool
    streak: int
    since_step: int


class WorkSeries:
    """The series of one host, replica, or of the links.

    Attributes:
        model: the fit; None in the warm-up.
        newest_ratio: ratio of the last step; 1 in the warm-up.
        steps_since_fit: steps that were judged by the present fit.
    """

    def __init__(self, rate: SuspicionRate) -> None:
        self._rate = rate
        self.model: DurationModel | None = None
        self.newest_ratio = 1.0
        self.steps_since_fit = 0
        self._samples: collections.deque[WorkSample] = collections.deque(maxlen=MAX_SAMPLES)
        self._num_steps = 0
        self._next_fit = WARM_UP_STEPS
        self._detector: ChangePointDetector | None = None
        self._streak: collections.deque[float] = collections.deque(maxlen=MAX_STREAK_SAMPLES)
        """Logarithms of the ratios of the suspicious steps in a row, the newest of them."""
        self._since_step = 0
        self._num_healthy = 0

    def replace_model(self, model: DurationModel) -> None:
        """Predict by this model from now on, that of peers: its own samples were slow."""
        self.model = model
        self._detector = _make_detector(model)
        self._samples.clear()
        self._num_steps, self._next_fit = 0, WARM_UP_STEPS

    def fit_early(self) -> list[WorkSample]:
        """Fit the samples of a warm-up that comes to no end, and return them; none, and no fit, if they are too few."""
        if self._num_steps < MIN_EARLY_STEPS:
            return []
        self._fit()
        return list(self._samples)

    def measure(self, samples: Sequence[WorkSample]) -> float | None:
        """Return observed over predicted of a step that nothing disturbed; None, and learn from it, in the warm-up.

        Args:
            samples: microbatches of this step, at least one.
        """
        model = self.model
        if model is None:
            self._learn(samples)
            return None
        # The median: of several microbatches that are measured one by one, one may take long for no lasting reason.
        return statistics.median(s.seconds / model.predict_s(s.tokens, s.squares) for s in samples)

    def judge(
        self,
        step: int,
        measured: float,
        usual: float,
        samples: Sequence[WorkSample],
        *,
        is_found: bool = False,
    ) -> SeriesState:
        """Take in a step that was measured.

        Args:
            measured: observed over predicted.
            usual: median of what was measured of the peers in this step; what is below 1 counts as 1.
            samples: the samples as measured.
            is_found: the part is known to be slow: then the series learns from healthy steps alone, not from the best
                of the slow.
        """
        assert self._detector is not None, "what is measured has a model"
        self.steps_since_fit += 1
        ratio = self.newest_ratio = measured / max(usual, 1.0)
        value = math.log(ratio)
        change = self._detector.update(value)
        is_suspicious = ratio > SUSPECT_RATIO
        limit = self._rate.streak
        if len(self._streak) < limit:  # what has been slow for longer is no chance
            self._rate.add(is_suspicious)
        if is_suspicious:
            if not self._streak:
                self._since_step = step
            self._streak.append(value)
        else:
            self._streak.clear()
        # Not from steps in which all are slow: each would learn at another time, and then differ from the others.
        if measured < (SHIFT if is_found else SUSPECT_RATIO):
            self._learn(samples)
        self._num_healthy = self._num_healthy + 1 if ratio < SHIFT else 0
        typical = statistics.median(self._streak) if self._streak else value
        return SeriesState(
            ratio=ratio,
            typical_ratio=math.exp(typical),
            is_slow=len(self._streak) >= limit
            and change.probability > CHANGE_PROBABILITY
            and change.mean > math.log(SHIFT),
            is_healthy=self._num_healthy >= limit,
            streak=len(self._streak),
            since_step=self._since_step,
        )

    def _learn(self, samples: Sequence[WorkSample]) -> None:
        self._samples.extend(samples)
        self._num_steps += 1
        if self._num_steps >= self._next_fit:
            self._fit()

    def _fit(self) -> None:
        self._next_fit = self._num_steps + min(self._num_steps, MAX_REFIT_INTERVAL)
        self.model, self.steps_since_fit = fit_durations(self._samples), 0
        if self._detector is None:
            self._detector = _make_detector(self.model)


def _make_detector(model: DurationModel) -> ChangePointDetector:
    return ChangePointDetector(max(model.spread, MIN_SPREAD))
