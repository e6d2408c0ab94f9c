"""Equal pieces dealt to unequal takers so that the last is done soonest: microbatches to replicas, layers to stages.

The same arithmetic as of a step's units (`step.quotas`), for takers by the class: a hundred thousand alike
cost as much as one.
"""

import heapq
import math
from collections.abc import Sequence

import msgspec

UNLIMITED = 1 << 62


class MachineClass(msgspec.Struct, frozen=True, kw_only=True):
    """Takers that are alike.

    Attributes:
        count: how many.
        start_s: when one begins its first piece.
        piece_s: what a piece takes one.
        most: pieces that one has room for.
    """

    count: int
    start_s: float
    task_s: float
    max_tasks: int = UNLIMITED


class TaskAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes how many.

    Attributes:
        makespan_s: when the last of those that took any is done; of no pieces 0.
        shares: for each class (takers, pieces of each), those with more first; together all takers.
    """

    makespan_s: float
    task_counts: tuple[tuple[tuple[int, int], ...], ...]


def assign_tasks(pieces: int, takers: Sequence[MachineClass]) -> TaskAssignment:
    """Gives the division of which the last taker is done soonest.

    Exact: pieces go, one after another, to whoever has room and would have it done first, which is optimal for equal
    pieces. Most are dealt at once: all that would be done before a time that is surely too early.

    Args:
        pieces: in all; there must be room for them.
        takers: by the class.

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
    """A time by which no more than all pieces can be done: when fluid would be, for those that it reaches."""
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
