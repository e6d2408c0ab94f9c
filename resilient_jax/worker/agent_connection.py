"""The connection of a worker's main thread to its agent: reports one way, orders the other way.

A thin shell of `worker_protocol`, whose docstring has the table: a lock, a condition and a socket.
"""

import threading
import time
from collections.abc import Callable

from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName, WorldId
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.generation import SeatId
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.protocol.state_records import StatePart
from resilient_jax.protocol.worker_messages import (
    WORKER_ORDER_DECODER,
    AdmissionRequested,
    EventOccurred,
    FormWorld,
    Pause,
    SnapshotServerRequested,
    StepCommitted,
    StopWorker,
    TakeSeat,
    WorkerMessage,
    WorkerOrder,
)
from resilient_jax.protocol.worker_report import WorkerFailure, WorkerState
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.telemetry.worker_activity import worker_activity
from resilient_jax.worker import worker_protocol
from resilient_jax.worker.guard_thread import GuardThread, Interrupt, send_unless_closed
from resilient_jax.worker.hang_detection import HangLimits
from resilient_jax.worker.imported_modules import describe_imports
from resilient_jax.worker.protocol_table import HandledOrder
from resilient_jax.worker.training_control import GenerationEnded
from resilient_jax.worker.worker_protocol import (
    HeldPause,
    OrderRefused,
    StepDecision,
    Transition,
    make_initial_protocol,
)


