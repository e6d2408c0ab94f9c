"""The worker's line to its agent, and the guard thread that listens on it.

The guard is the only thread that reads orders. It answers at once whatever can be answered without the
main thread, and breaks the main thread out of collectives when the generation it trains in has ended.

Invariants, under `_lock`:
- `_newest` only grows; an order of an older generation is refused.
- the main thread starts a step only through `begin_step`, which is where it can be held and turned back.
- the main thread is *interrupted* from the moment its generation has ended until it reports idle.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from typing import Protocol

import msgspec

from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName, WorldId
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.records import WorkerFailure, WorkerReport, WorkerState
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.protocol.worker_messages import (
    RESTART_EXIT_CODE,
    WORKER_ORDER_DECODER,
    EventOccurred,
    FormWorld,
    Heartbeat,
    HoldTraining,
    LeaseRenewed,
    Pause,
    Quiesce,
    RunToBoundary,
    SnapshotServerReady,
    SnapshotServerRequested,
    StepCommitted,
    StopWorker,
    WorkerMessage,
    WorkerOrder,
    WorkerReported,
)

ABORT_INTERVAL_S = 0.02
"""A collective that begins after an abort finds other sockets: so the abort is repeated until unwound."""
HEARTBEAT_INTERVAL_S = 1.0
LEASE_CHECK_INTERVAL_S = 0.25
"""How late the guard may notice that the host's lease ran out and nobody said so."""


class GenerationEnded(BaseException):
    """Unwinds the user's train function: its generation has ended.

    Not an `Exception`, so that a `except Exception` in a training loop does not swallow it.
    """


class Interrupt(Protocol):
    """Breaks the main thread out of whatever C++ it waits in. Called again until it is out."""

    def __call__(self) -> None:
        """Interrupt once."""
        ...


