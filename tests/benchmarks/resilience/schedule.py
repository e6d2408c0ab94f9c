"""Failure schedule of the resilience benchmark: how many failures, in which step, of which host. Pure.

A schedule depends only on a seed and the sizes, so all systems get the same one. It counts steps, not seconds: a
system that takes longer for the same steps does not have more failures, and a step that is done again does not fail
again. Both favor systems that do steps again.
"""

import random
from collections.abc import Sequence
from typing import Final

import msgspec

from resilient_jax.errors import CallerError

WARM_STEPS: Final = 3
"""The first steps of a run compile; until they are committed nothing is counted, and nothing fails."""
QUIET_STEPS: Final = 2
"""Steps without failures at the end of a run, so that the cost of each failure falls into the run."""


class ScheduledKill(msgspec.Struct, frozen=True, kw_only=True):
    """SIGKILL of one worker.

    Attributes:
        step: in which the worker is killed, counted from 0.
        host: of the worker.
    """

    step: int
    host: str


class RunSize(msgspec.Struct, frozen=True, kw_only=True):
    """Length of a run that represents one failure in `failure_every` steps.

    Attributes:
        failure_every: the rate.
        failures: in the run.
        measured: steps that are run after the warm-up.
        padded: steps that are not run, but added at the system's pace without failures.
    """

    failure_every: int
    failures: int
    measured: int
    padded: int

    @property
    def total(self) -> int:
        """Steps of the job, warm-up included."""
        return WARM_STEPS + self.measured


def size_run(failure_every: int, *, max_steps: int, max_failures: int) -> RunSize:
    """Return a run with as many failures as fit, at most `max_failures`; for rare failures one, and padding.

    Raises:
        CallerError: an argument is too small for a run that has a failure and steps after it.

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
    """Draw one failure for each of `size.failures` equal blocks: a random step inside the block, a random host.

    Blocks instead of a Poisson process make the rate exact, even in a short run.
    """
    source = random.Random(seed)
    block = size.measured // size.failures
    faults: list[ScheduledKill] = []
    for number in range(size.failures):
        # Not in a block's first step or its last ones, so that the run's first step and its end are quiet.
        offset = 1 + int(source.random() * (block - 1 - QUIET_STEPS))
        host = hosts[int(source.random() * len(hosts))]
        faults.append(ScheduledKill(step=WARM_STEPS + number * block + offset, host=host))
    return tuple(faults)
