"""What the tasks of this host take, as the runner measures them: without waits for other hosts."""

import statistics
from collections.abc import Mapping

import msgspec

from resilient_jax.pipeline_schedule.tasks import Task, TaskKind
from resilient_jax.step.measured_seconds import MeasuredSeconds
from resilient_jax.step.watch_report import WatchReport


class StageReport(msgspec.Struct, frozen=True):
    """What a host says about its tasks, every few steps, beside its rows of the commit table.

    Attributes:
        watched: what its last steps took, and whether devices are to be measured.
        task_seconds: by kind of task, the seconds of one microbatch over all blocks of this host; empty: unknown.
    """

    watched: WatchReport
    task_seconds: Mapping[TaskKind, float]


class StepWork(msgspec.Struct, frozen=True):
    """The tasks of a step on this host.

    Attributes:
        microbatches: microbatches whose forward passes the host ran, in their order.
        waited_s: seconds that each of these waited for its data.
        seconds: time of all tasks, with these waits, without waits for other hosts.
    """

    microbatches: tuple[int, ...]
    waited_s: tuple[float, ...]
    seconds: float


class TaskTimings:
    """The times of the tasks that this host runs."""

    def __init__(self) -> None:
        self._step: list[tuple[Task, float]] = []
        self._waited_s: dict[int, float] = {}
        self._measured: MeasuredSeconds[TaskKind] = MeasuredSeconds()

    def clear(self) -> None:
        """Forget everything: this host may have other blocks now, or loaded programs."""
        self._measured = MeasuredSeconds()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step before, unless `end_step` has counted it."""
        self._step.clear()
        self._waited_s.clear()

    def add(self, task: Task, seconds: float) -> None:
        """Note a finished task."""
        self._step.append((task, seconds))

    def add_wait(self, microbatch: int, seconds: float) -> None:
        """Note how long the forward pass of a microbatch waited for its data; that is part of the task's time, too."""
        self._waited_s[microbatch] = seconds

    def list_tasks(self) -> dict[Task, float]:
        """Return the seconds of each task of the step under way."""
        return dict(self._step)

    def end_step(self) -> StepWork:
        """Count the tasks of the step, all of which this host ran in an ordinary way, and return them."""
        by_kind: dict[TaskKind, list[float]] = {}
        for task, seconds in self._step:
            waited_s = self._waited_s.get(task.microbatch, 0.0) if task.kind is TaskKind.FORWARD else 0.0
            by_kind.setdefault(task.kind, []).append(seconds - waited_s)
        if by_kind:
            self._measured.add({kind: statistics.fmean(found) for kind, found in by_kind.items()})
        microbatches = tuple(task.microbatch for task, _ in self._step if task.kind is TaskKind.FORWARD)
        work = StepWork(
            microbatches=microbatches,
            waited_s=tuple(self._waited_s.get(number, 0.0) for number in microbatches),
            seconds=sum(seconds for _, seconds in self._step),
        )
        self.begin_step()
        return work

    def estimate(self) -> dict[TaskKind, float]:
        """Return the seconds of a task of each kind, over all blocks of this host; empty while they are unknown."""
        return self._measured.estimate()