class AgentConnection:
    """The worker's report of itself, and the orders that its main thread waits for.

    Args:
        descriptor: this worker's end of the socket pair.
        interrupt: called by the guard thread while the main thread must unwind.
        limits: deadlines after which the guard thread reports a hang.
        polls_checkpoints: whether a `report_checkpoint` follows whenever this worker is idle; decisions about a lost
            state wait for it.
        on_pause: called by the guard thread with each order to pause.
    """

    def __init__(
        self,
        descriptor: int,
        host: HostName,
        interrupt: Interrupt,
        limits: HangLimits,
        *,
        polls_checkpoints: bool,
        on_pause: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_pause = on_pause
        self._host = host
        # No timeout: an agent that is stopped for a while must not make its worker fail.
        self._connection = Connection[WorkerMessage, WorkerOrder](
            descriptor, WORKER_ORDER_DECODER, send_timeout_s=None
        )
        self._changed = threading.Condition()
        """Reentrant; guards `_protocol`. What a transition answers is sent before the next one."""
        self._protocol = make_initial_protocol(polls_checkpoints=polls_checkpoints)
        self._guard = GuardThread(host, self._connection, self, interrupt, limits)
        self._guard.start()

    # For the main thread: its life between generations.

    def join_job(self, script: dict[str, str], endpoint: str) -> None:
        """Wait until the job has let this worker in, or is over; from then on a `FormWorld` may arrive.

        Args:
            script: description of the script, as `describe_script` returns it.
            endpoint: address where this worker serves its state.
        """
        with self._changed:
            send_unless_closed(self._connection, AdmissionRequested(script=script))
            while not self._protocol.is_admitted and self._protocol.stop is None:
                self._changed.wait()
            self._apply(worker_protocol.join_job(self._protocol, endpoint))
        # For the host's next zygote; last, since no other host needs it.
        send_unless_closed(self._connection, describe_imports())

    def wait_for_order(self) -> FormWorld | TakeSeat | StopWorker:
        """Wait for the next world to train in, for a seat to take, or for the end of the job."""
        with self._changed:
            while True:
                protocol, order, answers = worker_protocol.try_take_order(self._protocol)
                if order is not None:
                    self._apply((protocol, answers))
                    return order
                self._changed.wait()

    def report_seat(self, world: WorldId | None, failure: WorkerFailure | None) -> None:
        """Report that the seat of the last order is taken, in `world`; or, with None, that it could not be."""
        with self._guard.interruption, self._changed:
            self._apply(worker_protocol.report_seat(self._protocol, world, failure))

    def report_formed(self, seat: SeatId, step: int, *, holds_state: bool) -> None:
        """Report that the world is formed and the state of `step` found; on this host, if `holds_state`."""
        with self._changed:
            self._apply(worker_protocol.report_formed(self._protocol, seat, step, holds_state=holds_state))

    def report_idle(
        self,
        *,
        step: int,
        holds_state: bool,
        part: StatePart | None,
        snapshot: SnapshotId | None,
        copied: SnapshotId | None,
        done: bool,
        failure: WorkerFailure | None,
    ) -> None:
        """Report that the main thread has left the user's function and waits for an order."""
        with self._guard.interruption, self._changed:
            self._apply(
                worker_protocol.report_idle(
                    self._protocol,
                    step=step,
                    holds_state=holds_state,
                    part=part,
                    snapshot=snapshot,
                    copied=copied,
                    done=done,
                    failure=failure,
                )
            )

    def report_found(self, change: Callable[..., Transition], found: object) -> None:
        """Report what was found: `change(protocol, found)` is a transition of `worker_protocol`.

        The guard thread reports so, too.
        """
        with self._changed:
            self._apply(change(self._protocol, found))

    # For the main thread: a generation.

    def begin_step(self, step: int) -> None:
        """Return when `step` may start.

        Raises:
            GenerationEnded: the step may not start in this generation.
        """
        with self._changed:
            while True:
                self._protocol, decision = worker_protocol.try_begin_step(self._protocol, step)
                if decision is StepDecision.END:
                    raise GenerationEnded
                if decision is StepDecision.START:
                    worker_activity.begin_step(step)
                    return
                with worker_activity.task(WorkerTask.PAUSED):
                    self._changed.wait()

    def raise_if_ended(self) -> None:
        """Raise GenerationEnded if the generation has ended."""
        if self.is_interrupted:
            raise GenerationEnded

    @property
    def is_interrupted(self) -> bool:
        """Whether the generation that the main thread works in has ended."""
        return self._protocol.is_interrupted

    def report_commit(self, commit: StepCommitted, *, holds_state: bool, part: StatePart | None) -> None:
        """Report that a step is committed, of whose state this host has all (`holds_state`) or a part."""
        send_unless_closed(self._connection, commit)
        with self._changed:
            protocol, answers = worker_protocol.report_commit(
                self._protocol, commit.progress.step, holds_state=holds_state, part=part
            )
            self._apply((protocol, answers))
        if answers:
            self.record_event(EventKind.STEP_COMMITTED, step=commit.progress.step)

    @property
    def takes_snapshot(self) -> bool:
        """Whether a snapshot of a state that no host has all of is waited for before a planned change."""
        return self._protocol.takes_snapshot

    @property
    def is_leaving(self) -> bool:
        """Whether the job ends after the step under way; from the first look on this worker saves a checkpoint then."""
        self.report_found(worker_protocol.report_saving, None)
        return worker_protocol.is_leaving(self._protocol)

    @property
    def held_pause(self) -> HeldPause | None:
        """The pause that is to come when blocks are copied for the members after it; None: there is none."""
        return self._protocol.held_pause

    def answer_pause(self, generation: GenerationNumber) -> None:
        """Let the pause before a generation come, between two steps: blocks are copied, as far as they are."""
        with self._changed:
            self._apply(worker_protocol.answer_pause(self._protocol, generation))

    def wait_for_snapshot_server(self) -> str:
        """Return the endpoint of this host's snapshot server, which the agent starts now if need be.

        Raises:
            GenerationEnded: the generation ended before the server ran.
        """
        with self._changed:
            self._protocol = worker_protocol.request_snapshot_server(self._protocol)
            send_unless_closed(self._connection, SnapshotServerRequested())
            while self._protocol.snapshot_server is None:
                self.raise_if_ended()
                self._changed.wait()
            return self._protocol.snapshot_server

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> Event:
        """Write an event to the host's log, through the agent: the event survives this process's death."""
        event = Event(
            kind=kind,
            host=self._host,
            monotonic_s=time.monotonic(),
            wall_s=time.time(),
            generation=self._protocol.report.generation,
            detail=dict(detail),
        )
        send_unless_closed(self._connection, EventOccurred(event=event))
        return event

    # For the guard thread.

    @property
    def state(self) -> WorkerState:
        """What this process is doing."""
        return self._protocol.report.state

    def handle_order(self, order: HandledOrder) -> None:
        """Handle an order, and wake the main thread."""
        if isinstance(order, Pause):
            self._on_pause()
        with self._changed:
            self._apply(worker_protocol.handle_order(self._protocol, order, time.monotonic()))
            self._changed.notify_all()

    def _apply(self, transition: Transition) -> None:
        """Enter a new state, under `_changed`, and send its answers."""
        self._protocol, answers = transition
        for answer in answers:
            if isinstance(answer, OrderRefused):
                self.record_event(EventKind.GENERATION_STALE, refused=answer.refused, newest=answer.newest)
            else:
                send_unless_closed(self._connection, answer)
