"""The number of steps between two snapshots that minimizes the time lost to snapshots and to failures.

Young's first-order optimum (J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006): with a cost C
for each snapshot and a mean time M between failures, T = sqrt(2 C M) minimizes C / T + T / (2 M), the share of time
that goes into snapshots and into work that is repeated.
"""

import math

from resilient_jax.errors import CallerError


def compute_optimal_interval_s(cost_s: float, mean_time_between_failures_s: float) -> float:
    """Return sqrt(2 C M), limited to M: the formula assumes that C is far below M.

    Args:
        cost_s: C, the time by which one snapshot prolongs training.
        mean_time_between_failures_s: M, of the job: the mean time of one host divided by the number of hosts.

    Raises:
        CallerError: an argument is negative, infinite or NaN, or M is 0.

    Example:
        >>> compute_optimal_interval_s(0.5, 3600.0)
        60.0
    """
    if not (0 <= cost_s < math.inf and 0 < mean_time_between_failures_s < math.inf):
        raise CallerError(
            f"snapshot interval: found a cost of {cost_s} s and a failure every {mean_time_between_failures_s} s, "
            "expected a cost of 0 or more and a time between failures above 0, both finite"
        )
    # d/dT (C / T + T / (2 M)) = -C / T^2 + 1 / (2 M) = 0 at T = sqrt(2 C M), all in s.
    return min(math.sqrt(2 * cost_s * mean_time_between_failures_s), mean_time_between_failures_s)


def compute_interval_steps(
    cost_s: float, mean_time_between_failures_s: float | None, step_s: float, *, copy_s: float = 0.0
) -> int:
    """Return the number of steps from one snapshot to the next, at least 1.

    Args:
        cost_s: the time by which one snapshot prolongs training.
        mean_time_between_failures_s: mean time of the job; None: not known, so that snapshots are taken as often as
            copies can follow each other.
        copy_s: time from the start of a snapshot until the next can begin; a shorter interval would only drop
            snapshots.

    Raises:
        CallerError: an argument is out of range.

    Example:
        >>> compute_interval_steps(0.5, 3600.0, 2.0)
        30
    """
    if not (0 < step_s < math.inf and 0 <= copy_s < math.inf):
        raise CallerError(
            f"snapshot interval: found steps of {step_s} s and a copy of {copy_s} s, expected steps above 0 and a "
            "copy of 0 or more, both finite"
        )
    # max(1, T / step, ceil(copy / step)) steps.
    least_steps = max(1, math.ceil(copy_s / step_s))
    if mean_time_between_failures_s is None:
        return least_steps
    return max(least_steps, round(compute_optimal_interval_s(cost_s, mean_time_between_failures_s) / step_s))
