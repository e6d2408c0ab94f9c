"""What this process is at work on, and since when: marked where a task begins and ends, read by the guard thread.

A mark costs some microseconds, and is made at the tasks of a step, not inside of them. Each one is progress: a hang is
a silence, the time since the last mark. What a silence of a task usually lasts is kept here, too, from the job's own
steps.
"""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.generation_scoped import GenerationScoped
from resilient_jax.protocol.worker_tasks import WorkerTask

NUM_KEPT: Final = 64
"""Silences of a task from which the next is predicted: enough for what happens every few dozen steps."""

TaskPath = tuple[WorkerTask, ...]
"""A task within others, the innermost last: reading input in an evaluation takes another time than in training."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a process is at work on at a moment.

    Attributes:
        since_s: monotonic time of the last progress.
        thread: `Thread.ident` of the thread that is at work on the task.
        silences_s: how long earlier silences of this task lasted in this process, in seconds; without the first of each
            generation, which may have compiled.
    """

    path: TaskPath
    step: int
    since_s: float
    thread: int
    silences_s: tuple[float, ...]

    @property
    def task(self) -> WorkerTask:
        """The innermost task."""
        return self.path[-1]


@dataclasses.dataclass(slots=True)
class _Work:
    """The tasks that a thread is within, and when it began the innermost."""

    path: list[WorkerTask]
    since_s: float


class WorkerActivity(GenerationScoped):
    """The tasks of one process. Thread-safe.

    Args:
        read_clock: returns monotonic seconds.
    """

    def __init__(self, read_clock: Callable[[], float] = time.monotonic) -> None:
        self._now_s = read_clock
        self._lock = threading.Lock()
        self._step = 0
        self._last_s = read_clock()
        self._work: dict[int, _Work] = {}
        self._helpers: dict[int, float] = {}
        """When each thread that works for others began, such as one that reads input ahead."""
        self._silences: dict[TaskPath, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=NUM_KEPT)
        )
        self._seen: set[TaskPath] = set()
        """Tasks that this generation has finished once."""

    def begin_generation(self, generation: Generation) -> None:
        """Forget nothing, but count no task's first silence: programs may be compiled or loaded in it."""
        with self._lock:
            self._seen.clear()
            self._last_s = self._now_s()

    def begin_step(self, step: int) -> None:
        """Enter a step; what is done in it outside of any task is code of the user's."""
        with self._lock:
            self._step = step
            self._make_progress()

    @contextlib.contextmanager
    def task(self, task: WorkerTask) -> Iterator[None]:
        """Mark the calling thread as at work on a task."""
        ident = threading.get_ident()
        with self._lock:
            self._make_progress()
            work = self._work.setdefault(ident, _Work([], self._last_s))
            work.path.append(task)
            work.since_s = self._last_s
        try:
            yield
        finally:
            with self._lock:
                self._make_progress()
                work.path.pop()
                work.since_s = self._last_s
                if not work.path:
                    del self._work[ident]

    @contextlib.contextmanager
    def help_reading(self) -> Iterator[None]:
        """Mark the calling thread as one that reads input for those which wait for it: that is no progress of theirs,
        but where they hang.
        """
        ident = threading.get_ident()
        with self._lock:
            self._helpers[ident] = self._now_s()
        try:
            yield
        finally:
            with self._lock:
                del self._helpers[ident]

    def read(self, main_thread: int) -> Activity:
        """Return what the process is at work on; `main_thread` is the `ident` of the thread that runs the script."""
        with self._lock:
            path, thread = self._find_work(main_thread)
            return Activity(
                path=path,
                step=self._step,
                since_s=self._last_s,
                thread=thread,
                silences_s=tuple(self._silences.get(path, ())),
            )

    def _find_work(self, main_thread: int) -> tuple[TaskPath, int]:
        """Return the task that has begun first of those that are not finished, and its thread."""
        others = [(work.since_s, ident) for ident, work in self._work.items() if ident != main_thread]
        # The main thread waits for the threads of its replicas, if there are several.
        thread = min(others)[1] if others else main_thread
        work = self._work.get(thread)
        path = tuple(work.path) if work is not None else (WorkerTask.USER_CODE,)
        if path[-1] is WorkerTask.INPUT and self._helpers:
            thread = min((since_s, ident) for ident, since_s in self._helpers.items())[1]
        return path, thread

    def _make_progress(self) -> None:
        """End the silence of what was being done."""
        now_s = self._now_s()
        work = self._work.get(threading.get_ident())
        path = tuple(work.path) if work is not None else (WorkerTask.USER_CODE,)
        if path in self._seen:
            self._silences[path].append(now_s - self._last_s)
        else:
            self._seen.add(path)
        self._last_s = now_s


worker_activity = WorkerActivity()
"""That of this process."""
