"""What the microbatches of a host take, as a function of the lengths of the documents in them.

    seconds = alpha N + beta S,   N = sum_i l_i,  S = sum_i l_i^2          ResiHP, arXiv 2605.06374

Matrix products take time in proportion to tokens, attention within documents in proportion to squares of their lengths.
The times of several microbatches add up, and so do N and S: a sample may be of any number of them.

Errors are relative, so alpha and beta minimize sum_j rho((alpha N_j + beta S_j) / y_j - 1), with Tukey's biweight rho:
samples that are far off (a compilation, a restart, another program on the machine) have no weight. Where all lengths
are equal, S is a multiple of N and only alpha is fitted.
"""

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

NUM_ROUNDS: Final = 8
"""Of reweighting; the first with Huber's weights, which from any start come near enough for Tukey's."""
NUM_HUBER_ROUNDS: Final = 3
HUBER_SCALES, TUKEY_SCALES = 1.345, 4.685
"""In robust standard deviations: 95 % of the efficiency of least squares on normal errors (Huber 1981)."""
MAD_TO_STANDARD_DEVIATION: Final = 1.4826
MIN_SCALE: Final = 1e-4
"""Relative: what is computed exactly, such as in tests, has no spread."""
MIN_DETERMINANT: Final = 1e-4
"""1 - cos^2 of the angle between N and S, both over y: below it they are too alike to be told apart from noise."""


class WorkSample(msgspec.Struct, frozen=True, kw_only=True):
    """Some microbatches, and what they took.

    Attributes:
        tokens: N; the number of microbatches where no lengths are known.
        squares: S; 0 where no lengths are known.
        seconds: y, above 0.
    """

    tokens: float
    squares: float
    seconds: float


class DurationModel(msgspec.Struct, frozen=True, kw_only=True):
    """A fit.

    Attributes:
        alpha: seconds for a token.
        beta: seconds for a token and token of context.
        spread: robust standard deviation of observed over predicted.
    """

    alpha: float
    beta: float
    spread: float = MIN_SCALE

    def predict_s(self, tokens: float, squares: float) -> float:
        """Return the seconds that microbatches with these sums take."""
        return self.alpha * tokens + self.beta * squares


def fit_durations(samples: Sequence[WorkSample]) -> DurationModel:
    """Return the robust fit to samples, of which there must be one at least.

    >>> flat = [WorkSample(tokens=8.0, squares=32.0, seconds=2.0)] * 3
    >>> fit_durations(flat).alpha
    0.25
    """
    rows = [(s.tokens / s.seconds, s.squares / s.seconds) for s in samples]
    alpha, beta = 1 / statistics.median(x for x, _ in rows), 0.0
    scale = MIN_SCALE
    for turn in range(NUM_ROUNDS):
        errors = [alpha * x + beta * z - 1 for x, z in rows]
        scale = max(MIN_SCALE, MAD_TO_STANDARD_DEVIATION * statistics.median(map(abs, errors)))
        weigh = _weigh_huber if turn < NUM_HUBER_ROUNDS else _weigh_tukey
        alpha, beta = _solve(rows, [weigh(error / scale) for error in errors])
    return DurationModel(alpha=alpha, beta=beta, spread=scale)


def _weigh_huber(error: float) -> float:
    return 1.0 if abs(error) <= HUBER_SCALES else HUBER_SCALES / abs(error)


def _weigh_tukey(error: float) -> float:
    share = error / TUKEY_SCALES
    return (1 - share * share) ** 2 if abs(share) < 1 else 0.0


def _solve(rows: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Return the alpha and beta of least weighted squares of `alpha x + beta z - 1`, neither below 0."""
    xx = xz = zz = x1 = z1 = 0.0
    for (x, z), weight in zip(rows, weights, strict=True):
        wx, wz = weight * x, weight * z
        xx, xz, zz, x1, z1 = xx + wx * x, xz + wx * z, zz + wz * z, x1 + wx, z1 + wz
    determinant = xx * zz - xz * xz
    if determinant <= MIN_DETERMINANT * xx * zz:
        return x1 / xx, 0.0
    alpha, beta = (x1 * zz - z1 * xz) / determinant, (z1 * xx - x1 * xz) / determinant
    if beta < 0:
        return x1 / xx, 0.0
    if alpha < 0:
        return 0.0, z1 / zz
    return alpha, beta
