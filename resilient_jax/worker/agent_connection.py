"""The connection of a worker's main thread to its agent: reports one way, orders the other way.

Rules, under `_changed`:
- `_newest` only grows; an order of an older generation is refused.
- The main thread starts a step only through `begin_step`, which is where it can be paused and unwound.
- The main thread is *interrupted* from the moment its generation has ended until it reports idle.
"""

import threading
import time

import msgspec

from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName, WorldId
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.records import (
    SeatId,
    WorkerFailure,
    WorkerReport,
    WorkerState,
)
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.protocol.worker_messages import (
    WORKER_ORDER_DECODER,
    AdmissionRequested,
    EventOccurred,
    FormWorld,
    HoldTraining,
    Pause,
    Quiesce,
    RunToBoundary,
    SnapshotServerReady,
    SnapshotServerRequested,
    StepCommitted,
    StopWorker,
    TakeSeat,
    WorkerAdmitted,
    WorkerMessage,
    WorkerOrder,
    WorkerReported,
)
from resilient_jax.worker.guard_thread import GuardThread, Interrupt, send_unless_closed
from resilient_jax.worker.imported_modules import describe_imports
from resilient_jax.worker.training_control import GenerationEnded

HandledOrder = (
    Quiesce
    | Pause
    | RunToBoundary
    | FormWorld
    | TakeSeat
    | HoldTraining
    | SnapshotServerReady
    | WorkerAdmitted
    | StopWorker
)


