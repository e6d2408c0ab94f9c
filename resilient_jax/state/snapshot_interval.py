"""How many steps lie between two snapshots: often enough that failures cost little, seldom enough to cost little.

Young's first-order optimum (J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006, equation 9): with a cost C
for each snapshot and a mean time M between failures, T = sqrt(2 C M) minimises C / T + T / (2 M), the share of time
that goes into snapshots and into work that is done again.
"""

import math

from resilient_jax.errors import CallerError


def compute_optimal_interval_s(cost_s: float, failure_interval_s: float) -> float:
    """sqrt(2 C M), at most M: the formula assumes that C is far below M, and a job should have a snapshot a failure.

    Args:
        cost_s: C, by how much longer training takes for one snapshot.
        mean_time_between_failures_s: M, of the whole job: that of one host divided by the number of hosts.

    Raises:
        CallerError: a number is negative, infinite or no number, or M is 0.

    Example:
        >>> compute_optimal_interval_s(0.5, 3600.0)
        60.0
    """
    if not (0 <= cost_s < math.inf and 0 < failure_interval_s < math.inf):
        raise CallerError(
            f"snapshot interval: found a cost of {cost_s} s and a failure every {mean_time_between_failures_s} s, expected a "
            "cost of 0 or more and a time between failures above 0, both finite"
        )
    return min(math.sqrt(2 * cost_s * failure_interval_s), failure_interval_s)


def compute_interval_steps(
    cost_s: float, failure_interval_s: float, step_s: float, *, copy_s: float = 0.0
) -> int:
    """Every how many steps a snapshot is taken, at least one.

    Args:
        cost_s: by how much longer training takes for one snapshot.
        mean_time_between_failures_s: the job's mean time between failures.
        step_s: of one step.
        copy_s: from a snapshot's start until the next can begin: a shorter interval would only drop snapshots.

    Raises:
        CallerError: a number is out of range; names it.

    Example:
        >>> compute_interval_steps(0.5, 3600.0, 2.0)
        30
    """
    if not (0 < step_s < math.inf and 0 <= copy_s < math.inf):
        raise CallerError(
            f"snapshot interval: found steps of {step_s} s and a copy of {copy_s} s, expected steps above 0 and a "
            "copy of 0 or more, both finite"
        )
    best = round(compute_optimal_interval_s(cost_s, failure_interval_s) / step_s)
    return max(1, best, math.ceil(copy_s / step_s))
