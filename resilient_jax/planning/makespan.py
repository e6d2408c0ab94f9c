"""Equal tasks on unequal machines with the least makespan: microbatches over replicas, layers over stages.

`step.quotas` assigns a step's units by the same rule; here machines come by class, so that a hundred thousand equal
machines cost as much as one. With release times s_i, task times p_i and n_i tasks on machine i the makespan is
`max_i (s_i + n_i p_i)`. The greedy list schedule, each task to the machine that would finish it first, minimizes it for
equal tasks (Graham 1969, https://doi.org/10.1137/0117039, covers unequal ones). Most tasks are assigned at once: by the
fluid time t with `sum_i max(0, t - s_i) / p_i = tasks` no schedule has finished more.
"""

import heapq
import math
from collections.abc import Sequence

import msgspec

UNLIMITED = 1 << 62
"""More tasks than any request has."""


class MachineClass(msgspec.Struct, frozen=True, kw_only=True):
    """Equal machines.

    Attributes:
        count: number of machines.
        start_s: time when a machine begins its first task.
        task_s: time of a task.
        max_tasks: the most tasks of a machine.
    """

    count: int
    start_s: float
    task_s: float
    max_tasks: int = UNLIMITED


class TaskAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks each machine gets.

    Attributes:
        makespan_s: when the last machine that got a task is done; 0 without tasks.
        task_counts: for each class (machines, tasks of each), those with more first; together all machines.
    """

    makespan_s: float
    task_counts: tuple[tuple[tuple[int, int], ...], ...]


def assign_tasks(pieces: int, takers: Sequence[MachineClass]) -> TaskAssignment:
    """Return the assignment with the least makespan.

    Args:
        tasks: number of tasks; the machines' limits must allow them.
        machines: the classes of machines.

    >>> assign_tasks(256, [MachineClass(count=31, start_s=0, task_s=1)])
    TaskAssignment(makespan_s=9, task_counts=(((8, 9), (23, 8)),))
    """
    if len(takers) == 1:
        return _deal_alike(pieces, takers[0])
    early = _find_early(pieces, takers)
    each = [
        min(max(0, math.floor((early - kind.start_s) / kind.task_s) - 1), kind.max_tasks) for kind in takers
    ]
    left = pieces - sum(kind.count * number for kind, number in zip(takers, each, strict=True))
    extra = [0] * len(takers)
    queue = [
        (kind.start_s + (each[i] + 1) * kind.task_s, i)
        for i, kind in enumerate(takers)
        if each[i] < kind.max_tasks
    ]
    heapq.heapify(queue)
    while left > 0:
        _, i = queue[0]
        kind = takers[i]
        taken = min(left, kind.count)
        left -= taken
        if taken < kind.count:
            extra[i] = taken
        elif (number := each[i] + 1) < kind.max_tasks:
            each[i] = number
            heapq.heapreplace(queue, (kind.start_s + (number + 1) * kind.task_s, i))
        else:
            each[i] = number
            heapq.heappop(queue)
    return _sum_up(takers, each, extra)


def _find_early(pieces: int, takers: Sequence[MachineClass]) -> float:
    """Return the fluid time: no assignment has finished more than all tasks by then."""
    ordered = sorted(takers, key=lambda kind: kind.start_s)
    rate = offset = 0.0
    time = math.inf
    for kind in ordered:
        if kind.start_s >= time:
            break
        rate += kind.count / kind.task_s
        offset += kind.count * kind.start_s / kind.task_s
        time = (pieces + offset) / rate
    return time


def _deal_alike(pieces: int, takers: MachineClass) -> TaskAssignment:
    low, more = divmod(pieces, takers.count)
    return _sum_up([takers], [low], [more])


def _sum_up(takers: Sequence[MachineClass], each: Sequence[int], extra: Sequence[int]) -> TaskAssignment:
    finish = 0.0
    shares = []
    for kind, low, more in zip(takers, each, extra, strict=True):
        groups = ((more, low + 1), (kind.count - more, low))
        shares.append(tuple(group for group in groups if group[0]))
        if most := low + (more > 0):
            finish = max(finish, kind.start_s + most * kind.task_s)
    return TaskAssignment(makespan_s=finish, task_counts=tuple(shares))