class AgentConnection:
    """Orders in, reports out."""

    def __init__(self, descriptor: int, host: HostName, interrupt: Interrupt) -> None:
        self._host = host
        self._interrupt = interrupt
        self._messages = Connection[WorkerMessage, WorkerOrder](
            descriptor, WORKER_ORDER_DECODER, send_timeout_s=None
        )
        self._lock = threading.Condition()
        # Held while the guard interrupts, and to become idle: an interruption that is under way when the
        # main thread is out must end before the next world's sockets exist, or it would break those.
        self._interrupting = threading.Lock()
        self._report = WorkerReport()
        self._looks = False
        self._newest = GenerationNumber(0)
        self._form: FormWorld | None = None
        self._stop: StopWorker | None = None
        self._interrupted = False
        self._leased_until_s = float("inf")  # the first renewal tells
        self._next_step = 0
        self._limit: int | None = None
        self._boundary: int | None = None
        self._snapshot_server: str | None = None
        self._main = threading.main_thread().ident
        threading.Thread(target=self._guard, name="resilient-jax-guard", daemon=True).start()

    # For the main thread.

    def report_ready(self, endpoint: str) -> None:
        """Asks to join: from now on a `Form` may come."""
        self._change(state=WorkerState.IDLE, endpoint=endpoint)

    def wait_for_order(self) -> FormWorld | StopWorker:
        """The next world to train in, or the end of the job."""
        with self._lock:
            while True:
                if self._stop is not None:
                    return self._stop
                if self._form is not None:
                    form, self._form = self._form, None
                    self._interrupted = False
                    self._limit = self._boundary = None
                    self._next_step = self._report.step
                    self._report = msgspec.structs.replace(
                        self._report,
                        state=WorkerState.RUNNING,
                        generation=form.generation.number,
                        has_formed=False,
                        has_finished_step=False,
                        is_done=False,
                        is_compiling=False,
                        snapshot=None,
                        is_polling_checkpoints=self._looks,
                        earliest_stop_step=None,
                        failure=None,
                    )
                    self._send_report()
                    return form
                self._lock.wait()

    def report_formed(self, world: WorldId, step: int, *, holds_state: bool) -> None:
        """The world is built, and it is known where the state of `step` is: here, whole, if `holds_state`."""
        with self._lock:
            self._next_step = step
        self._change(has_formed=True, world=world, step=step, holds_state=holds_state)

    def begin_step(self, step: int) -> None:
        """Returns when `step` may start.

        Raises:
            GenerationEnded: it may not, in this generation.
        """
        with self._lock:
            while True:
                if self._interrupted or (self._boundary is not None and step >= self._boundary):
                    raise GenerationEnded
                if self._limit is None or step < self._limit or self._boundary is not None:
                    self._next_step = step + 1
                    return
                self._lock.wait()

    def raise_if_ended(self) -> None:
        """Raises GenerationEnded if the generation has ended."""
        if self._interrupted:
            raise GenerationEnded

    def report_commit(self, step: int, metrics: dict[str, float], *, holds_state: bool) -> None:
        """`step` steps are done; `holds_state`: this host holds their whole state."""
        self._send(StepCommitted(step=step, metrics=metrics))
        if not self._report.has_finished_step:
            self._change(has_finished_step=True, holds_state=holds_state, step=step)
            self.record_event(EventKind.STEP_COMMITTED, step=step)

    def wait_for_snapshot_server(self) -> str:
        """Where this host's snapshot server listens; the agent starts it now if need be.

        Raises:
            GenerationEnded: before it ran.
        """
        with self._lock:
            self._snapshot_server = None
            self._send(SnapshotServerRequested())
            while self._snapshot_server is None:
                if self._interrupted:
                    raise GenerationEnded
                self._lock.wait()
            return self._snapshot_server

    def report_idle(
        self,
        *,
        step: int,
        holds_state: bool,
        snapshot: SnapshotId | None,
        done: bool,
        failure: WorkerFailure | None,
    ) -> None:
        """The main thread is out of the user's function and waits for what comes next."""
        with self._interrupting, self._lock:
            self._interrupted = False
            answered = failure is None or self._report.generation < self._newest
            self._report = msgspec.structs.replace(
                self._report,
                state=WorkerState.IDLE,
                generation=max(self._report.generation, self._newest),
                step=step,
                holds_state=holds_state,
                snapshot=snapshot,
                is_polling_checkpoints=self._looks,  # what a look of earlier may have said since does not count
                earliest_stop_step=step,
                is_done=done,
                is_compiling=False,
                has_formed=done,
                failure=None if answered else failure,
            )
            self._send_report()

    def report_failure(self, failure: WorkerFailure, *, step: int) -> None:
        """Says why this process is about to end."""
        self._change(failure=failure, step=step)

    def report_checkpoint(self, step: int | None) -> None:
        """The newest checkpoint on storage is now of this step; None: there is none."""
        self._change(checkpoint_step=step, is_polling_checkpoints=False)

    def announce_checkpoint_polling(self) -> None:
        """Whenever this worker is idle, `report_checkpoint` will follow; a decision about a lost state waits for it."""
        self._looks = True
        self._change(is_polling_checkpoints=True)

    def report_world_left(self) -> None:
        """No coordination service is connected any more."""
        self._change(world=None)

    @property
    def is_interrupted(self) -> bool:
        """Whether the generation that the main thread works in has ended."""
        return self._interrupted

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> Event:
        """Writes an event to the host's log, through the agent: that survives our death."""
        event = Event(
            kind=kind,
            host=self._host,
            monotonic_s=time.monotonic(),
            wall_s=time.time(),
            generation=self._report.generation,
            detail=dict(detail),
        )
        self._send(EventOccurred(event=event))
        return event

    # For the guard thread.

    def _guard(self) -> None:
        try:
            self._listen()
        except Exception:  # the guard must never die silently: without it nobody can reach this process
            traceback.print_exc()
            os._exit(RESTART_EXIT_CODE)

    def _listen(self) -> None:
        alive_at_s = time.monotonic()
        while True:
            wait_s = ABORT_INTERVAL_S if self._must_interrupt() else LEASE_CHECK_INTERVAL_S
            try:
                orders = self._messages.receive(wait_s)
            except EOFError:
                # The agent is gone, so no process decides for this one any more.
                sys.stderr.write(f"[{self._host}] the agent is gone; this worker ends\n")
                os._exit(71)
            for received in orders:
                self._obey(received.message)
            self._hold_if_lease_ran_out()
            self._interrupt_if_needed()
            if time.monotonic() - alive_at_s > HEARTBEAT_INTERVAL_S:
                alive_at_s = time.monotonic()
                self._send(Heartbeat())

    def _hold_if_lease_ran_out(self) -> None:
        """The agent may be stopped: then nobody tells us that the others count this host as dead."""
        running = self._report.state is WorkerState.RUNNING and not self._interrupted
        if running and time.monotonic() > self._leased_until_s:
            self.record_event(EventKind.STORE_LOST, why="the agent did not renew the lease in time")
            self._obey(HoldTraining())

    def _interrupt_if_needed(self) -> None:
        if not self._must_interrupt():
            return
        with self._interrupting:
            if self._must_interrupt():
                self._interrupt()
        self._say_if_busy()

    def _must_interrupt(self) -> bool:
        return self._interrupted and self._report.state is WorkerState.RUNNING

    def _obey(self, order: WorkerOrder) -> None:
        with self._lock:
            if isinstance(order, StopWorker):
                self._stop = order
                self._interrupted = True
            elif isinstance(order, LeaseRenewed):
                self._leased_until_s = order.valid_until_s
            elif isinstance(order, SnapshotServerReady):
                self._snapshot_server = order.endpoint
            elif isinstance(order, HoldTraining):
                self._interrupted = True
                self._form = None
            elif isinstance(order, FormWorld):
                if order.generation.number < self._newest:
                    self._refuse(order.generation.number)
                    return
                self._newest = order.generation.number
                self._form = order
            elif order.generation < self._newest:
                self._refuse(order.generation)
                return
            else:
                self._newest = order.generation
                self._obey_generation(order)
            self._lock.notify_all()

    def _obey_generation(self, order: Quiesce | Pause | RunToBoundary) -> None:
        idle = self._report.state is WorkerState.IDLE
        if isinstance(order, Quiesce):
            self._form = None
            if idle:
                self._report = msgspec.structs.replace(
                    self._report,
                    generation=order.generation,
                    failure=None,
                    has_formed=False,
                    earliest_stop_step=None,
                )
                self._send_report()
            else:
                self._interrupted = True
        elif isinstance(order, Pause):
            self._limit = self._report.step if idle else self._next_step
            self._report = msgspec.structs.replace(
                self._report, generation=order.generation, earliest_stop_step=self._limit
            )
            self._send_report()
        else:
            self._boundary = order.boundary_step

    def _refuse(self, number: GenerationNumber) -> None:
        self.record_event(EventKind.GENERATION_STALE, refused=number, newest=self._newest)

    def _say_if_busy(self) -> None:
        """A compilation cannot be interrupted: say so, so that nobody takes it for a hang."""
        busy = _compiles(self._main)
        if busy != self._report.is_compiling:
            self._change(is_compiling=busy)

    # Sending.

    def _change(self, **changes: object) -> None:
        with self._lock:
            self._report = msgspec.structs.replace(self._report, **changes)
            self._send_report()

    def _send_report(self) -> None:
        self._send(WorkerReported(report=self._report))

    def _send(self, word: WorkerMessage) -> None:
        with contextlib.suppress(ConnectionError):  # the agent is gone, which the guard notices
            self._messages.send(word)


def _compiles(thread: int | None) -> bool:
    """Whether the thread is inside JAX's compiler, told by the files on its stack."""
    current = sys._current_frames().get(thread or 0)
    while current is not None:
        if current.f_code.co_filename.endswith("jax/_src/compiler.py"):
            return True
        current = current.f_back
    return False
