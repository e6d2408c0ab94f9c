"""Equal tasks on unequal machines with the least makespan: microbatches over replicas, layers over stages.

Machines come by class, so that a hundred thousand equal ones cost as much as one. With release times s_i, task times
p_i and n_i tasks on machine i the makespan is `max_i (s_i + n_i p_i)`. The greedy list schedule, each task to the
machine that would finish it first, minimizes it for equal tasks (Graham 1969, https://doi.org/10.1137/0117039, covers
unequal ones). Most tasks are assigned at once: by the fluid time t with `sum_i max(0, t - s_i) / p_i = tasks` no
schedule has finished more.
"""

import heapq
import math
from collections.abc import Sequence

import msgspec

from resilient_jax.errors import CallerError

UNLIMITED = 1 << 62
"""More tasks than any request has."""


class MachineClass(msgspec.Struct, frozen=True, kw_only=True):
    """Equal machines.

    Attributes:
        start_s: time when a machine begins its first task.
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


def share_tasks(tasks: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return how many of equal tasks each machine takes, so that the last machine is done soonest.

    Args:
        tasks: number of tasks.
        speeds: tasks per unit of time; 0 for a machine that takes none. Equal speeds give numbers that differ by one at
            most, those of the first machines are the greater.

    Raises:
        CallerError: a speed is negative or not finite, or none is positive.

    >>> share_tasks(8, [1.0, 0.0, 3.0])
    (2, 0, 6)
    """
    if not any(speeds) or any(not (speed >= 0 and math.isfinite(speed)) for speed in speeds):
        raise CallerError(
            f"speeds: found {list(speeds)}, expected a positive number for each that works, 0 for others"
        )
    machines = [MachineClass(count=1, start_s=0, task_s=1 / speed) for speed in speeds if speed]
    shares = (counts[0][1] for counts in assign_tasks(tasks, machines).task_counts)
    return tuple(next(shares) if speed else 0 for speed in speeds)


def assign_tasks(tasks: int, machines: Sequence[MachineClass]) -> TaskAssignment:
    """Return the assignment with the least makespan.

    Args:
        tasks: number of tasks; the machines' limits must allow them.

    >>> assign_tasks(256, [MachineClass(count=31, start_s=0, task_s=1)])
    TaskAssignment(makespan_s=9, task_counts=(((8, 9), (23, 8)),))
    """
    if len(machines) == 1:
        return _assign_equal(tasks, machines[0])
    # Each machine surely gets floor((t - s_i) / p_i) - 1 tasks, t the fluid time: the -1 absorbs rounding. The rest, a
    # few tasks per class, goes one class at a time to the machines that finish a further task first.
    early = _find_early(tasks, machines)
    base = [
        min(max(0, math.floor((early - one.start_s) / one.task_s) - 1), one.max_tasks) for one in machines
    ]
    left = tasks - sum(one.count * number for one, number in zip(machines, base, strict=True))
    extra = [0] * len(machines)
    queue = [
        (one.start_s + (base[i] + 1) * one.task_s, i)
        for i, one in enumerate(machines)
        if base[i] < one.max_tasks
    ]
    heapq.heapify(queue)
    while left > 0:
        _, i = queue[0]
        one = machines[i]
        count = min(left, one.count)
        left -= count
        if count < one.count:
            extra[i] = count
        elif (number := base[i] + 1) < one.max_tasks:
            base[i] = number
            heapq.heapreplace(queue, (one.start_s + (number + 1) * one.task_s, i))
        else:
            base[i] = number
            heapq.heappop(queue)
    return _collect(machines, base, extra)


def _find_early(tasks: int, machines: Sequence[MachineClass]) -> float:
    """Return the fluid time: no assignment has finished more than all tasks by then."""
    # t = (tasks + sum_i s_i / p_i) / sum_i 1 / p_i, over the machines with s_i < t: machines join in order of s_i.
    ordered = sorted(machines, key=lambda one: one.start_s)
    rate = offset = 0.0
    time = math.inf
    for one in ordered:
        if one.start_s >= time:
            break
        rate += one.count / one.task_s
        offset += one.count * one.start_s / one.task_s
        time = (tasks + offset) / rate
    return time


def _assign_equal(tasks: int, machines: MachineClass) -> TaskAssignment:
    # n_i = floor(tasks / count), and one more on (tasks mod count) machines: makespan = s + ceil(tasks / count) p.
    low, more = divmod(tasks, machines.count)
    return _collect([machines], [low], [more])


def _collect(machines: Sequence[MachineClass], base: Sequence[int], extra: Sequence[int]) -> TaskAssignment:
    # makespan = max_i (s_i + n_i p_i) over the machines with a task, in s.
    makespan_s = 0.0
    counts = []
    for one, low, more in zip(machines, base, extra, strict=True):
        groups = ((more, low + 1), (one.count - more, low))
        counts.append(tuple(group for group in groups if group[0]))
        if most := low + (more > 0):
            makespan_s = max(makespan_s, one.start_s + most * one.task_s)
    return TaskAssignment(makespan_s=makespan_s, task_counts=tuple(counts))
