"""The part of the guard thread that looks after the main thread: names a task that hangs, and keeps stacks."""

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from resilient_jax.events import EventKind
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.jax_runtime.compilation_state import is_compiling
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.worker_messages import StacksTaken, WorkerMessage, WorkerOrder
from resilient_jax.protocol.worker_report import WorkerState
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.telemetry.worker_activity import Activity, worker_activity
from resilient_jax.worker import worker_protocol
from resilient_jax.worker.hang_detection import (
    BOUNDED_TASKS,
    REGULAR_TASKS,
    HangDetector,
    HangLimits,
    make_overdue_task,
)
from resilient_jax.worker.thread_stacks import describe_place, find_barrier, format_stacks, is_debugged
from resilient_jax.worker.worker_protocol import Transition

LOOK_INTERVAL_S: Final = 0.2
BARRIER_ADVICE: Final = (
    "hosts that do not call it keep this one waiting. Call it on all hosts, or have it wait for this one alone "
    "(docs/own_loop.md, Checkpoints of your own)"
)
STANDARD_ERROR: Final = 2


class OverdueReporter(Protocol):
    """What the watch needs of the connection to the agent."""

    @property
    def state(self) -> WorkerState:
        """What this process is doing."""
        ...

    @property
    def is_interrupted(self) -> bool:
        """Whether the generation that the main thread works in has ended."""
        ...

    def report_found(self, change: Callable[..., Transition], found: object) -> None:
        """Report what was found: `change(protocol, found)` is a transition of `worker_protocol`."""
        ...

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> object:
        """Write an event to the host's log."""
        ...


class HangWatch:
    """Looks at the main thread every `LOOK_INTERVAL_S`, from the guard thread."""

    def __init__(
        self,
        connection: Connection[WorkerMessage, WorkerOrder],
        reporter: OverdueReporter,
        limits: HangLimits,
    ) -> None:
        self._connection = connection
        self._reporter = reporter
        self._limits = limits
        self._detector = HangDetector(limits, time.monotonic())
        self._looked_s = 0.0
        self._interrupted_since_s: float | None = None
        self._is_reported = False
        self._asked_since_s = 0.0
        """When the silence began of which it is known whether it is a wait for all hosts."""

    def look(self) -> None:
        """Report a task that is overdue, or that it is no more."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_INTERVAL_S:
            return
        self._looked_s = now_s
        if self._reporter.state is not WorkerState.RUNNING:
            self._interrupted_since_s, self._is_reported = None, False
            return
        if not self._reporter.is_interrupted:
            self._interrupted_since_s = None
        elif self._interrupted_since_s is None:
            self._interrupted_since_s = now_s
        self._look_at_task(now_s)

    def _look_at_task(self, now_s: float) -> None:
        main = threading.main_thread().ident
        assert main is not None, "the main thread has begun"
        activity = worker_activity.read(main)
        interrupted_s = None if self._interrupted_since_s is None else now_s - self._interrupted_since_s
        is_compiling_now = (
            is_compiling(main) or is_compiling(activity.thread) or collective_thread.is_compiling
        )
        silence = self._detector.look(
            activity, now_s, is_excused=is_compiling_now, interrupted_s=interrupted_s
        )
        if self._is_reported and not self._detector.is_reported:
            self._is_reported = False
            self._reporter.report_found(worker_protocol.report_overdue, None)
        if silence is None:
            self._look_for_barrier(activity, now_s)
            return
        if is_debugged():  # asked only now: to read all stacks takes a while
            self._detector.excuse(now_s)
            return
        overdue = make_overdue_task(activity, describe_place(activity.thread), silence)
        if activity.task is not WorkerTask.SUM:  # else it waits for another host, which is named
            why = f"no progress for {overdue.silent_s:.1f} s: {overdue.describe()}"
            self.take_stacks(why)
            self._reporter.record_event(
                EventKind.WORKER_OVERDUE,
                step=overdue.step,
                task=overdue.task.value,
                place=overdue.place,
                silent_s=overdue.silent_s,
                deadline_s=overdue.deadline_s,
            )
        self._is_reported = True
        self._reporter.report_found(worker_protocol.report_overdue, overdue)

    def _look_for_barrier(self, activity: Activity, now_s: float) -> None:
        """Say once in a silence that it is a wait for all hosts, which the others may never come to."""
        is_asked = activity.since_s == self._asked_since_s
        if is_asked or activity.task in REGULAR_TASKS or activity.task in BOUNDED_TASKS:
            return
        if (silent_s := self._detector.find_silence_s(now_s)) < self._limits.regular_s:
            return
        self._asked_since_s = activity.since_s
        if find_barrier(activity.thread) is None:
            return
        place = describe_place(activity.thread)
        self._reporter.record_event(
            EventKind.WORKER_WAITS_FOR_ALL, step=activity.step, place=place, silent_s=silent_s
        )
        sys.stderr.write(f"for {silent_s:.0f} s in {place}: {BARRIER_ADVICE}\n")
        sys.stderr.flush()

    def take_stacks(self, why: str) -> None:
        """Send the stacks of all threads to the agent, which keeps them."""
        with contextlib.suppress(ConnectionError):  # without its agent this process ends soon
            self._connection.send(StacksTaken(why=why, stacks=format_stacks()))

    def feed_dump(self) -> None:
        """Have all stacks printed by a thread that needs no interpreter, unless this is called again in time: a main
        thread that never lets go of the interpreter keeps the guard thread from doing it.
        """
        faulthandler.dump_traceback_later(self._limits.stall_dump_s, file=STANDARD_ERROR)
