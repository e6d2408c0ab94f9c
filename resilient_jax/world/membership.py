"""The membership machine: who is in, and what happens next. Pure: no socket, clock or randomness.

The rules, from which the code below follows:

1. A generation's number only grows, and every change of its members takes a new number.
2. A number passes through its phases in one direction:
   unplanned  QUIESCE -> FORM -> ACTIVE;  planned  PAUSE -> BOUNDARY -> FORM -> ACTIVE.
3. Nobody is a member in FORM who has not said, for this very number or as a join request, that it is
   idle. So nobody trains in two generations at once. An idle worker that was dropped before it
   answered may have been sent into a world since it last spoke: it is no joiner before it answers.
4. A member that dies, stops or fails, in any phase, leads to QUIESCE under the next number with the
   members that are left. Whoever does not become idle before the deadline is left out as well.
5. Hosts join, and leave after a notice, only between two steps (planned), except that whoever is ready
   when an unplanned change settles comes in with it.
6. The newest state among those who were members wins; the others fetch it. If nobody holds the state of a
   job that had made progress, the job stops and says so, unless it was told to start again.
7. An error in the user's own code ends the job with that error. A collective that fails although nobody
   died is tried again a few times, and then ends the job with what it said.

The machine reads only statuses (levels), so a new leader starts it from the store and goes on.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import assert_never

import msgspec

from resilient_jax.errors import ExitCode
from resilient_jax.ids import GenerationNumber, HostName, ProcessIndex, WorldId
from resilient_jax.protocol.records import (
    Change,
    Dropped,
    FailureKind,
    Generation,
    HostStatus,
    Member,
    Outcome,
    OutcomeKind,
    Phase,
    ServiceStatus,
    Source,
    WorkerState,
    WorkerStatus,
)

RESTART_EXIT_CODE = 75
"""A worker that exits with this asks to be started again (sysexits' EX_TEMPFAIL); not a user's error."""


class AfterStateLoss(enum.StrEnum):
    """What to do when nobody holds the state of a job that had made progress."""

    STOP = "stop"
    RESTART = "restart"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The knobs of the machine. Times in seconds."""

    expected_hosts: int
    min_hosts: int = 1
    start_deadline_s: float = 300.0
    regroup_s: float = 5.0
    """How long to wait for the others when all come back at once, holding state (the store was away)."""
    quiesce_deadline_s: float = 5.0
    compile_deadline_s: float = 600.0
    """A worker that compiles cannot be interrupted; it is waited for this long instead."""
    forming_deadline_s: float = 60.0
    collective_retry_limit: int = 3
    after_state_loss: AfterStateLoss = AfterStateLoss.STOP


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MembershipState:
    """Everything the machine knows."""

    generation: Generation
    hosts: Mapping[HostName, HostStatus]
    phase_since_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class HostChanged:
    """A host appeared, or its status changed."""

    status: HostStatus


@dataclasses.dataclass(frozen=True, slots=True)
class HostGone:
    """A host's lease expired or was given back."""

    host: HostName


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


MembershipEvent = HostChanged | HostGone | Tick


@dataclasses.dataclass(frozen=True, slots=True)
class Publish:
    """Write this generation to the store, fenced by leadership and by the generation before."""

    generation: Generation


@dataclasses.dataclass(frozen=True, slots=True)
class PrepareService:
    """Have a coordination service for this world run on the leader's host; idempotent."""

    world: WorldId
    nodes: int


Command = Publish | PrepareService

EMPTY = Generation(number=GenerationNumber(1), phase=Phase.QUIESCE, reason="the job starts")


def initial_state(generation: Generation | None, now: float) -> MembershipState:
    """Where a new leader starts: from the stored generation, or from nothing."""
    return MembershipState(generation=generation or EMPTY, hosts={}, phase_since_s=now)


def handle(
    state: MembershipState, event: MembershipEvent, now: float, rules: Rules
) -> tuple[MembershipState, tuple[Command, ...]]:
    """Takes one event in; gives the new state and what the shell has to do, in order."""
    state = _absorb(state, event)
    commands: list[Command] = []
    while (move := _next_move(state, now, rules)) is not None:
        if isinstance(move, PrepareService):
            commands.append(move)
            break
        state = dataclasses.replace(state, generation=move, phase_since_s=now)
        commands.append(Publish(move))
    return state, tuple(commands)


def _absorb(state: MembershipState, event: MembershipEvent) -> MembershipState:
    match event:
        case HostChanged(status):
            return dataclasses.replace(state, hosts={**state.hosts, status.host: status})
        case HostGone(host):
            left = {name: status for name, status in state.hosts.items() if name != host}
            return dataclasses.replace(state, hosts=left)
        case Tick():
            return state
        case _:
            assert_never(event)


def _next_move(state: MembershipState, now: float, rules: Rules) -> Generation | PrepareService | None:
    generation = state.generation
    if generation.phase is Phase.FINISHED:
        return None
    if outcome := _user_error(state):
        return _finish(generation, outcome)
    if generation.phase is not Phase.QUIESCE and (disruption := _disruption(state)):
        return _quiesce(state, disruption)
    match generation.phase:
        case Phase.QUIESCE:
            return _after_quiesce(state, now, rules)
        case Phase.PAUSE:
            return _after_pause(state)
        case Phase.BOUNDARY:
            return _settle(state, now, rules) if all(map(_idle, _members(state))) else None
        case Phase.FORM:
            return _after_form(state, now, rules)
        case Phase.ACTIVE:
            return _while_active(state)
        case _:
            assert_never(generation.phase)


# What the statuses say.


def _worker(state: MembershipState, member: Member) -> WorkerStatus | None:
    """The member's own worker: alive, and the very one that became a member."""
    status = state.hosts.get(member.host)
    worker = status.worker if status else None
    if worker is None or worker.incarnation != member.incarnation or not worker.alive:
        return None
    return worker


def _members(state: MembershipState) -> list[WorkerStatus]:
    """The members' workers that are alive, in order of process index."""
    return [w for m in state.generation.members if (w := _worker(state, m)) is not None]


def _survivors(state: MembershipState) -> tuple[Member, ...]:
    return tuple(m for m in state.generation.members if _worker(state, m) is not None)


def _idle(worker: WorkerStatus) -> bool:
    return worker.report.state is WorkerState.IDLE


def _draining(state: MembershipState, host: HostName) -> bool:
    return host in state.hosts and state.hosts[host].draining


def _joiners(state: MembershipState) -> list[HostStatus]:
    """Hosts whose worker is ready and not a member, by name."""
    seated = {(m.host, m.incarnation) for m in _survivors(state)}
    return [
        status
        for host, status in sorted(state.hosts.items())
        if status.worker is not None
        and status.worker.alive
        and _idle(status.worker)
        and not status.draining
        and (host, status.worker.incarnation) not in seated
        and not _owes_answer(state.generation, host, status.worker)
    ]


def _owes_answer(generation: Generation, host: HostName, worker: WorkerStatus) -> bool:
    """Whether this worker was dropped, and its report may be older than the order that sent it training."""
    return any(
        dropped.host == host
        and dropped.incarnation == worker.incarnation
        and worker.report.generation < dropped.answer
        for dropped in generation.dropped
    )


def _dropped(state: MembershipState, members: tuple[Member, ...]) -> tuple[Dropped, ...]:
    """Who owes an answer when only `members` stay: from before, and those who were just dropped while idle.

    Who ran when it last spoke owes none: when it says that it is idle, it has unwound.
    """
    generation = state.generation
    # In FORM all have answered this number before they were sent in; else this number is the question.
    answer = GenerationNumber(generation.number + (generation.phase is Phase.FORM))
    found = {d.host: d for d in generation.dropped}
    for member in generation.members:
        status = state.hosts.get(member.host)
        worker = status.worker if status else None
        if member not in members and worker is not None and worker.incarnation == member.incarnation:
            found[member.host] = Dropped(host=member.host, incarnation=member.incarnation, answer=answer)
    workers = {host: status.worker for host, status in state.hosts.items()}
    return tuple(
        d
        for d in found.values()
        if (worker := workers.get(d.host)) is not None
        and worker.incarnation == d.incarnation
        and worker.exit_code is None
        and _idle(worker)
        and worker.report.generation < d.answer
    )


def _services(state: MembershipState, world: WorldId) -> list[ServiceStatus]:
    """More than one where a former leader, or an earlier guess of the number of members, had its own."""
    return [s for status in state.hosts.values() for s in status.services if s.world == world]


def _has_service(state: MembershipState) -> bool:
    """Whether the very service that the members connect to runs."""
    generation = state.generation
    return any(s.address == generation.service for s in _services(state, generation.world))


def _user_error(state: MembershipState) -> Outcome | None:
    """The user's own error, from whichever worker; None if there is none."""
    for host, status in sorted(state.hosts.items()):
        worker = status.worker
        if worker is None:
            continue
        failure = worker.report.failure
        code = worker.exit_code
        if code is not None and code > 0 and code != RESTART_EXIT_CODE:
            text = worker.error or (failure.text if failure else "")
            return Outcome(kind=OutcomeKind.USER_ERROR, exit_code=code, host=host, message=text)
        if code == 0 and not worker.report.done:
            text = "the script ended without rj.run(...) having finished; call rj.run(train) in it"
            return Outcome(
                kind=OutcomeKind.USER_ERROR, exit_code=int(ExitCode.USAGE), host=host, message=text
            )
        if failure is not None and failure.kind is FailureKind.USER and code is None and not worker.stopped:
            return Outcome(kind=OutcomeKind.USER_ERROR, exit_code=1, host=host, message=failure.text)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Disruption:
    reason: str
    failed_host: HostName | None = None
    failure: str = ""


def _disruption(state: MembershipState) -> _Disruption | None:
    """Why the members cannot go on as they are; None if they can."""
    generation = state.generation
    lost = [m.host for m in generation.members if _worker(state, m) is None]
    if lost:
        return _Disruption(f"lost {_names(lost)}")
    for member, worker in zip(generation.members, _members(state), strict=True):
        failure = worker.report.failure
        # In FORM, a joiner may still carry the failure of a generation it was in long ago.
        is_old = generation.phase is Phase.FORM and worker.report.generation < generation.number
        if failure is not None and failure.kind is FailureKind.COLLECTIVE and not is_old:
            return _Disruption(f"a collective failed on {member.host}", member.host, failure.text)
        if _stopped_early(generation, worker):
            return _Disruption(f"{member.host} stopped training (its link to the store was lost)")
    cliques_pending = generation.phase is Phase.FORM or (
        generation.phase is Phase.ACTIVE and not _all_steady(state)
    )
    if cliques_pending and not _has_service(state):
        return _Disruption("lost the coordination service before the world was complete")
    return None


def _stopped_early(generation: Generation, worker: WorkerStatus) -> bool:
    """Whether it is idle where it should train: it held because it lost the store."""
    report = worker.report
    if report.done or report.state is not WorkerState.IDLE:
        return False
    at_boundary = generation.phase is Phase.BOUNDARY and report.step == generation.boundary
    return generation.phase is not Phase.FORM and not at_boundary


def _progress(state: MembershipState) -> int:
    """The newest committed step that anybody is known to have reached."""
    of_workers = [w.report.step for w in _members(state)]
    of_hosts = [status.step for status in state.hosts.values()]
    return max([state.generation.progress, *of_workers, *of_hosts])


def _all_steady(state: MembershipState) -> bool:
    return all(w.report.steady or w.report.done for w in _members(state))


# The moves.


def _finish(generation: Generation, outcome: Outcome) -> Generation:
    return msgspec.structs.replace(
        generation, phase=Phase.FINISHED, outcome=outcome, reason=str(outcome.kind)
    )


def _quiesce(
    state: MembershipState, why: _Disruption, members: tuple[Member, ...] | None = None
) -> Generation:
    """The next number, with the members that are left."""
    generation = state.generation
    members = _survivors(state) if members is None else members
    progress = _progress(state)
    nobody_died = members == generation.members
    # The members' own steps: one that only a dead host committed would look like progress for ever.
    made_progress = any(w.report.step > generation.step for w in _members(state))
    attempts = (1 if made_progress else generation.attempts + 1) if nobody_died else 0
    return msgspec.structs.replace(
        generation,
        number=GenerationNumber(generation.number + 1),
        phase=Phase.QUIESCE,
        members=members,
        boundary=None,
        dropped=_dropped(state, members),
        progress=progress,
        attempts=attempts,
        failed_host=why.failed_host,
        failure=why.failure,
        reason=why.reason,
    )


def _after_quiesce(state: MembershipState, now: float, rules: Rules) -> Generation | PrepareService | None:
    generation = state.generation
    lost = [m.host for m in generation.members if _worker(state, m) is None]
    if lost:
        return _quiesce(state, _Disruption(f"lost {_names(lost)}"))
    waited_s = now - state.phase_since_s
    waiting: list[tuple[Member, WorkerStatus]] = []
    here: list[WorkerStatus] = []
    for member, worker in zip(generation.members, _members(state), strict=True):
        if _idle(worker) and worker.report.generation >= generation.number:
            here.append(worker)
        else:
            waiting.append((member, worker))
    # Leaving out everybody who holds the state would lose it: then patience is the better part. Only who
    # is idle knows what it holds: a worker that fetches or commits just now has not said so yet.
    patient = not here or (_progress(state) > 0 and not any(w.report.holds_state for w in here))
    for _, worker in waiting:
        slow = patient or worker.report.busy
        if waited_s <= (rules.compile_deadline_s if slow else rules.quiesce_deadline_s):
            return None
    if waiting:
        late = [member for member, _ in waiting]
        left = tuple(m for m in generation.members if m not in late)
        names = _names(m.host for m in late)
        return _quiesce(state, _Disruption(f"{names} did not stop within {waited_s:.1f} s"), left)
    return _settle(state, now, rules)


def _after_pause(state: MembershipState) -> Generation | None:
    generation = state.generation
    limits = [w.report.limit for w in _members(state) if w.report.generation == generation.number]
    if len(limits) < len(generation.members) or None in limits:
        return None
    boundary = max(limit for limit in limits if limit is not None)
    return msgspec.structs.replace(generation, phase=Phase.BOUNDARY, boundary=boundary)


def _after_form(state: MembershipState, now: float, rules: Rules) -> Generation | None:
    generation = state.generation
    late = [
        member.host
        for member, worker in zip(generation.members, _members(state), strict=True)
        if not (worker.report.formed and worker.report.generation == generation.number)
    ]
    if not late:
        return msgspec.structs.replace(generation, phase=Phase.ACTIVE)
    if now - state.phase_since_s > rules.forming_deadline_s:
        text = f"{_names(late)} did not join the world within {rules.forming_deadline_s:g} s"
        return _quiesce(state, _Disruption(text, late[0], text))
    return None


def _while_active(state: MembershipState) -> Generation | None:
    generation = state.generation
    if generation.members and all(w.report.done for w in _members(state)):
        return _finish(generation, Outcome(kind=OutcomeKind.DONE, exit_code=int(ExitCode.DONE)))
    if not _all_steady(state):
        return None
    if generation.progress == 0 and (progress := _progress(state)) > 0:
        # On record before it can be lost: if all hosts die at once, the next leader must not begin again.
        return msgspec.structs.replace(generation, progress=progress)
    reason = _wish_for_change(state)
    if reason is None:
        return None
    return msgspec.structs.replace(
        generation,
        number=GenerationNumber(generation.number + 1),
        phase=Phase.PAUSE,
        attempts=0,
        reason=reason,
    )


def _wish_for_change(state: MembershipState) -> str | None:
    """Why to change between two steps; None if all is well."""
    leaving = [m.host for m in state.generation.members if _draining(state, m.host)]
    if leaving:
        return f"{_names(leaving)} got a notice to leave"
    joining = [status.host for status in _joiners(state)]
    if joining:
        return f"{_names(joining)} asked to join"
    if not _has_service(state):
        return "the coordination service is gone"
    return None


def _settle(state: MembershipState, now: float, rules: Rules) -> Generation | PrepareService | None:
    """All members are idle: decide who goes on, from which state, and how."""
    generation = state.generation
    if generation.attempts > rules.collective_retry_limit:
        message = (
            f"training failed {generation.attempts} times in a row at step {generation.progress} although "
            f"no host died; the last error:\n{generation.failure or generation.reason}"
        )
        host = generation.failed_host
        return _finish(
            generation, Outcome(kind=OutcomeKind.USER_ERROR, exit_code=1, host=host, message=message)
        )
    joiners = _joiners(state)
    kept = [state.hosts[m.host] for m in generation.members if not _draining(state, m.host)]
    if not kept and joiners:
        # All who train must leave: they stay for one more generation, from which the new ones fetch.
        kept = [state.hosts[m.host] for m in generation.members]
    if generation.members and not kept:
        return _finish(
            generation,
            Outcome(
                kind=OutcomeKind.INTERRUPTED,
                exit_code=int(ExitCode.DRAINED),
                message=f"all hosts got a notice to leave; stopped after {generation.progress} steps",
            ),
        )
    waiting = _reason_to_wait(kept, joiners, now - state.phase_since_s, state, rules)
    if waiting is not None:
        return waiting if isinstance(waiting, Generation) else None
    return _form(state, kept, joiners)


class _Wait:
    """More hosts are expected; nothing to publish yet."""


def _reason_to_wait(
    kept: list[HostStatus],
    joiners: list[HostStatus],
    waited_s: float,
    state: MembershipState,
    rules: Rules,
) -> Generation | _Wait | None:
    """`_Wait` while too few are here, an ending once that has lasted too long, None to go on."""
    generation = state.generation
    present = len(kept) + len(joiners)
    holders = _holders(kept, joiners)
    state_is_lost = generation.progress > 0 and not holders and present > 0
    if state_is_lost and waited_s <= rules.regroup_s:
        return _Wait()  # a host that only lost the store for a moment comes back with its state
    if state_is_lost and rules.after_state_loss is AfterStateLoss.STOP:
        message = (
            f"all hosts that held the training state were lost at once, after {generation.progress} "
            "committed steps; no other copy exists. Restart the job from a checkpoint of your own, or set "
            'on_state_lost = "restart" to begin again with the initial state'
        )
        return _finish(
            generation,
            Outcome(kind=OutcomeKind.STATE_LOST, exit_code=int(ExitCode.STATE_LOST), message=message),
        )
    if kept:
        enough = present >= rules.min_hosts
    else:
        patience_s = rules.regroup_s if holders else rules.start_deadline_s
        needed = rules.min_hosts if waited_s > patience_s else rules.expected_hosts
        enough = present >= max(needed, 1)
    if enough:
        return None
    if waited_s <= rules.start_deadline_s:
        return _Wait()
    message = (
        f"{present} of the {rules.min_hosts} hosts that the job needs at least are ready after "
        f"{waited_s:.0f} s; start more agents, or lower min_hosts"
    )
    return _finish(
        generation,
        Outcome(kind=OutcomeKind.TOO_FEW_HOSTS, exit_code=int(ExitCode.TOO_FEW_HOSTS), message=message),
    )


def _holders(kept: list[HostStatus], joiners: list[HostStatus]) -> list[HostStatus]:
    """Who may hand on the state: the members; only if none of them holds it, those who come back."""
    of_kept, of_joiners = (
        [s for s in hosts if s.worker is not None and s.worker.report.holds_state]
        for hosts in (kept, joiners)
    )
    return of_kept or of_joiners


def _form(
    state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus]
) -> Generation | PrepareService:
    generation = state.generation
    in_place = _can_shrink_in_place(state, kept, joiners)
    world = generation.world if in_place else WorldId(generation.number)
    members = _keep_seats(generation, kept) if in_place else _assign_seats(generation, kept, joiners)
    address = generation.service if in_place else _address_for(state, world, len(members))
    if address is None:
        return PrepareService(world, len(members))
    holders = {s.host: s.worker for s in _holders(kept, joiners) if s.worker}
    step = max((w.report.step for w in holders.values()), default=0)
    newest = {host: w for host, w in holders.items() if w.report.step == step}
    return msgspec.structs.replace(
        generation,
        phase=Phase.FORM,
        change=Change.SHRINK if in_place else Change.REFORM,
        world=world,
        members=members,
        service=address,
        step=step,
        sources=tuple(Source(host=h, endpoint=w.report.endpoint) for h, w in newest.items()),
        behind=tuple(m.host for m in members if m.host not in newest) if newest else (),
        progress=max(generation.progress, step) if newest else 0,
    )


