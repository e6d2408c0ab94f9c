"""The schedule of failures of the resilience benchmark: how many, in which step, of which host. Pure.

A schedule is a function of a seed and the sizes alone, so every system meets the same one. It counts in steps of
training, not in seconds: a system that takes longer for the same steps is not hit more often for it, and steps that are
done again are not hit again. Both are in favour of systems that do steps again.
"""

import random
from collections.abc import Sequence
from typing import Final

import msgspec

from resilient_jax.errors import CallerError

WARM_STEPS: Final = 3
"""The first steps of a run compile and settle; nothing is counted before they are committed, and nothing fails."""
QUIET_STEPS: Final = 2
"""At the end of a run: so that a failure's cost falls into the run."""


class ScheduledKill(msgspec.Struct, frozen=True, kw_only=True):
    """SIGKILL of one worker.

    Attributes:
        step: that it dies in, counted from 0.
        host: whose worker it is.
    """

    step: int
    host: str


class RunSize(msgspec.Struct, frozen=True, kw_only=True):
    """How long a run is that stands for one failure in so many steps.

    Attributes:
        failure_every: steps, the rate.
        failures: in the run.
        measured: steps that are run after the warm ones.
        padded: steps that are not run, but added at the system's pace without failures.
    """

    failure_every: int
    failures: int
    measured: int
    padded: int

    @property
    def total(self) -> int:
        """Steps that the job is asked for."""
        return WARM_STEPS + self.measured


def size_run(failure_every: int, *, max_steps: int, max_failures: int) -> RunSize:
    """As many failures as fit in `max_steps`, at most `max_failures`; for rare failures one, and padding.

    Raises:
        CallerError: a number is too small for a run that has a failure and steps after it.

    Example:
        >>> size_run(20, max_steps=50, max_failures=8)
        RunSize(failure_every=20, failures=2, measured=40, padded=0)
        >>> size_run(500, max_steps=50, max_failures=8)
        RunSize(failure_every=500, failures=1, measured=50, padded=450)
    """
    least = QUIET_STEPS + 2
    if failure_every < least or max_steps < least or max_failures < 1:
        raise CallerError(
            f"resilience: found one failure in {failure_every} steps, at most {max_steps} steps and "
            f"{max_failures} failures; expected at least {least} steps, {least} steps and 1 failure"
        )
    failures = max(1, min(max_failures, max_steps // failure_every))
    measured = min(failures * failure_every, max_steps)
    return RunSize(
        failure_every=failure_every,
        failures=failures,
        measured=measured,
        padded=failures * failure_every - measured,
    )


def draw_faults(seed: int, size: RunSize, hosts: Sequence[str]) -> tuple[ScheduledKill, ...]:
    """One failure in each of as many equal blocks of steps, anywhere in its block, of any host.

    Blocks and not a Poisson process: the rate of a short run is then exactly what its name says.
    """
    source = random.Random(seed)
    block = size.measured // size.failures
    faults: list[ScheduledKill] = []
    for number in range(size.failures):
        # Not in a block's first step, nor in its last ones: then the run's first step and its end are quiet.
        offset = 1 + int(source.random() * (block - 1 - QUIET_STEPS))
        host = hosts[int(source.random() * len(hosts))]
        faults.append(ScheduledKill(step=WARM_STEPS + number * block + offset, host=host))
    return tuple(faults)
