"""An agent's side of the protocol with its worker: generations, notices and reports in, commands out. Pure.

The table of what a generation means for this host. A worker is *seated* if it is a member, with its incarnation, and
not of a generation that is void; a *newcomer* if it was given a seat; else an *outsider*.

| generation | for a seated worker | for a newcomer         | for an outsider                          |
|------------|---------------------|------------------------|------------------------------------------|
| older      | refused             | refused                | refused                                  |
| FINISHED   | the host ends       | the host ends          | the host ends, but where it is past      |
| QUIESCE    | `Quiesce`           | `Quiesce` if it idles  | `Quiesce`                                |
| PAUSE      | `Pause`             | `Quiesce` if it idles  | `Quiesce`                                |
| BOUNDARY   | `RunToBoundary`     | `Quiesce` if it idles  | `Quiesce`                                |
| FORM       | `FormWorld`         | `Quiesce` if it idles  | `Quiesce`; if the host leaves, it leaves |
| ACTIVE     | other services stop | `TakeSeat`             | `Quiesce`; if the host leaves, it leaves |

What it means for a standby is in `standby_orders`.

Rules:
- The end of a job that was interrupted before this host first registered is past: the job begins anew with it.
- If something hangs, every worker that lives gets `TakeStacks` first: with it, stacks are kept before it unwinds. One
  that idles by now has unwound when another's connections closed; its stacks say that it waits.
- A newcomer that runs, and one whose host leaves, is an outsider: the first trained in a generation that left it out.
- A host that leaves stays while others may read a snapshot of which it has a part.
- An outsider gets no order but is killed if it does not respond; and, where collectives cannot be aborted, replaced
  if it has been in a world. One that is busy, and neither idle nor compiling within the timeout, is killed.
- A worker whose membership is void, because its host lost the store in that generation, is an outsider.
"""

import dataclasses
from typing import assert_never

from resilient_jax.cluster.standby_orders import (
    DismissStandby,
    SendStandbyToSeat,
    StandbyCommand,
    order_standby,
    react_to_change,
)
from resilient_jax.cluster.worker_view import WorkerView
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat, WorldId
from resilient_jax.membership.job_start import is_interrupted
from resilient_jax.protocol.generation import Generation, GenerationPhase, JobOutcome
from resilient_jax.protocol.worker_messages import Pause, Quiesce, RunToBoundary, TakeStacks
from resilient_jax.protocol.worker_report import WorkerState, is_busy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrdersConfig:
    """What does not change in an agent's life.

    Attributes:
        quiesce_timeout_s: time that an outsider may take to be idle.
        replaces_workers: whether collectives cannot be aborted.
        reports_lost_seats: whether coordination services are told of members that were given up.
    """

    host: HostName
    quiesce_timeout_s: float
    replaces_workers: bool = False
    reports_lost_seats: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnwindingWorker:
    """A worker that is busy although it is an outsider, and is killed at the deadline."""

    incarnation: Incarnation
    deadline_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrdersState:
    """The complete state of the machine.

    Attributes:
        generation: newest generation that this host has seen.
        void_generation: generation of which this host is no member any more, whatever is stored.
        past: generation in which the job was interrupted before this host first registered; None: no interruption.
        in_world: the newest worker that was ordered to form a world or to take a seat of a world.
        unwinding: worker that has been ordered to unwind, and is waited for.
    """

    generation: Generation | None = None
    void_generation: GenerationNumber | None = None
    past: GenerationNumber | None = None
    is_leaving: bool = False
    in_world: Incarnation | None = None
    unwinding: UnwindingWorker | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRead:
    """The store has this generation; generations may have been skipped, and one may be read twice."""

    generation: Generation


@dataclasses.dataclass(frozen=True, slots=True)
class RegistrationBegan:
    """This host is about to register, while this generation stands."""

    known: Generation | None


@dataclasses.dataclass(frozen=True, slots=True)
class HostRegistered:
    """This host has registered; `known` stood before."""

    known: Generation | None


@dataclasses.dataclass(frozen=True, slots=True)
class LeaveNoticed:
    """The host got a notice to leave."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerChanged:
    """The report, or the process, of the worker or of its standby has changed."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckDue:
    """The time that followed a `CheckUnwound` has passed."""


