"""The worker's side of the protocol with its agent: a pure machine, run by `agent_connection` under one lock.

`protocol_table` has which event leads from which state to which, and what each order does in each state. In a
generation the main thread says `report_formed`, then begins steps by `try_begin_step`, and reports its first commit.

Rules:
- `newest` only grows; an order of an older generation is refused, and changes nothing.
- The main thread begins a step only by `try_begin_step`: not when interrupted (END), not at the boundary (END), and,
  while paused, not at the limit that it has reported (WAIT), since the leader may choose just that step.
- The main thread is interrupted from the moment its generation has ended until it reports idle.
- A pause is held only where this worker has a part of the state. The members release it before the same step, so that
  none of them waits for an order in a step that the others need it for; each has one more step to get that order in.
- Before the job ends a training that saves checkpoints has one more step after its limit, the last one, in which it
  knows that (`is_leaving`).
- A world is formed once in a generation, and a seat tried once: agents may send an order again.
- A failure in a generation that has ended is not reported, but for one that another host's may be the same as (LATE).
- An order is taken and reported in one transition, so that the next order finds this worker busy, and interrupts it.
"""

import dataclasses
import enum
from typing import assert_never

from resilient_jax.ids import GenerationNumber, WorldId
from resilient_jax.protocol.generation import SeatId
from resilient_jax.protocol.plan_records import PlanOutlook
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import NeededHosts
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.protocol.state_records import NextMembers, StatePart
from resilient_jax.protocol.worker_messages import (
    FormWorld,
    HoldTraining,
    Pause,
    Quiesce,
    RunToBoundary,
    SnapshotServerReady,
    StopWorker,
    TakeSeat,
    WorkerAdmitted,
    WorkerReported,
)
from resilient_jax.protocol.worker_report import (
    CheckpointReport,
    StateDoubt,
    WorkerFailure,
    WorkerFailureKind,
    WorkerReport,
    WorkerState,
    is_busy,
)
from resilient_jax.protocol.worker_tasks import OverdueTask
from resilient_jax.worker.protocol_table import (
    GenerationOrder,
    HandledOrder,
    WorkerEvent,
    does_interrupt,
    find_next_state,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldPause:
    """A pause that is not answered before blocks are copied for the members after it.

    Attributes:
        generation: number of the generation that the pause leads to.
        received_s: monotonic time at which the order came, in seconds.
    """

    generation: GenerationNumber
    next_members: NextMembers
    received_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProtocol:
    """The complete state of the machine.

    Attributes:
        report: the worker's report of itself, as it was last sent.
        polls_checkpoints: whether a `report_checkpoint` follows whenever this worker is idle; decisions about a lost
            state wait for it.
        newest: the newest generation that an order named.
        entered: the newest generation in which the main thread was sent into a world.
        form: the world that the main thread is to form next.
        take_seat: seat that the main thread is to take next.
        stop: set when the job is over.
        is_interrupted: whether the generation that the main thread works in has ended.
        next_step: the first step that has not begun.
        limit: the step that must not start before a `RunToBoundary`, once paused.
        boundary: the step that must not start in this generation.
        takes_snapshot: whether a snapshot of a state that no host has all of is waited for at the boundary.
        held_pause: pause that is not answered before blocks are copied.
        prepared_for: the newest generation that blocks are copied for, whose pause is not held; None: no blocks were
            copied.
        snapshot_server: the answer to the last request for a snapshot server.
        is_admitted: whether the job has let this worker in.
    """

    report: WorkerReport
    polls_checkpoints: bool
    newest: GenerationNumber
    entered: GenerationNumber
    form: FormWorld | None = None
    take_seat: TakeSeat | None = None
    stop: StopWorker | None = None
    is_interrupted: bool = False
    next_step: int = 0
    limit: int | None = None
    boundary: int | None = None
    takes_snapshot: bool = True
    ends_job: bool = False
    held_pause: HeldPause | None = None
    prepared_for: GenerationNumber | None = None
    snapshot_server: str | None = None
    is_admitted: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class OrderRefused:
    """An order is of an older generation than another that this worker has received."""

    refused: GenerationNumber
    newest: GenerationNumber


WorkerAnswer = WorkerReported | OrderRefused
Transition = tuple[WorkerProtocol, tuple[WorkerAnswer, ...]]
"""The new state, and what the shell sends or records, in order."""


class StepDecision(enum.Enum):
    """Whether the main thread may begin a step."""

    START = enum.auto()
    WAIT = enum.auto()
    """Not before the next order."""
    END = enum.auto()
    """Not in this generation."""


def make_initial_protocol(*, polls_checkpoints: bool) -> WorkerProtocol:
    """Return the state of a worker that has just started."""
    return WorkerProtocol(
        report=WorkerReport(
            checkpoints=CheckpointReport(
                is_polling_checkpoints=polls_checkpoints, saves_on_notice=polls_checkpoints
            )
        ),
        polls_checkpoints=polls_checkpoints,
        newest=GenerationNumber(0),
        entered=GenerationNumber(0),
    )


def _move(before: WorkerProtocol, event: WorkerEvent, /, **changes: object) -> Transition:
    """Change the worker's state as the table says, and report that."""
    return _report(before, state=find_next_state(before.report.state, event), **changes)


def _report(before: WorkerProtocol, /, **changes: object) -> Transition:
    report = change_fields(before.report, **changes)
    return dataclasses.replace(before, report=report), (WorkerReported(report=report),)


# The agent's orders.


def handle_order(state: WorkerProtocol, order: HandledOrder, now_s: float) -> Transition:
    """Take in an order of the agent, at a monotonic time in seconds."""
    if isinstance(order, GenerationOrder):
        number = order.generation if isinstance(order.generation, int) else order.generation.number
        if number < state.newest:
            return state, (OrderRefused(number, state.newest),)
        state = dataclasses.replace(state, newest=number)
    if does_interrupt(order, state.report.state):
        state = dataclasses.replace(state, is_interrupted=True)
    match order:
        case StopWorker():
            return dataclasses.replace(state, stop=order), ()
        case SnapshotServerReady():
            return dataclasses.replace(state, snapshot_server=order.endpoint), ()
        case WorkerAdmitted():
            return dataclasses.replace(state, is_admitted=True), ()
        case HoldTraining():
            # An order that was not taken yet is void: the other hosts may go on without this one.
            return dataclasses.replace(state, form=None), ()
        case _:
            return _handle_generation_order(state, order, now_s)


def _handle_generation_order(state: WorkerProtocol, order: GenerationOrder, now_s: float) -> Transition:
    number = state.newest
    is_idle = state.report.state is WorkerState.IDLE
    match order:
        case FormWorld():
            # Ordered again where an agent reads a generation twice: it would be taken after that generation's end.
            return (state if number <= state.entered else dataclasses.replace(state, form=order)), ()
        case TakeSeat():
            # Ordered with every record of the generation; a seat is tried once.
            is_tried = get_seat(order) == state.report.place.seat
            return (state if is_tried else dataclasses.replace(state, take_seat=order)), ()
        case Quiesce():
            state = dataclasses.replace(state, form=None, take_seat=None, held_pause=None)
            if not is_idle:
                return state, ()
            return _report(state, generation=number, failure=None, has_formed=False, earliest_stop_step=None)
        case Pause(next_members=NextMembers() as members) if _must_hold(state, order):
            before = state.held_pause
            # Agents may send an order again: copies are waited for since it came first.
            since_s = before.received_s if before is not None and before.generation == number else now_s
            held = HeldPause(generation=number, next_members=members, received_s=since_s)
            return dataclasses.replace(state, held_pause=held), ()
        case Pause():
            # A step that has begun is finished: the next one is the first at which this worker can stop.
            limit = state.report.held.step if is_idle else state.next_step
            # Copies are waited for no more: to let the pause come later must not move the limit.
            state = dataclasses.replace(state, limit=limit, held_pause=None, ends_job=order.ends_job)
            saves = order.ends_job and not is_idle and state.report.checkpoints.saves_on_notice
            return _report(state, generation=number, earliest_stop_step=limit + saves)
        case RunToBoundary():
            boundary, takes_snapshot = order.boundary_step, order.takes_snapshot
            return dataclasses.replace(state, boundary=boundary, takes_snapshot=takes_snapshot), ()
        case _:
            assert_never(order)


def _must_hold(state: WorkerProtocol, pause: Pause) -> bool:
    """Return whether blocks are copied before a pause: it is held until `answer_pause`."""
    is_training = state.report.state is WorkerState.RUNNING and state.report.held.part is not None
    is_prepared = state.prepared_for is not None and state.prepared_for >= pause.generation
    return is_training and not is_prepared


def get_seat(order: TakeSeat) -> SeatId:
    """Return the seat that a worker is to take."""
    return SeatId(order.generation.membership.world, order.seat)


# The main thread between generations.


def join_job(state: WorkerProtocol, endpoint: str) -> Transition:
    """The job has let this worker in, or is over: the worker waits for an order, and serves its state at `endpoint`."""
    assert state.is_admitted or state.stop is not None, "a worker joins only when it is let in"
    return _move(state, WorkerEvent.JOINED, endpoint=endpoint)


def try_take_order(
    state: WorkerProtocol,
) -> tuple[WorkerProtocol, FormWorld | TakeSeat | StopWorker | None, tuple[WorkerAnswer, ...]]:
    """Take the order that the main thread is to follow next; None if there is none yet."""
    # First, because a world that was ordered earlier is over, too.
    if state.stop is not None:
        return state, state.stop, ()
    if (form := state.form) is not None:
        state = dataclasses.replace(
            state,
            form=None,
            entered=form.generation.number,
            take_seat=None,
            is_interrupted=False,
            limit=None,
            boundary=None,
            takes_snapshot=True,
            ends_job=False,
            held_pause=None,
            next_step=state.report.held.step,
        )
        state, answers = _move(
            state,
            WorkerEvent.TOOK_WORLD,
            generation=form.generation.number,
            has_formed=False,
            has_finished_step=False,
            is_done=False,
            is_compiling=False,
            # A receiver gives up what it has for what it is sent.
            part=state.report.held.part
            if form.generation.state.is_in_parts and form.host not in form.generation.state.receivers
            else None,
            snapshot=None,
            copied=None,
            is_polling_checkpoints=state.polls_checkpoints,
            earliest_stop_step=None,
            failure=None,
            overdue=None,
            doubt=StateDoubt(),
            plans=None,
            entered=form.generation.number,
        )
        return state, form, answers
    if (seat_order := state.take_seat) is not None:
        state = dataclasses.replace(state, take_seat=None, is_interrupted=False)
        # What it has is on the devices of the world that it leaves.
        state, answers = _move(
            state, WorkerEvent.TOOK_SEAT, seat=get_seat(seat_order), part=None, failure=None
        )
        return state, seat_order, answers
    return state, None, ()


def report_seat(state: WorkerProtocol, world: WorldId | None, failure: WorkerFailure | None) -> Transition:
    """The seat of the last order is taken, in `world`; or, with None, it could not be."""
    return _move(
        dataclasses.replace(state, is_interrupted=False),
        WorkerEvent.TRIED_SEAT,
        generation=max(state.report.generation, state.newest),
        world=world,
        is_compiling=False,
        failure=failure,
        overdue=None,
    )


def report_formed(state: WorkerProtocol, seat: SeatId, step: int, *, holds_state: bool) -> Transition:
    """The world is formed and the state of `step` found; on this host, if `holds_state`."""
    return _report(
        dataclasses.replace(state, next_step=step),
        has_formed=True,
        world=seat.world,
        seat=seat,
        step=step,
        holds_state=holds_state,
    )


def report_idle(
    state: WorkerProtocol,
    *,
    step: int,
    holds_state: bool,
    part: StatePart | None,
    snapshot: SnapshotId | None,
    copied: SnapshotId | None,
    done: bool,
    failure: WorkerFailure | None,
) -> Transition:
    """The main thread has left the user's function, and waits for an order."""
    # A failure in a generation that has ended already is no news: reported, it would end the next one as well.
    is_answered = failure is None or state.report.generation < state.newest
    is_late = failure is not None and failure.kind is WorkerFailureKind.LATE  # ends none, but may explain one
    return _move(
        dataclasses.replace(state, is_interrupted=False, held_pause=None),
        WorkerEvent.LEFT_TRAINING,
        # Also the answer to the newest `Quiesce`, which may be of a
        # later generation than this worker trained in.
        generation=max(state.report.generation, state.newest),
        step=step,
        holds_state=holds_state,
        part=part,
        snapshot=snapshot,
        copied=copied,
        is_polling_checkpoints=state.polls_checkpoints,  # what an earlier poll has found does not count
        earliest_stop_step=step,
        is_done=done,
        is_compiling=False,
        has_formed=done,
        failure=None if is_answered and not is_late else failure,
        overdue=None,
        # Also if it is answered: only this worker may know it.
        doubt=failure.doubt if failure is not None else StateDoubt(),
    )


def report_failure(state: WorkerProtocol, found_at: tuple[WorkerFailure, int]) -> Transition:
    """This process is about to end, for this reason, after so many steps."""
    failure, step = found_at
    return _report(state, failure=failure, step=step, doubt=failure.doubt)


def report_world(state: WorkerProtocol, world: WorldId | None) -> Transition:
    """The coordination service of this world is connected; None: there is none any more."""
    return _report(state, world=world)


def report_detached(state: WorkerProtocol, world: WorldId) -> Transition:
    """The coordination service of this world was found dead."""
    return _report(state, detached_from=world)


def report_checkpoint(state: WorkerProtocol, step: int | None) -> Transition:
    """The newest checkpoint on storage is of `step`; None: there is none."""
    return _report(state, checkpoint_step=step, is_polling_checkpoints=False)


# The main thread in a generation.


def try_begin_step(state: WorkerProtocol, step: int) -> tuple[WorkerProtocol, StepDecision]:
    """Decide whether `step` may start; if so, it has begun."""
    has_reached_boundary = state.boundary is not None and step >= state.boundary
    if state.is_interrupted or has_reached_boundary:
        return state, StepDecision.END
    if state.limit is None or step < state.limit or state.boundary is not None:
        return dataclasses.replace(state, next_step=step + 1), StepDecision.START
    return state, StepDecision.WAIT


def report_commit(
    state: WorkerProtocol, step: int, *, holds_state: bool, part: StatePart | None
) -> Transition:
    """`step` steps are committed; only the first commit of a generation decides anything, and is reported.

    Each report makes the agent write to the store.
    """
    if state.report.place.has_finished_step:
        return state, ()
    return _report(state, has_finished_step=True, holds_state=holds_state, part=part, step=step)


def answer_pause(state: WorkerProtocol, generation: GenerationNumber) -> Transition:
    """Answer the pause before a generation, between two steps: blocks are copied for it, as far as they are.

    The next step may begin, so that training does not wait for the leader.
    """
    held, state = state.held_pause, dataclasses.replace(state, prepared_for=generation)
    if held is None or held.generation > generation:
        return state, ()
    limit = state.next_step + 1
    state = dataclasses.replace(state, held_pause=None, limit=limit)
    return _report(state, generation=held.generation, earliest_stop_step=limit)


def is_leaving(state: WorkerProtocol) -> bool:
    """Return whether the job ends after the step under way, the last one that has begun, so that it is to be saved.

    All members know it in the same step: none begins the last one before it knows where the boundary is.
    """
    return state.ends_job and state.boundary is not None and state.next_step == state.boundary


def report_saving(state: WorkerProtocol, _: None) -> Transition:
    """The training asks whether it `is_leaving`: it saves a checkpoint then."""
    return (
        _report(state, saves_on_notice=True) if not state.report.checkpoints.saves_on_notice else (state, ())
    )


def report_compiling(state: WorkerProtocol, is_compiling: bool) -> Transition:
    """The main thread compiles, which cannot be interrupted, so that it is not taken for a hang; or does not."""
    if is_compiling == state.report.is_compiling:
        return state, ()
    return _report(state, is_compiling=is_compiling)


def report_overdue(state: WorkerProtocol, overdue: OverdueTask | None) -> Transition:
    """The main thread's task takes longer than its deadline; or, with None, it made progress again."""
    if overdue == state.report.overdue or (overdue is not None and not is_busy(state.report.state)):
        return state, ()  # a thread that has unwound meanwhile keeps no other host waiting
    return _report(state, overdue=overdue)


def report_slow_hosts(
    state: WorkerProtocol, found: tuple[tuple[SlowHost, ...], Slowdown | None]
) -> Transition:
    """These hosts are slow, and cost so much, as this worker has found, which is the first of its generation."""
    slow_hosts, slowdown = found
    if (slow_hosts, slowdown) == (state.report.findings.slow_hosts, state.report.findings.slowdown):
        return state, ()
    return _report(state, slow_hosts=slow_hosts, slowdown=slowdown)


def report_needed_hosts(state: WorkerProtocol, needed: NeededHosts) -> Transition:
    """One replica spans so many hosts: fewer cannot train."""
    return _report(state, needed_hosts=needed)


def report_plans(state: WorkerProtocol, plans: PlanOutlook) -> Transition:
    """Losses of hosts would make this of planned axes, as this worker has estimated."""
    return _report(state, plans=plans) if plans != state.report.findings.plans else (state, ())


def request_snapshot_server(state: WorkerProtocol) -> WorkerProtocol:
    """Forget an earlier server's endpoint, which must not be taken for the answer to the request that follows."""
    return dataclasses.replace(state, snapshot_server=None)
