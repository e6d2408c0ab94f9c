"""Bayesian online change point detection (Adams and MacKay 2007, arXiv 0710.3742) on a series of residuals.

The run length r is the number of values since the last change. With hazard H, a change at any step has probability H:

    P(r_t = r + 1, x_1..t) = P(r_t-1 = r, x_1..t-1) p(x_t | run) (1 - H)
    P(r_t = 1,     x_1..t) = sum_r P(r_t-1 = r, x_1..t-1) p(x_t | no run) H

Values of a run are normal with unknown mean and variance under the conjugate prior, so p is Student's t; after n values

    kappa' = kappa + 1,  mu' = (kappa mu + x) / kappa',  a' = a + 1/2,  b' = b + kappa (x - mu)^2 / (2 kappa')

Runs that have become improbable are dropped, so an update takes time in proportion to the few that have not.
"""

import math
from typing import Final

import msgspec

HAZARD: Final = 1 / 250
"""A change every 250 values: more than there are, so that few values suffice; what follows a change is checked."""
MIN_PROBABILITY: Final = 1e-6
MAX_RUNS: Final = 24
"""Kept, the most probable ones."""
MEAN_SPREAD: Final = 0.7
"""Standard deviation of the mean after a change: of logarithms, so from half to twice."""
PRIOR_SHAPE: Final = 4.0
"""a: the spread that is passed in is worth eight values."""


class _Run(msgspec.Struct):
    """The hypothesis that the last change was `length` values ago."""

    length: int
    log_weight: float
    kappa: float
    mean: float
    shape: float
    scale: float

    def log_density(self, value: float) -> float:
        """Return log p(value | run), a Student's t density of 2 a degrees of freedom."""
        degrees = 2 * self.shape
        variance = self.scale * (self.kappa + 1) / (self.shape * self.kappa)
        squared = (value - self.mean) ** 2 / (variance * degrees)
        return (
            math.lgamma((degrees + 1) / 2)
            - math.lgamma(degrees / 2)
            - 0.5 * math.log(degrees * math.pi * variance)
            - (degrees + 1) / 2 * math.log1p(squared)
        )

    def add(self, value: float) -> None:
        """Take in one more value of the run."""
        kappa = self.kappa + 1
        self.scale += self.kappa * (value - self.mean) ** 2 / (2 * kappa)
        self.mean += (value - self.mean) / kappa
        self.kappa, self.shape, self.length = kappa, self.shape + 0.5, self.length + 1


class ChangePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What the newest value says.

    Attributes:
        probability: chance that the series changed within the last `window` values, and not before the first.
        length: values since the most probable change.
        mean: mean of the values since the most probable change.
    """

    probability: float
    length: int
    mean: float


class ChangePointDetector:
    """Run lengths of one series, with their probabilities.

    Args:
        spread: standard deviation of the values where nothing changes.
        window: how far back a change counts as recent, in values.
    """

    def __init__(self, spread: float, window: int = 32) -> None:
        self._spread = spread
        self._window = window
        self._runs: list[_Run] = []
        self._count = 0
        """Of all values; a run as long as that began with the series, not with a change."""

    def _start(self, log_weight: float) -> _Run:
        return _Run(
            length=0,
            log_weight=log_weight,
            kappa=(self._spread / MEAN_SPREAD) ** 2,
            mean=0.0,
            shape=PRIOR_SHAPE,
            scale=PRIOR_SHAPE * self._spread**2,
        )

    def update(self, value: float) -> ChangePoint:
        """Take in the next value of the series."""
        runs = self._runs
        self._count += 1
        new = self._start(0.0 if not runs else math.log(HAZARD))
        for run in runs:
            run.log_weight += math.log1p(-HAZARD)
        runs.append(new)
        for run in runs:
            run.log_weight += run.log_density(value)
            run.add(value)
        highest = max(run.log_weight for run in runs)
        total = highest + math.log(sum(math.exp(run.log_weight - highest) for run in runs))
        for run in runs:
            run.log_weight -= total
        floor = math.log(MIN_PROBABILITY)
        runs = sorted(
            (run for run in runs if run.log_weight > floor), key=lambda run: run.log_weight, reverse=True
        )
        self._runs = runs[:MAX_RUNS]
        return self._describe()

    def _describe(self) -> ChangePoint:
        best = self._runs[0]
        recent = [run for run in self._runs if run.length <= self._window and run.length < self._count]
        return ChangePoint(
            probability=math.fsum(math.exp(run.log_weight) for run in recent),
            length=best.length,
            mean=best.mean,
        )
