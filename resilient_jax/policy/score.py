"""What an option is worth until the next failure, and when that is expected. Pure, without numpy: agents use it, too.

Chameleon's score (arXiv 2508.21613): with batch B, step time t, transition time T and time D to the next failure,
`score = (B / t) (D - T) / D`, the samples per second until then. A job's leader knows neither B nor t: it scores with
the speed as a part of that of all hosts, which leaves the order of the options as it is.

The time to the next failure is the posterior mean of a Gamma-Poisson model. A host's prior rate is that of a published
cluster, and weighs as much as `PRIOR_EXPOSURE_S` of the job's own time, because the rates of clusters differ by more
than a factor of ten: after some hours a job is judged by its own failures.
"""

import dataclasses
from typing import Final

HOUR_S: Final = 3600.0
DEVICE_HOURS_PER_FAILURE: Final = 50_700.0
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)."""
DEVICES_PER_HOST: Final = 8
"""Of that cluster."""
PRIOR_EXPOSURE_S: Final = HOUR_S
"""The job's own time that the prior weighs as much as."""
PRIOR_FAILURES_PER_HOST: Final = DEVICES_PER_HOST / (DEVICE_HOURS_PER_FAILURE * HOUR_S) * PRIOR_EXPOSURE_S
"""Of a host in that time, by the rate of that cluster."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of what follows a choice, in order: a pause, and then training at one speed.

    Attributes:
        pause_s: time without steps.
        speed: as a part of the speed of all hosts, from the end of the pause on.
        training_s: time at that speed; None: until the next failure.
    """

    pause_s: float
    speed: float
    training_s: float | None = None


def score_phases(phases: tuple[Phase, ...], next_failure_s: float) -> float:
    """Return Chameleon's score of phases that follow each other: the mean speed until the next failure.

    >>> score_phases((Phase(pause_s=10, speed=1.0),), 20)
    0.5
    >>> score_phases((Phase(pause_s=0, speed=0.5, training_s=10), Phase(pause_s=0, speed=1.0)), 20)
    0.75
    """
    # sum of v_i min(t_i, what is left of D after all before) / D
    left_s, trained = next_failure_s, 0.0
    for phase in phases:
        left_s -= phase.pause_s
        trains_s = left_s if phase.training_s is None else min(left_s, phase.training_s)
        if left_s <= 0:
            break
        trained += phase.speed * trains_s
        left_s -= trains_s
    return trained / next_failure_s


def describe_s(seconds: float) -> str:
    """Return a time for people.

    >>> describe_s(0.25), describe_s(90), describe_s(5400), describe_s(1e6)
    ('0.25 s', '90 s', '1.5 h', '278 h')
    """
    if seconds >= HOUR_S:
        hours = seconds / HOUR_S
        return f"{hours:.0f} h" if hours >= 100 else f"{hours:.3g} h"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2f} s"