OrdersEvent = GenerationRead | RegistrationBegan | HostRegistered | LeaveNoticed | WorkerChanged | CheckDue


@dataclasses.dataclass(frozen=True, slots=True)
class SendOrder:
    """Send the worker this order."""

    order: Quiesce | Pause | RunToBoundary | TakeStacks


@dataclasses.dataclass(frozen=True, slots=True)
class SendIntoWorld:
    """Send the worker a `FormWorld`, or a `TakeSeat` if it is a newcomer, with a relay to the world's service."""

    generation: Generation
    is_newcomer: bool


@dataclasses.dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill the worker; it costs a restart."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReplaceWorker:
    """Kill the worker, which has done nothing wrong, and start another at once; if so, once its stacks are kept."""

    why: str
    takes_stacks: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class CheckUnwound:
    """Return with a `CheckDue` in a moment."""


@dataclasses.dataclass(frozen=True, slots=True)
class LeaveJob:
    """The host is not needed any more, and leaves."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndJob:
    """The job has ended."""

    outcome: JobOutcome


@dataclasses.dataclass(frozen=True, slots=True)
class SetUrgency:
    """Give normal priority to what brings redundancy back, or not."""

    is_urgent: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StopOtherServices:
    """End the coordination services of older worlds than this one, and those that were started for it in vain."""

    world: WorldId
    address: str
    """Of the service that its members use; empty: it has ended, or is not known."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReportLostSeats:
    """Tell the coordination service at this address, if it runs here, which members were given up."""

    service_address: str
    seats: tuple[Seat, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RecordStale:
    """Record that an older generation than the newest was refused."""

    refused: GenerationNumber
    newest: GenerationNumber


IntoWorldCommand = SendIntoWorld | SendStandbyToSeat
WorkerCommand = SendOrder | KillWorker | ReplaceWorker | CheckUnwound
HostCommand = LeaveJob | EndJob | SetUrgency | StopOtherServices | ReportLostSeats | RecordStale
OrdersCommand = IntoWorldCommand | WorkerCommand | StandbyCommand | HostCommand
Transition = tuple[OrdersState, tuple[OrdersCommand, ...]]


def handle(
    state: OrdersState,
    event: OrdersEvent,
    worker: WorkerView | None,
    standby: WorkerView | None,
    now_s: float,
    config: OrdersConfig,
) -> Transition:
    """Take in one event, with the worker and its standby as they are at this moment.

    Args:
        worker: newest worker of this host; None before the first.
        standby: the standby of this host; None: there is none.
        now_s: monotonic time in seconds.

    Returns:
        The new state, and the shell's commands, in order.
    """
    state, commands = _handle_for_worker(state, event, worker, now_s, config)
    if standby is None or standby.is_dead:
        return state, commands
    return state, (*commands, *_handle_for_standby(state, event, worker, standby, config.host))


def _handle_for_worker(
    state: OrdersState, event: OrdersEvent, worker: WorkerView | None, now_s: float, config: OrdersConfig
) -> Transition:
    match event:
        case GenerationRead(generation):
            return _read_generation(state, generation, worker, now_s, config)
        case RegistrationBegan(known):
            # A seat in a generation from before this host lost the store is void. Where the host is no member, the
            # generation may be changing just now, and admit the host.
            has_seat = known is not None and known.membership.find_member(config.host) is not None
            void = known.number if known is not None and has_seat else None
            is_past = state.generation is None and known is not None and is_interrupted(known)
            past = known.number if known is not None and is_past else state.past
            return dataclasses.replace(state, void_generation=void, past=past), ()
        case HostRegistered(known):
            return dataclasses.replace(state, generation=state.generation or known), ()
        case LeaveNoticed():
            state = dataclasses.replace(state, is_leaving=True)
            # No other host needs this one, so there is no boundary to wait for.
            return state, () if _is_needed(state, config.host) else (LeaveJob(),)
        case WorkerChanged():
            if state.unwinding is not None and not _is_unwinding(state.unwinding, worker):
                # Now, since it may be a member and train again before the next check.
                state = dataclasses.replace(state, unwinding=None)
            # A stopped worker of a host that was left out answers no order, and so would never join again; another one
            # can.
            is_stuck = worker is not None and worker.is_unresponsive and _is_outsider(state, config.host)
            return state, (KillWorker("it was stopped"),) if is_stuck else ()
        case CheckDue():
            return _check_unwound(state, worker, now_s)
        case _:
            assert_never(event)


def is_start_urgent(state: OrdersState) -> bool:
    """Return whether a worker that starts now may slow down others: none trains, or they have the last copy of the
    state.
    """
    generation = state.generation
    return generation is None or not generation.membership.members or generation.record.losses_left == 0


def _is_outsider(state: OrdersState, host: HostName) -> bool:
    """Return whether a generation stands in which this host is no member."""
    return state.generation is not None and state.generation.membership.find_member(host) is None


def _is_needed(state: OrdersState, host: HostName) -> bool:
    """Return whether other hosts may need this one: as a member, or for its part of a snapshot."""
    generation = state.generation
    return generation is not None and not (_is_outsider(state, host) and generation.state.snapshot is None)


def list_given_up_seats(before: Generation, after: Generation) -> tuple[Seat, ...]:
    """Return the seats whose workers were members, and were given up: by death, a lost lease, or a hang.

    A seat that has another worker by now is not one of them, and a member that leaves between two steps is not given
    up. A new world has no seats of the old one.
    """
    if after.number == before.number or after.membership.world != before.membership.world:
        return ()
    taken = {member.seat for member in (*after.membership.members, *after.membership.newcomers)}
    return tuple(member.seat for member in before.membership.members if member.seat not in taken)


def _read_generation(
    state: OrdersState, generation: Generation, worker: WorkerView | None, now_s: float, config: OrdersConfig
) -> Transition:
    known = state.generation
    if known is not None and generation.number < known.number:
        return state, (RecordStale(generation.number, known.number),)
    if generation.number == state.past:
        return state, ()
    state = dataclasses.replace(state, generation=generation)
    commands: list[OrdersCommand] = [SetUrgency(generation.record.losses_left == 0)]
    # First of all: the members that are left may wait for these, and cannot follow before.
    if known is not None and config.reports_lost_seats:
        seats = list_given_up_seats(known, generation)
        commands.append(ReportLostSeats(known.membership.service_address, seats))
    if generation.phase is GenerationPhase.FINISHED:
        assert generation.outcome is not None, "a finished generation has an outcome"
        return state, (*commands, EndJob(generation.outcome))
    is_new = known is None or known.number < generation.number
    if generation.failures.hang and is_new and worker is not None and not worker.is_dead:
        # Before the order that makes it unwind.
        commands.append(SendOrder(TakeStacks(why=generation.failures.hang)))
    state, orders = _order(state, generation, worker, now_s, config)
    return state, (*commands, *orders)


def _order(
    state: OrdersState, generation: Generation, worker: WorkerView | None, now_s: float, config: OrdersConfig
) -> Transition:
    member = generation.membership.find_member(config.host)
    if worker is None:
        return _order_outsider(state, generation, worker, now_s, config)
    newcomer = generation.membership.find_newcomer(config.host, worker.incarnation)
    # A worker that was started since has nothing of what made its predecessor a member.
    is_seated = member is not None and member.incarnation == worker.incarnation
    if is_seated and generation.number != state.void_generation:
        return _order_member(state, generation, worker)
    if newcomer is not None:
        return _order_newcomer(state, generation, worker, now_s, config)
    return _order_outsider(state, generation, worker, now_s, config)


def _order_member(state: OrdersState, generation: Generation, worker: WorkerView) -> Transition:
    match generation.phase:
        case GenerationPhase.QUIESCE:
            return state, (SendOrder(Quiesce(generation=generation.number, reason=generation.reason)),)
        case GenerationPhase.PAUSE:
            order = Pause(
                generation=generation.number,
                next_members=generation.planned.next_members,
                ends_job=generation.planned.ends_job,
            )
            return state, (SendOrder(order),)
        case GenerationPhase.BOUNDARY:
            step = generation.planned.boundary_step
            assert step is not None, "a boundary has a step"
            # Of a job that ends there memory keeps nothing.
            takes_snapshot = not (generation.planned.parts_stay or generation.planned.ends_job)
            order = RunToBoundary(
                generation=generation.number, boundary_step=step, takes_snapshot=takes_snapshot
            )
            return state, (SendOrder(order),)
        case GenerationPhase.FORM:
            return _send_into_world(state, generation, worker, is_newcomer=False)
        case GenerationPhase.ACTIVE:
            # Only now, when all members are in the new world: until then some may still be leaving the old one.
            return state, (
                StopOtherServices(generation.membership.world, generation.membership.service_address),
            )
        case GenerationPhase.FINISHED:
            return state, ()
        case _:
            assert_never(generation.phase)


def _send_into_world(
    state: OrdersState, generation: Generation, worker: WorkerView, *, is_newcomer: bool
) -> Transition:
    state = dataclasses.replace(state, in_world=worker.incarnation)
    return state, (SendIntoWorld(generation, is_newcomer),)


def _order_newcomer(
    state: OrdersState, generation: Generation, worker: WorkerView, now_s: float, config: OrdersConfig
) -> Transition:
    """Have the worker take the seat that it was given; one that has it waits while the members change."""
    if generation.phase is GenerationPhase.ACTIVE and not state.is_leaving:
        return _send_into_world(state, generation, worker, is_newcomer=True)
    if worker.report.state is WorkerState.RUNNING or state.is_leaving:
        # It trained in an earlier generation, from which it was left out.
        return _order_outsider(state, generation, worker, now_s, config)
    if worker.report.state is WorkerState.IDLE:
        # An idle worker answers at once; it may join only with that answer (Membership.dropped_workers).
        return state, (SendOrder(Quiesce(generation=generation.number, reason="not a member yet")),)
    return state, ()


def _order_outsider(
    state: OrdersState, generation: Generation, worker: WorkerView | None, now_s: float, config: OrdersConfig
) -> Transition:
    """Keep the worker of a host that is no member from training; it may ask to join."""
    if state.is_leaving and generation.phase in (GenerationPhase.FORM, GenerationPhase.ACTIVE):
        # While there is a snapshot the others still read what only this host's memory may have.
        return state, (LeaveJob(),) if generation.state.snapshot is None else ()
    if worker is None or worker.has_exited:
        return state, ()
    if worker.is_unresponsive:
        return state, (KillWorker("it was suspended, and the others continued without it"),)
    if config.replaces_workers and worker.incarnation == state.in_world:
        return state, (ReplaceWorker(generation.reason, takes_stacks=bool(generation.failures.hang)),)
    # An idle worker answers at once; it may join only with that answer (Membership.dropped_workers).
    order = SendOrder(Quiesce(generation=generation.number, reason="left out of the generation"))
    is_waited_for = state.unwinding is not None and state.unwinding.incarnation == worker.incarnation
    if not is_busy(worker.report.state) or is_waited_for:
        return state, (order,)
    deadline_s = now_s + config.quiesce_timeout_s
    waited_for = UnwindingWorker(incarnation=worker.incarnation, deadline_s=deadline_s)
    return dataclasses.replace(state, unwinding=waited_for), (order, CheckUnwound())


def _check_unwound(state: OrdersState, worker: WorkerView | None, now_s: float) -> Transition:
    """Kill the worker that was waited for at its deadline; its successor has done nothing wrong."""
    unwinding = state.unwinding
    if unwinding is None:
        return state, ()
    if worker is None or not _is_unwinding(unwinding, worker):
        return dataclasses.replace(state, unwinding=None), ()
    if now_s > unwinding.deadline_s and not worker.report.is_compiling:
        why = "it was left out of the generation and did not stop training"
        return dataclasses.replace(state, unwinding=None), (KillWorker(why),)
    return state, (CheckUnwound(),)


def _is_unwinding(unwinding: UnwindingWorker, worker: WorkerView | None) -> bool:
    """Return whether the worker that is waited for is still there, and busy."""
    if worker is None or worker.incarnation != unwinding.incarnation or worker.has_exited:
        return False
    return is_busy(worker.report.state)


def _handle_for_standby(
    state: OrdersState,
    event: OrdersEvent,
    worker: WorkerView | None,
    standby: WorkerView,
    host: HostName,
) -> tuple[SendStandbyToSeat | StandbyCommand, ...]:
    """Return what an event means for a standby that lives, given the state after it."""
    if state.is_leaving:
        return (DismissStandby(),)
    match event:
        case GenerationRead(read) if state.generation is None or read.number >= state.generation.number:
            return order_standby(read, standby, host)
        case WorkerChanged():
            return react_to_change(state.generation, worker, standby, host)
        case _:
            return ()
