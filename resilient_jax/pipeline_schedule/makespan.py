"""Tasks on unequal machines with the least makespan: microbatches over replicas, layers over stages.

Machines come by class, so that a hundred thousand equal ones cost as much as one. With release times s_i, task times
p_i and n_i tasks on machine i the makespan is `max_i (s_i + n_i p_i)`. The greedy list schedule, each task to the
machine that would finish it first, minimizes it for equal tasks (Graham 1969, https://doi.org/10.1137/0117039, covers
unequal ones). Most tasks are assigned at once: by the fluid time t with `sum_i max(0, t - s_i) / p_i = tasks` no
schedule has finished more.

Teams whose tasks have other sizes, such as microbatches of more sequences, take whole numbers of them that add up: see
`divide_work`.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from resilient_jax.errors import CallerError

UNLIMITED = 1 << 62
"""More tasks than any request has."""
HALVINGS: Final = 30
"""Halvings of the interval of the makespan: to a billionth."""


class MachineClass(msgspec.Struct, frozen=True, kw_only=True):
    """Equal machines.

    Attributes:
        start_s: time when a machine begins its first task.
    """

    count: int
    start_s: float
    task_s: float
    max_tasks: int = UNLIMITED


class MachineTeam(msgspec.Struct, frozen=True, kw_only=True):
    """Machines whose tasks have one size.

    Attributes:
        task_size: units of work, such as sequences, in each task.
    """

    task_size: int
    machines: tuple[MachineClass, ...]

    @property
    def speed(self) -> float:
        """Units of work per second in the long run."""
        return self.task_size * sum(one.count / one.task_s for one in self.machines)

    def count_tasks(self, until_s: float) -> int:
        """Return how many tasks the team has done by a time."""
        return sum(
            one.count * max(0, math.floor((until_s - one.start_s) / one.task_s + 1e-9))
            for one in self.machines
        )


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


def estimate_finish_s(tasks: int, shared_by: Sequence[float], speeds: Sequence[float]) -> float:
    """Return when the last machine is done, if tasks are shared by some speeds and machines have others.

    >>> estimate_finish_s(8, [1.0, 1.0], [1.0, 4.0])
    4.0
    """
    return max(share / speed for share, speed in zip(share_tasks(tasks, shared_by), speeds, strict=True))


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


def divide_work(work: int, teams: Sequence[MachineTeam], limit_s: float = math.inf) -> tuple[int, ...] | None:
    """Return the tasks of each team that add up to all work, so that the last team is done soonest.

    None if no numbers add up, or none by the limit.

    >>> divide_work(9, [MachineTeam(task_size=2, machines=(MachineClass(count=1, start_s=0, task_s=1),)),
    ...                 MachineTeam(task_size=1, machines=(MachineClass(count=1, start_s=0, task_s=1),))])
    (3, 3)
    """
    sizes = {team.task_size for team in teams}
    if len(sizes) > 1:
        return _divide_sizes(work, teams, limit_s)
    tasks, rest = divmod(work, sizes.pop())
    assigned = assign_tasks(tasks, [one for team in teams for one in team.machines])
    if rest or assigned.makespan_s > limit_s:
        return None
    counts = iter(sum(machines * number for machines, number in one) for one in assigned.task_counts)
    return tuple(sum(next(counts) for _ in team.machines) for team in teams)


def _divide_sizes(work: int, teams: Sequence[MachineTeam], limit_s: float) -> tuple[int, ...] | None:
    # Bisection over the makespan: by a time t team i can have done 0 to c_i(t) tasks of m_i units, and t is enough if
    # numbers n_i <= c_i(t) have sum_i n_i m_i = work. That is a bounded subset sum, kept as the bits of one integer:
    # bit k says that k units can be made up.
    if not _reach(work, teams, limit_s)[-1] >> work & 1:
        return None
    low = work / sum(team.speed for team in teams)
    high = 2 * low + max(one.start_s + one.task_s for team in teams for one in team.machines)
    while not _reach(work, teams, high)[-1] >> work & 1:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_enough = _reach(work, teams, middle)[-1] >> work & 1
        low, high = (low, middle) if is_enough else (middle, high)
    return tuple(_trace(work, teams, high))


def _reach(work: int, teams: Sequence[MachineTeam], until_s: float) -> list[int]:
    """Return the units of work that the first 0, 1, ... teams can make up by a time, as bits."""
    within = (1 << work + 1) - 1
    found = [1]
    for team in teams:
        most = work // team.task_size
        left = min(team.count_tasks(until_s), most) if until_s < math.inf else most
        bits, step = found[-1], 1
        # 0 to c tasks are any choice of 1, 2, 4, ... of them and a rest.
        while left > 0:
            taken = min(step, left)
            bits |= bits << taken * team.task_size & within
            left, step = left - taken, step * 2
        found.append(bits)
    return found


def _trace(work: int, teams: Sequence[MachineTeam], until_s: float) -> Iterator[int]:
    """Yield a number for each team: of those that work, the last team's nearest to its share of speed."""
    found = _reach(work, teams, until_s)
    left, numbers = work, []
    for index in range(len(teams) - 1, -1, -1):
        team = teams[index]
        speed = sum(other.speed for other in teams[: index + 1])
        wanted = left * team.speed / speed / team.task_size
        most = min(team.count_tasks(until_s), left // team.task_size)
        allowed = [n for n in range(most + 1) if found[index] >> left - n * team.task_size & 1]
        numbers.append(min(allowed, key=lambda n: abs(n - wanted)))
        left -= numbers[-1] * team.task_size
    yield from reversed(numbers)
