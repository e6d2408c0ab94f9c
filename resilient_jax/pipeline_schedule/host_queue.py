"""The tasks of one host that have or will have what they need, and which of them is next."""

import collections
import heapq
from typing import Final

from resilient_jax.pipeline_schedule.tasks import PipelineSchedule, Task, TaskKind

_F, _B, _W = TaskKind.FORWARD, TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT
PRIORITIES: Final = {
    PipelineSchedule.WHOLE_BACKWARD: (TaskKind.BACKWARD, _F),
    PipelineSchedule.GRADIENT_FIRST: (_W, _B, _F),
    PipelineSchedule.ZERO_BUBBLE: (_B, _F, _W),
}
"""Which of several ready tasks a host runs first: what another host waits for; W at once where it is not put off."""
PRIORITIES_AFTER_BACKWARD: Final = {
    PipelineSchedule.WHOLE_BACKWARD: (_F, TaskKind.BACKWARD),
    PipelineSchedule.GRADIENT_FIRST: (_W, _F, _B),
    PipelineSchedule.ZERO_BUBBLE: (_F, _B, _W),
}
"""The same if the last of F and B was a B: one forward, one backward, or the hops after it run out of microbatches."""

Depth = tuple[int, int]
"""Of a hop: the number of hops from it to the loss, itself included, and the number of hops of its route."""


class HostQueue:
    """A host in a simulation: tasks by the time when they are ready, and microbatches in memory.

    Attributes:
        free_s: end of the task that runs.
        peak_in_flight: the most hops at a time whose forward pass was begun and whose last task was not done.
    """

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.free_s = 0.0
        self.peak_in_flight = 0
        self._schedule = schedule
        self._was_backward = False
        self._coming: list[tuple[float, int, int, Depth, Task]] = []
        # Ready tasks by kind and, because the bound depends on it, by depth: (turn, microbatch, task).
        self._ready: dict[TaskKind, dict[Depth, list[tuple[int, int, Task]]]] = {
            kind: {} for kind in PRIORITIES[schedule]
        }
        self._before_backward: collections.Counter[int] = (
            collections.Counter()
        )  # hops between F and B, by depth
        self._before_weights = 0

    def add(self, task: Task, depth: Depth, turn: int, ready_s: float) -> None:
        """Add a task that has what it needs from a time on; of equals, the lowest turn and microbatch is first."""
        heapq.heappush(self._coming, (ready_s, turn, task.microbatch, depth, task))

    def take(self, now_s: float) -> Task | None:
        """Remove and return the next of the tasks that are ready; None if none is, or memory allows none."""
        while self._coming and self._coming[0][0] <= now_s:
            _, turn, microbatch, depth, task = heapq.heappop(self._coming)
            heapq.heappush(self._ready[task.kind].setdefault(depth, []), (turn, microbatch, task))
        priorities = PRIORITIES_AFTER_BACKWARD if self._was_backward else PRIORITIES
        for kind in priorities[self._schedule]:
            allowed = [
                (tasks[0][:2], depth)
                for depth, tasks in self._ready[kind].items()
                if tasks and (kind is not _F or self._has_memory(depth))
            ]
            if allowed:
                _, depth = min(allowed)
                task = heapq.heappop(self._ready[kind][depth])[-1]
                self._begin(task, depth)
                return task
        return None

    def record(self, task: Task, depth: Depth) -> None:
        """Count a finished task in what is in memory."""
        match task.kind:
            case TaskKind.FORWARD:
                self._before_backward[depth[0]] += 1
            case TaskKind.BACKWARD:
                self._before_backward[depth[0]] -= 1
            case TaskKind.INPUT_GRADIENT:
                self._before_backward[depth[0]] -= 1
                self._before_weights += 1
            case TaskKind.WEIGHT_GRADIENT:
                self.end_weights()

    def end_weights(self) -> None:
        """Count one hop less that waits for its weight gradients."""
        self._before_weights -= 1

    def _begin(self, task: Task, depth: Depth) -> None:
        # Residuals are in memory until a task ends, so they are counted before it; a forward pass by the task after it.
        in_flight = self._before_backward.total() + self._before_weights
        self.peak_in_flight = max(self.peak_in_flight, in_flight)
        if task.kind is not _W:
            self._was_backward = task.kind is not _F
        self.record(task, depth)

    def _has_memory(self, depth: Depth) -> bool:
        # Hops further from the loss do not count: they may wait for this very forward pass.
        from_loss, hops = depth
        count = sum(number for other, number in self._before_backward.items() if other <= from_loss)
        if count >= from_loss:
            return False
        return self._schedule is not PipelineSchedule.ZERO_BUBBLE or count + self._before_weights < hops
