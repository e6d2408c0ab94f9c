"""Hosts that are expected back, in groups, and how a job trains while one group after the other joins. Pure."""

import dataclasses
from collections.abc import Sequence
from typing import Final

from resilient_jax.planning.recovery_score import Phase

PATIENCE: Final = 1.5
"""A wait lasts so many times the expected time of what is waited for, at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReturnGroup:
    """Hosts that are expected back about the same time: when the last of them is, and how many are until then."""

    return_s: float
    count: int


def group_returns(awaited: Sequence[float]) -> list[ReturnGroup]:
    """Return the groups of hosts that would be waited for together: as long as for the first of them, at most.

    >>> [(group.return_s, group.count) for group in group_returns((4.0, 5.0, 60.0))]
    [(5.0, 2), (60.0, 3)]
    """
    groups: list[ReturnGroup] = []
    first_s = 0.0
    for count, return_s in enumerate(awaited, 1):
        if groups and return_s <= PATIENCE * first_s:
            groups[-1] = ReturnGroup(return_s, count)
        else:
            first_s = return_s
            groups.append(ReturnGroup(return_s, count))
    return groups


def list_phases(
    first: Phase, ready: int, later: Sequence[ReturnGroup], *, join_s: float, places: int
) -> tuple[Phase, ...]:
    """Return what follows a choice: other hosts join as they come back, each group with a pause.

    Args:
        first: the pause, and the speed after it.
        ready: the hosts that train then; those that come back are counted from here.
        later: the hosts that come back, from the moment of the choice.
        join_s: the pause of each join.
        places: of the job.
    """
    phases, now_s = [first], first.pause_s + (first.training_s or 0.0)
    for group in later:
        hosts = min(ready + group.count, places)
        waits_s = max(group.return_s - now_s, 0.0)
        phases[-1] = dataclasses.replace(phases[-1], training_s=waits_s + (phases[-1].training_s or 0.0))
        phases.append(Phase(pause_s=join_s, speed=hosts / places))
        now_s += waits_s + join_s
    return tuple(phases)
