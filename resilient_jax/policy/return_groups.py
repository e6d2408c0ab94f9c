"""Hosts that are expected back, in groups, and how a job trains while one group after the other joins. Pure."""

import dataclasses
from collections.abc import Sequence
from typing import Final, NamedTuple

from resilient_jax.ids import HostName
from resilient_jax.policy.score import Phase

PATIENCE: Final = 1.5
"""A wait lasts so many times the expected time of what is waited for, at most."""


class ExpectedReturn(NamedTuple):
    """When a host is expected back, and which share of a host's devices it has then."""

    return_s: float
    share: float = 1.0
    host: HostName = HostName("")


class ReturnGroup(NamedTuple):
    """Hosts that are expected back about the same time.

    Attributes:
        return_s: time until the last host of the group is back.
        num_hosts: hosts that are back by then, earlier groups included.
        hosts: the same hosts counted by their devices: a host with half of them is half a host.
    """

    return_s: float
    num_hosts: int
    hosts: float


def group_returns(awaited: Sequence[ExpectedReturn]) -> list[ReturnGroup]:
    """Return the groups of hosts that would be waited for together: as long as for the first of them, at most.

    >>> awaited = [ExpectedReturn(4.0), ExpectedReturn(5.0, share=0.5), ExpectedReturn(60.0)]
    >>> [tuple(group) for group in group_returns(awaited)]
    [(5.0, 2, 1.5), (60.0, 3, 2.5)]
    """
    groups: list[ReturnGroup] = []
    first_s, hosts = 0.0, 0.0
    for count, (return_s, share, _) in enumerate(awaited, 1):
        hosts += share
        if groups and return_s <= PATIENCE * first_s:
            groups[-1] = ReturnGroup(return_s, count, hosts)
        else:
            first_s = return_s
            groups.append(ReturnGroup(return_s, count, hosts))
    return groups


def list_phases(
    first: Phase, ready: float, later: Sequence[ReturnGroup], *, join_s: float, places: float
) -> tuple[Phase, ...]:
    """Return what follows a choice: other hosts join as they come back, each group with a pause.

    Args:
        first: the pause, and the speed after it.
        ready: hosts that train after the choice, by their devices; those that come back are counted from here.
        later: groups of hosts that come back, timed from the moment of the choice.
    """
    phases, now_s = [first], first.pause_s + (first.training_s or 0.0)
    for group in later:
        hosts = min(ready + group.hosts, places)
        waits_s = max(group.return_s - now_s, 0.0)
        phases[-1] = dataclasses.replace(phases[-1], training_s=waits_s + (phases[-1].training_s or 0.0))
        phases.append(Phase(pause_s=join_s, speed=hosts / places))
        now_s += waits_s + join_s
    return tuple(phases)