class AgentConnection:
    """The worker's report of itself, and the orders that its main thread waits for.

    Args:
        descriptor: this worker's end of the socket pair.
        host: this one.
        interrupt: called by the guard thread while the main thread must unwind.
        polls_checkpoints: a `report_checkpoint` follows whenever this worker is idle; decisions about a lost state wait
            for it.
    """

    def __init__(
        self, descriptor: int, host: HostName, interrupt: Interrupt, *, polls_checkpoints: bool
    ) -> None:
        self._host = host
        # No timeout: an agent that is stopped for a while must not make its worker fail.
        self._connection = Connection[WorkerMessage, WorkerOrder](
            descriptor, WORKER_ORDER_DECODER, send_timeout_s=None
        )
        self._changed = threading.Condition()
        """Reentrant; guards all that follows."""
        self._report = WorkerReport(is_polling_checkpoints=polls_checkpoints)
        self._polls_checkpoints = polls_checkpoints
        self._newest = GenerationNumber(0)
        self._form: FormWorld | None = None
        self._take_seat: TakeSeat | None = None
        self._stop: StopWorker | None = None
        self._is_interrupted = False
        self._next_step = 0
        self._limit: int | None = None
        """The step that must not start before a `RunToBoundary`, once paused."""
        self._boundary: int | None = None
        self._snapshot_server: str | None = None
        self._is_admitted = False
        self._guard = GuardThread(host, self._connection, self, interrupt)
        self._guard.start()

    # For the main thread: its life between generations.

    def join_job(self, script: dict[str, str], endpoint: str) -> None:
        """Wait until the job has let this worker in, or is over; from then on a `FormWorld` may arrive.

        Args:
            script: as `describe_script` returns it.
            endpoint: where this worker serves its state.
        """
        with self._changed:
            send_unless_closed(self._connection, AdmissionRequested(script=script))
            while not self._is_admitted and self._stop is None:
                self._changed.wait()
        self._update_report(state=WorkerState.IDLE, endpoint=endpoint)
        send_unless_closed(
            self._connection, describe_imports()
        )  # for a standby; last, since no other host needs it

    def wait_for_order(self) -> FormWorld | TakeSeat | StopWorker:
        """Wait for the next world to train in, for a seat to take, or for the end of the job."""
        with self._changed:
            while True:
                # First, because a world that was ordered earlier is over, too.
                if self._stop is not None:
                    return self._stop
                # Taken and reported under one lock: the next order must find this worker busy, and interrupt it.
                if self._form is not None:
                    form, self._form, self._take_seat = self._form, None, None
                    self._is_interrupted = False
                    self._limit = self._boundary = None
                    self._next_step = self._report.step
                    self._update_report(
                        state=WorkerState.RUNNING,
                        generation=form.generation.number,
                        has_formed=False,
                        has_finished_step=False,
                        is_done=False,
                        is_compiling=False,
                        snapshot=None,
                        is_polling_checkpoints=self._polls_checkpoints,
                        earliest_stop_step=None,
                        failure=None,
                    )
                    return form
                if self._take_seat is not None:
                    take_seat, self._take_seat = self._take_seat, None
                    self._is_interrupted = False
                    self._update_report(state=WorkerState.PREPARING, seat=_get_seat(take_seat), failure=None)
                    return take_seat
                self._changed.wait()

    def report_seat(self, world: WorldId | None, failure: WorkerFailure | None) -> None:
        """Report that the seat of the last order is taken, in `world`; or, with None, that it could not be."""
        with self._guard.interruption, self._changed:
            self._is_interrupted = False
            self._update_report(
                state=WorkerState.IDLE,
                generation=max(self._report.generation, self._newest),
                world=world,
                is_compiling=False,
                failure=failure,
            )

    def report_formed(self, seat: SeatId, step: int, *, holds_state: bool) -> None:
        """Report that the world is formed and the state of `step` found; on this host, if `holds_state`."""
        with self._changed:
            self._next_step = step
        self._update_report(has_formed=True, world=seat.world, seat=seat, step=step, holds_state=holds_state)

    def report_idle(
        self,
        *,
        step: int,
        holds_state: bool,
        snapshot: SnapshotId | None,
        done: bool,
        failure: WorkerFailure | None,
    ) -> None:
        """Report that the main thread has left the user's function and waits for an order."""
        with self._guard.interruption, self._changed:
            self._is_interrupted = False
            # A failure in a generation that has ended already is no news: reported, it would end the next one as well.
            is_answered = failure is None or self._report.generation < self._newest
            self._update_report(
                state=WorkerState.IDLE,
                # Also the answer to the newest `Quiesce`, which may be of a
                # later generation than this worker trained in.
                generation=max(self._report.generation, self._newest),
                step=step,
                holds_state=holds_state,
                snapshot=snapshot,
                is_polling_checkpoints=self._polls_checkpoints,  # what an earlier poll has found does not count
                earliest_stop_step=step,
                is_done=done,
                is_compiling=False,
                has_formed=done,
                failure=None if is_answered else failure,
            )

    def report_failure(self, failure: WorkerFailure, *, step: int) -> None:
        """Report why this process is about to end."""
        self._update_report(failure=failure, step=step)

    def report_world_left(self) -> None:
        """Report that no coordination service is connected any more."""
        self._update_report(world=None)

    def report_checkpoint(self, step: int | None) -> None:
        """Report the step of the newest checkpoint on storage; None: there is none."""
        self._update_report(checkpoint_step=step, is_polling_checkpoints=False)

    # For the main thread: a generation.

    def begin_step(self, step: int) -> None:
        """Return when `step` may start.

        Raises:
            GenerationEnded: it may not, in this generation.
        """
        with self._changed:
            while True:
                if self._is_interrupted or (self._boundary is not None and step >= self._boundary):
                    raise GenerationEnded
                # Paused, it waits at the limit that it has reported, since the
                # leader may choose just that step as the boundary.
                if self._limit is None or step < self._limit or self._boundary is not None:
                    self._next_step = step + 1
                    return
                self._changed.wait()

    def raise_if_ended(self) -> None:
        """Raise GenerationEnded if the generation has ended."""
        if self._is_interrupted:
            raise GenerationEnded

    @property
    def is_interrupted(self) -> bool:
        """Whether the generation that the main thread works in has ended."""
        return self._is_interrupted

    def report_commit(self, step: int, metrics: dict[str, float], *, holds_state: bool) -> None:
        """Report that `step` steps are committed; `holds_state`: this host has all of their state."""
        send_unless_closed(self._connection, StepCommitted(step=step, metrics=metrics))
        # Only the first step of a generation decides anything: each report makes the agent write to the store.
        if not self._report.has_finished_step:
            self._update_report(has_finished_step=True, holds_state=holds_state, step=step)
            self.record_event(EventKind.STEP_COMMITTED, step=step)

    def wait_for_snapshot_server(self) -> str:
        """Return the endpoint of this host's snapshot server, which the agent starts now if need be.

        Raises:
            GenerationEnded: the generation ended before the server ran.
        """
        with self._changed:
            self._snapshot_server = None
            # `_snapshot_server` is cleared before: an endpoint of an earlier server must not be taken for the answer.
            send_unless_closed(self._connection, SnapshotServerRequested())
            while self._snapshot_server is None:
                if self._is_interrupted:
                    raise GenerationEnded
                self._changed.wait()
            return self._snapshot_server

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> Event:
        """Write an event to the host's log, through the agent: the event survives this process's death."""
        event = Event(
            kind=kind,
            host=self._host,
            monotonic_s=time.monotonic(),
            wall_s=time.time(),
            generation=self._report.generation,
            detail=dict(detail),
        )
        send_unless_closed(self._connection, EventOccurred(event=event))
        return event

    # For the guard thread.

    @property
    def state(self) -> WorkerState:
        """What this process is doing."""
        return self._report.state

    def report_compiling(self, is_compiling: bool) -> None:
        """Report that the main thread compiles, which cannot be interrupted, so that it is not taken for a hang."""
        if is_compiling != self._report.is_compiling:
            self._update_report(is_compiling=is_compiling)

    def handle_order(self, order: HandledOrder) -> None:
        """Handle an order, and wake the main thread."""
        with self._changed:
            if isinstance(order, StopWorker):
                self._stop = order
                self._is_interrupted = True
            elif isinstance(order, SnapshotServerReady):
                self._snapshot_server = order.endpoint
            elif isinstance(order, WorkerAdmitted):
                self._is_admitted = True
            elif isinstance(order, HoldTraining):
                self._is_interrupted = self._report.state is not WorkerState.PREPARING
                # An order that was not taken yet is void: the other hosts may go on without this one.
                self._form = None
            else:
                self._handle_generation_order(order)
            self._changed.notify_all()

    def _handle_generation_order(self, order: FormWorld | TakeSeat | Quiesce | Pause | RunToBoundary) -> None:
        number = order.generation if isinstance(order.generation, int) else order.generation.number
        if number < self._newest:
            self.record_event(EventKind.GENERATION_STALE, refused=number, newest=self._newest)
            return
        self._newest = number
        is_idle = self._report.state is WorkerState.IDLE
        if isinstance(order, FormWorld):
            self._form = order
        elif isinstance(order, TakeSeat):
            # Ordered with every record of the generation; a seat is tried once.
            if _get_seat(order) != self._report.seat:
                self._take_seat = order
        elif isinstance(order, Quiesce):
            self._form = self._take_seat = None
            if is_idle:
                self._update_report(
                    generation=number, failure=None, has_formed=False, earliest_stop_step=None
                )
            else:
                self._is_interrupted = True
        elif isinstance(order, Pause):
            # A step that has begun is finished: the next one is the first at which this worker can stop.
            self._limit = self._report.step if is_idle else self._next_step
            self._update_report(generation=number, earliest_stop_step=self._limit)
        else:
            self._boundary = order.boundary_step

    def _update_report(self, **changes: object) -> None:
        with self._changed:
            self._report = msgspec.structs.replace(self._report, **changes)
            send_unless_closed(self._connection, WorkerReported(report=self._report))


def _get_seat(order: TakeSeat) -> SeatId:
    newcomer = order.generation.find_newcomer(order.host)
    assert newcomer is not None, "an agent orders only newcomers to take a seat"
    return SeatId(order.generation.world, newcomer.seat)