def _can_shrink_in_place(state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus]) -> bool:
    """Only if all are in the world already and its service lives (new cliques need it).

    After a failure that no death explains, a fresh world is the better bet.
    """
    generation = state.generation
    if not kept or joiners or generation.attempts > 0:
        return False
    connected = all(s.worker is not None and s.worker.report.world == generation.world for s in kept)
    return connected and generation.world > 0 and _has_service(state)


def _address_for(state: MembershipState, world: WorldId, nodes: int) -> str | None:
    """Of a service for this many members: it admits exactly as many as it was started for."""
    return next((s.address for s in _services(state, world) if s.nodes == nodes), None)


def _keep_seats(generation: Generation, kept: list[HostStatus]) -> tuple[Member, ...]:
    names = {status.host for status in kept}
    return tuple(m for m in generation.members if m.host in names)


def _assign_seats(
    generation: Generation, kept: list[HostStatus], joiners: list[HostStatus]
) -> tuple[Member, ...]:
    """Dense process indexes; whoever can keep its index does, because compiled programs know it."""
    count = len(kept) + len(joiners)
    seats: dict[HostName, int] = {}
    for status in kept:
        member = generation.member(status.host)
        if member is not None and member.process_index < count:
            seats[status.host] = member.process_index
    free = iter(sorted(set(range(count)) - set(seats.values())))
    members: list[Member] = []
    for status in (*kept, *joiners):
        assert status.worker is not None, "only hosts with a worker are kept or join"
        index = seats[status.host] if status.host in seats else next(free)
        members.append(
            Member(
                host=status.host,
                incarnation=status.worker.incarnation,
                process_index=ProcessIndex(index),
            )
        )
    return tuple(sorted(members, key=lambda m: m.process_index))


def _names(hosts: Iterable[HostName]) -> str:
    return ", ".join(hosts)
