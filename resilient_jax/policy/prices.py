"""What the options of a job cost, by its own measurements; before it has any, by the priors here."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from resilient_jax.ids import HostName
from resilient_jax.policy.failure_forecast import estimate_rate
from resilient_jax.protocol.recovery_records import JobHistory, TimedChange

PRIOR_S: Final[Mapping[TimedChange, float]] = {
    TimedChange.SHRINK: 0.2,
    TimedChange.KEEP_STAGES: 0.2,
    TimedChange.NEW_AXES: 0.6,
    TimedChange.GROW: 0.6,
    TimedChange.REFORM: 3.0,
    TimedChange.REFORM_COLD: 8.0,
    TimedChange.RESTORE: 3.0,
    TimedChange.RETURN: 5.0,
    TimedChange.REDIVIDE: 0.6,
}
"""Seconds until a job has measured its own: docs/benchmarks.md, the stalls of a small model on 4 hosts of one machine.
A large model and a GPU need more; the first change of each kind corrects that."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the options of a job cost.

    Attributes:
        seconds: seconds by change: the job's own measurement, or the prior.
        joiner_losses: how often hosts that join now are expected to be lost, or to leave, until the next failure.
    """

    seconds: Mapping[TimedChange, float]
    next_failure_s: float
    joiner_losses: float = 0.0


def price_job(history: JobHistory, hosts: Collection[HostName], joining: Collection[HostName] = ()) -> Prices:
    """Return the prices for a job, from its history.

    Args:
        hosts: hosts that train from the change on, those that join included.
    """
    measured = {time.change: time.typical_s for time in history.times}
    next_failure_s = 1 / estimate_rate(history, hosts)
    return Prices(
        seconds={change: measured.get(change, prior_s) for change, prior_s in PRIOR_S.items()},
        next_failure_s=next_failure_s,
        joiner_losses=next_failure_s * estimate_rate(history, joining, with_notices=True) if joining else 0.0,
    )
