"""How a step is divided among the replicas and in which order hosts run its tasks, by what tasks take. Pure.

A step is priced as the longest path of its own schedule. Another division is taken only where the step is then done a
tenth sooner, and 10 ms, by what was measured twice in a row: so noise changes nothing. Every host computes the same,
from the same numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from resilient_jax.health.monitor import MIN_EXCESS_S
from resilient_jax.health.step_prediction import StepPath
from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.makespan import MachineClass, assign_tasks
from resilient_jax.pipeline_schedule.routes import Team, list_stages, make_routes
from resilient_jax.pipeline_schedule.task_orders import BlockSeconds, order_tasks, take_equal_time
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule, TaskKind
from resilient_jax.step.host_speeds import MIN_GAIN

TaskSeconds = Mapping[HostName, Mapping[TaskKind, float]]
"""Of each host and kind of task the seconds of one microbatch, over all its blocks."""
SAME_WITHIN: Final = 1.05
"""Times that differ less from those that were last looked at are not looked at again: making orders takes a while."""


class StepDivision(msgspec.Struct, frozen=True):
    """How a step is divided.

    Attributes:
        quotas: how many microbatches each replica computes.
        seconds: time of a block's task on a host, by which tasks are put in order.
    """

    quotas: tuple[int, ...]
    seconds: BlockSeconds = take_equal_time


class DivisionChange(msgspec.Struct, frozen=True):
    """Another division, and why.

    Attributes:
        division: the new one.
        before_s: what a step takes as it was divided, by what tasks take now.
        after_s: what it takes with the new division.
    """

    division: StepDivision
    before_s: float
    after_s: float


class DivisionChooser:
    """Chooses the division of the steps of one generation.

    Attributes:
        present: the division of the next step.
    """

    def __init__(self, teams: Sequence[Team], quotas: Sequence[int], schedule: PipelineSchedule) -> None:
        """Begin with these quotas, and with tasks of equal time: a host that joins knows no measured ones.

        Args:
            teams: the replicas.
            quotas: microbatches of each replica.
        """
        self.present = StepDivision(tuple(quotas))
        self._teams = [tuple(team) for team in teams]
        self._schedule = schedule
        self._seen: TaskSeconds = {}
        """What was measured when a division was last looked for."""
        self._is_wanted = False
        """By these, another division would have paid."""

    def choose(self, measured: TaskSeconds) -> DivisionChange | None:
        """Return another division, which becomes the present one, if that pays; else None.

        It must pay by what was measured now and by what was measured the time before.

        Args:
            measured: times of every host of the replicas; nothing follows while those of one host are not known.
        """
        hosts = {host for team in self._teams for host, _ in team}
        if any(not measured.get(host) for host in hosts):
            return None
        if _are_alike(self._seen, measured) and not self._is_wanted:
            return None
        before, was_wanted = self._seen, self._is_wanted
        change = self._find_change(measured)
        self._seen, self._is_wanted = measured, change is not None
        if change is None or not was_wanted:
            return None
        if not _pays(self._price(self.present, before), self._price(change.division, before)):
            return None
        self.present, self._is_wanted = change.division, False
        return change

    def _find_change(self, measured: TaskSeconds) -> DivisionChange | None:
        """Return the division that pays by what was measured once, if any does."""
        present, seconds = self.present, spread_over_blocks(self._teams, measured)
        before_s = found_s = self._price(present, measured)
        found: StepDivision | None = None
        # The smaller change first: microbatches that stay where they are have been read ahead.
        for quotas in dict.fromkeys((present.quotas, divide_by_speed(self._teams, present.quotas, measured))):
            division = StepDivision(quotas, seconds)
            step_s = self._price(division, measured)
            if _pays(found_s, step_s):
                found, found_s = division, step_s
        return None if found is None else DivisionChange(found, before_s, found_s)

    def _price(self, division: StepDivision, measured: TaskSeconds) -> float:
        return price_division(self._teams, division, measured, self._schedule)


def price_division(
    teams: Sequence[Team], division: StepDivision, measured: TaskSeconds, schedule: PipelineSchedule
) -> float:
    """Return the seconds of a step that is divided in this way, if tasks take what was measured.

    Replicas compute independently, and those with equal stages, tasks and microbatches take equally long.
    """
    different: dict[object, tuple[Team, int]] = {}
    for team, quota in zip(teams, division.quotas, strict=True):
        if quota:
            different[_describe_replica(team, quota, division.seconds, measured)] = team, quota
    return max(
        (_price_replica(team, quota, division, measured, schedule) for team, quota in different.values()),
        default=0.0,
    )


def _describe_replica(team: Team, quota: int, seconds: BlockSeconds, measured: TaskSeconds) -> object:
    """Return what the time of a replica follows from."""
    return quota, tuple(
        (
            len(blocks),
            tuple(
                (kind, took_s, *(seconds(host, kind, block) for block in blocks))
                for kind, took_s in sorted(measured[host].items())
            ),
        )
        for host, blocks in list_stages([team])
    )


def _price_replica(
    team: Team, quota: int, division: StepDivision, measured: TaskSeconds, schedule: PipelineSchedule
) -> float:
    routes = make_routes([team], [quota])
    orders = order_tasks(routes, division.seconds, schedule=schedule).orders
    return StepPath(orders, routes).predict_s(lambda task: measured[task.hop.host][task.kind])


def spread_over_blocks(teams: Sequence[Team], measured: TaskSeconds) -> BlockSeconds:
    """Return the seconds of a block's task: a host's time in equal parts, as only their sum was measured.

    >>> find = spread_over_blocks([[("a", 2), ("b", 4)]], {"a": {TaskKind.FORWARD: 1.0}, "b": {TaskKind.FORWARD: 2.0}})
    >>> find("a", TaskKind.FORWARD, 0), find("b", TaskKind.FORWARD, 3)
    (0.5, 0.5)
    """
    counts = {host: count for team in teams for host, count in team}

    def find(host: HostName, kind: TaskKind, _block: int) -> float:
        return measured[host][kind] / counts[host]

    return find


def divide_by_speed(teams: Sequence[Team], quotas: Sequence[int], measured: TaskSeconds) -> tuple[int, ...]:
    """Return the microbatches of each replica with which the last one is done soonest; each has one at least.

    A replica is as fast as its slowest host, from when its pipeline is full. One without microbatches would never be
    measured again.

    Args:
        teams: the replicas.
        quotas: microbatches that each replica has now; they add up to the step's.
        measured: times of every host of the replicas.
    """
    if sum(quotas) <= len(teams):
        return tuple(quotas)
    replicas = []
    for team in teams:
        busy_s = [sum(measured[host].values()) for host, _ in team]
        first_s = sum(busy_s)  # its first microbatch goes through all hosts
        replicas.append(MachineClass(count=1, start_s=first_s, task_s=max(busy_s)))
    assigned = assign_tasks(sum(quotas) - len(teams), replicas)
    return tuple(1 + counts[0][1] for counts in assigned.task_counts)


def _pays(before_s: float, after_s: float) -> bool:
    """Return whether it is worth a change that a step takes so long no longer, but only so long."""
    return before_s > MIN_GAIN * after_s and before_s - after_s >= MIN_EXCESS_S


def _are_alike(one: TaskSeconds, other: TaskSeconds) -> bool:
    """Return whether no time differs by more than `SAME_WITHIN`."""
    return one.keys() == other.keys() and all(
        one[host].keys() == other[host].keys()
        and all(
            1 / SAME_WITHIN <= seconds / max(one[host][kind], 1e-12) <= SAME_WITHIN
            for kind, seconds in other[host].items()
        )
        for host in other
    )
