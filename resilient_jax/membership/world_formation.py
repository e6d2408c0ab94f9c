"""The next world, from the hosts that resume: their state, their seats, in place or by a re-form. Pure."""

import dataclasses
from typing import Final

from resilient_jax.ids import HostName, Seat, WorldId
from resilient_jax.membership.doubt import are_parts_trusted, is_trusted
from resilient_jax.membership.facts import (
    MembershipState,
    awaits_seat,
    find_seat,
    find_snapshot,
    has_service,
    has_taken_seat,
    is_newcomer_alive,
    join_names,
    list_services,
    list_unseated_standbys,
)
from resilient_jax.membership.job_end import is_any_staying
from resilient_jax.membership.state_loss import explain_state_loss
from resilient_jax.protocol.generation import Generation, GenerationPhase, Member, WorldChange
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.snapshots import SnapshotPlan
from resilient_jax.protocol.state_records import (
    PartHolder,
    StateLoss,
    StatePart,
    StateSource,
    UnitKind,
    are_parts_complete,
)

MAX_SOURCES: Final = 64
"""Of a generation; one is enough where no member has to fetch."""


@dataclasses.dataclass(frozen=True, slots=True)
class StartCoordinationService:
    """Have a coordination service for this world run on the leader's host; idempotent."""

    world: WorldId
    num_processes: int
    num_seats: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateOrigin:
    """The state that the next generation resumes from, and where it is.

    Attributes:
        step: steps of the state; 0 if there is none.
        part_holders: members that have the state together, each a part.
        snapshot: snapshot that has the state, if the members do not have it; with parts, the snapshot to go back to.
    """

    step: int = 0
    sources: tuple[StateSource, ...] = ()
    part_holders: tuple[PartHolder, ...] = ()
    snapshot: SnapshotPlan | None = None

    @property
    def exists(self) -> bool:
        """Whether there is a state; else the job begins."""
        return bool(self.sources or self.part_holders) or self.snapshot is not None


def find_state_origin(
    state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus]
) -> StateOrigin:
    """Return the newest complete state: a worker's, or that of all members together, or, if newer, a snapshot's."""
    holders = {s.host: s.worker for s in _holders_of(state.generation, kept, joiners) if s.worker}
    step = max((w.report.held.step for w in holders.values()), default=0)
    snapshot = find_snapshot(state)
    parts = _list_parts(kept) if are_parts_trusted(state.generation) else ()
    parts_step = max((holder.step for holder in parts), default=0)
    # At the same step the workers' wins: it is in device memory, and a snapshot must be read first.
    if parts and parts_step >= max(step, snapshot.id.step if snapshot is not None else 0):
        return StateOrigin(step=parts_step, part_holders=parts, snapshot=snapshot)
    if snapshot is not None and (not holders or snapshot.id.step > step):
        return StateOrigin(step=snapshot.id.step, snapshot=snapshot)
    return StateOrigin(
        step=step,
        sources=tuple(
            StateSource(host=host, endpoint=w.report.endpoint)
            for host, w in holders.items()
            if w.report.held.step == step
        ),
    )


def _list_parts(kept: list[HostStatus]) -> tuple[PartHolder, ...]:
    """Return the members with a part of the state; none if a part of it is on none of them.

    A failure may have met some hosts before, and others after, their shards were cut anew: then they have units of two
    kinds, and those that are complete count.
    """
    by_cut: dict[object, list[PartHolder]] = {}
    for holder in _list_holders(kept):
        by_cut.setdefault(holder.part.cut, []).append(holder)
    complete = filter(None, map(_choose_holders, by_cut.values()))
    return max(complete, key=lambda holders: max(holder.step for holder in holders), default=())


def _list_holders(kept: list[HostStatus]) -> tuple[PartHolder, ...]:
    """Return the members that have a part of the state."""
    return tuple(
        PartHolder(
            host=status.host,
            endpoint=worker.report.endpoint,
            step=worker.report.held.step,
            part=StatePart(part.runs, part.num_units, kind=part.kind, axes=part.axes),
        )
        for status in kept
        if (worker := status.worker) is not None
        and (part := worker.report.held.part) is not None
        and worker.report.held.step > 0
    )


def _choose_holders(holders: list[PartHolder]) -> tuple[PartHolder, ...]:
    """Return the holders of all units of one kind; none if a unit is on none of them.

    Those that a failure met between two commits are a step behind: no host commits before all have what they need for
    it. Should they be further apart, they are no parts of one state. Nor are they if each host has shards of its own:
    those of hosts that have not committed cannot be brought up to the step.
    """
    steps, kind = {holder.step for holder in holders}, holders[0].part.kind
    if max(steps) - min(steps) > (kind is not UnitKind.HOSTS):
        return ()
    newest = tuple(holder for holder in holders if holder.step == max(steps))
    if kind is not UnitKind.BLOCKS and are_parts_complete(holder.part for holder in newest):
        return newest  # the others read what they lack of the newest step
    return tuple(holders) if are_parts_complete(holder.part for holder in holders) else ()


def _reform(
    state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus], spare_seats: int
) -> Generation | StartCoordinationService:
    """Return the present generation in a new world, or the service that must run before it."""
    generation = state.generation
    # A generation's number is never used twice, so neither is a world's id: a late process cannot enter a later world.
    world = WorldId(generation.number)
    members = _assign_seats(generation, kept, joiners)
    num_seats = len(members) + spare_seats
    address = _find_address(state, world, len(members))
    if address is None:
        return StartCoordinationService(world, len(members), num_seats)
    return change_fields(
        generation,
        change=WorldChange.REFORM,
        world=world,
        num_seats=num_seats,
        next_seat=Seat(len(members)),
        members=members,
        newcomers=(),
        service_address=address,
    )


def _choose_sources(sources: tuple[StateSource, ...], *, does_any_fetch: bool) -> tuple[StateSource, ...]:
    """Return some of many sources, spread over all: each member need not read of thousands where few may fetch."""
    if len(sources) <= MAX_SOURCES:
        return sources
    return sources[:: -(-len(sources) // MAX_SOURCES)] if does_any_fetch else sources[:1]


def _holders_of(
    generation: Generation, kept: list[HostStatus], joiners: list[HostStatus]
) -> list[HostStatus]:
    """Return the hosts that may serve the state: members; only if none of them has it, hosts that come back.

    None with a state that is in doubt.
    """
    of_kept, of_joiners = (
        [
            s
            for s in hosts
            if s.worker is not None
            and s.worker.report.held.holds_state
            and is_trusted(generation, s.worker.report)
        ]
        for hosts in (kept, joiners)
    )
    return of_kept or of_joiners


def form_next_generation(
    state: MembershipState,
    kept: list[HostStatus],
    joiners: list[HostStatus],
    origin: StateOrigin,
    state_loss: StateLoss | None,
    spare_seats: int,
    *,
    renews_world: bool = False,
) -> Generation | StartCoordinationService:
    """Build the next generation.

    Args:
        state_loss: loss of the job's state, if it was just found out; None: no loss.
        spare_seats: spare seats of a new world; 0 for a host that no other can join, whose devices then need no network
            between them.
        renews_world: whether the hosts form a new world also if they could go on in place, so that others find seats in
            it.

    Returns:
        The generation, or the service that must run before the generation.
    """
    generation = state.generation
    if is_in_place(state, kept, joiners, origin) and not renews_world:
        change = WorldChange.GROW if joiners else WorldChange.SHRINK
        built = change_fields(
            generation,
            change=change,
            members=keep_seats(generation, kept, joiners),
            service_address="" if _explain_no_cliques(state, kept) else generation.membership.service_address,
        )
        built = change_fields(built, newcomers=_list_waiting(state, built))
    else:
        built = _reform(state, kept, joiners, spare_seats)
        if isinstance(built, StartCoordinationService):
            return built
    held = {holder.host for holder in (*origin.sources, *origin.part_holders)}
    # If no member has the state there is none to fetch: it is read from a snapshot or storage, or made anew.
    receivers = tuple(m.host for m in built.membership.members if m.host not in held) if held else ()
    return change_fields(
        built,
        phase=GenerationPhase.FORM,
        ends_job=False,
        next_members=None,
        step=origin.step,
        sources=_choose_sources(origin.sources, does_any_fetch=bool(receivers)),
        receivers=receivers,
        part_holders=origin.part_holders,
        snapshot=origin.snapshot,
        state_loss=None
        if origin.exists
        else state_loss
        or generation.state.state_loss,  # the world in which it was to be read may be lost, too
        reason=f"{generation.reason}: {explain_state_loss(state_loss)}"
        if state_loss is not None
        else generation.reason,
        progress=_find_progress(generation, origin),
        # Without a state the job begins anew: snapshots of earlier generations do not count any more.
        initial_generation=generation.state.initial_generation if origin.exists else generation.number,
    )


def _find_progress(generation: Generation, origin: StateOrigin) -> int:
    """Return the steps that are done from now on: fewer than before if newer states are in doubt."""
    if not origin.exists:
        return 0
    if origin.part_holders:  # which a second loss may end: a snapshot shows that there is a state to rely on
        return generation.record.progress
    return (
        origin.step
        if generation.state.trusted_step is not None
        else max(generation.record.progress, origin.step)
    )


def give_seats(
    state: MembershipState, joiners: list[HostStatus], spares: list[HostStatus]
) -> Generation | None:
    """Return the present generation with a spare seat for each worker that waits for one; None if none gets one.

    Workers that join come first, all of them or none; then `spares`, for which there is no place now, and standbys.
    Each has one try: a worker that cannot take its seat joins by a re-form.
    """
    generation = state.generation
    num_free = generation.membership.num_seats - generation.membership.next_seat
    waiting, later = (
        [status for status in hosts if find_seat(generation, status) is None] for hosts in (joiners, spares)
    )
    if len(waiting) > num_free:
        return None
    waiting = [*waiting, *later, *list_unseated_standbys(state)][:num_free]
    if not waiting:
        return None
    given = tuple(
        _make_member(status, Seat(seat))
        for seat, status in enumerate(waiting, generation.membership.next_seat)
    )
    return change_fields(
        generation,
        next_seat=Seat(generation.membership.next_seat + len(given)),
        newcomers=(*_list_waiting(state, generation), *given),
        spares=tuple(status.host for status in spares),
    )


def can_be_seated(generation: Generation, joiners: list[HostStatus]) -> bool:
    """Return whether hosts that have no seat yet may get and take one while others train."""
    seated = [status for status in joiners if find_seat(generation, status) is not None]
    has_seats = (
        len(joiners) - len(seated) <= generation.membership.num_seats - generation.membership.next_seat
    )
    return has_seats and all(awaits_seat(generation, status) for status in seated)


def _list_waiting(state: MembershipState, generation: Generation) -> tuple[Member, ...]:
    """Return the newcomers that may still join: they live, and are no members."""
    return tuple(
        newcomer
        for newcomer in generation.membership.newcomers
        if is_newcomer_alive(state, newcomer) and generation.membership.find_member(newcomer.host) != newcomer
    )


def can_change_in_place(state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus]) -> bool:
    """Return whether all are in the world already, and new cliques can be formed in it."""
    return not explain_new_world(state, kept, joiners)


def explain_new_world(state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus]) -> str:
    """Return why these hosts cannot go on in the present world; empty if they can, be it one host alone.

    After a failure that no death explains, a new world is more likely to work. Standbys in their seats need no member
    that is kept: with none, no clique of the failed one is left, and one failure is allowed, which may come to light
    before its death.
    """
    generation = state.generation
    if generation.failures.attempts > (0 if kept else 1):
        return "the last attempt failed although no host died"
    return _explain_no_cliques(state, kept) or _explain_absence(generation, kept, joiners)


def can_go_on_by_mail(
    state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus], origin: StateOrigin
) -> bool:
    """Return whether members finish the step under way in their world, and need no clique for it.

    So do those of a pipeline that have lost others, also if their service has ended, or one of them is left: what they
    tell each other goes by mail. Of a world whose service has ended all leave between two steps. Not after a failure
    that is not explained, where members have no state in parts, and not if one has needed a clique all the same.
    """
    generation = state.generation
    has_blocks = any(holder.part.kind is UnitKind.BLOCKS for holder in origin.part_holders)
    is_step_under_way = generation.phase is GenerationPhase.QUIESCE and has_blocks
    has_failed = not generation.membership.service_address and generation.failures.attempts > 0
    return (
        is_step_under_way
        and not has_failed
        and bool(kept)
        and not joiners
        and not _explain_absence(generation, kept, joiners)
    )


def is_in_place(
    state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus], origin: StateOrigin
) -> bool:
    """Return whether the next generation of these hosts is in their world."""
    return can_change_in_place(state, kept, joiners) or can_go_on_by_mail(state, kept, joiners, origin)


def _explain_no_cliques(state: MembershipState, kept: list[HostStatus]) -> str:
    """Return why members of the world cannot form new cliques; empty if its service runs, and none took it for dead."""
    world = state.generation.membership.world
    detached = [
        status.host
        for status in kept
        if status.worker is not None and status.worker.report.place.detached_from == world
    ]
    if world == 0:
        return "there is no world yet"
    if not has_service(state):
        return "the coordination service of their world has ended"
    return f"{join_names(detached)} took the coordination service for dead" if detached else ""


def _explain_absence(generation: Generation, kept: list[HostStatus], joiners: list[HostStatus]) -> str:
    """Return who of these hosts is not in the world, and why; empty if all are, and there is one at least."""
    left = [
        s.host for s in kept if s.worker is None or s.worker.report.place.world != generation.membership.world
    ]
    if left:
        return f"{join_names(left)} had to leave the world"
    outside = [status.host for status in joiners if not has_taken_seat(generation, status)]
    if not outside:
        return "" if kept or joiners else "no host of their world is ready"
    without = "has no seat" if len(outside) == 1 else "have no seats"
    if generation.membership.num_seats == 1:
        why = ", which was formed for one host"
    else:
        why = (
            ", which has none left"
            if generation.membership.next_seat >= generation.membership.num_seats
            else ""
        )
    return f"{join_names(outside)} {without} in their world{why}"


def _find_address(state: MembershipState, world: WorldId, nodes: int) -> str | None:
    """Return the address of a service for this many members: it admits exactly as many as it was started for.

    That of a host in quarantine, which leads no more, only if no host stays that leads in its place.
    """
    for host, service in list_services(state, world):
        is_replaced = host in state.quarantined and is_any_staying(
            state.hosts.values(), host, state.quarantined
        )
        if service.num_processes == nodes and not is_replaced:
            return service.address
    return None


def keep_seats(
    generation: Generation, kept: list[HostStatus], joiners: list[HostStatus]
) -> tuple[Member, ...]:
    """Return the members of the next generation in the same world."""
    names = {status.host for status in kept}
    stay = tuple(m for m in generation.membership.members if m.host in names)
    come = (find_seat(generation, status) for status in joiners)
    return tuple(sorted((*stay, *(m for m in come if m is not None)), key=lambda m: m.seat))


def _assign_seats(
    generation: Generation, kept: list[HostStatus], joiners: list[HostStatus]
) -> tuple[Member, ...]:
    """Return members with dense seats; a host keeps its seat if possible, because compiled programs depend on it."""
    count = len(kept) + len(joiners)
    seats: dict[HostName, Seat] = {}
    for status in kept:
        member = generation.membership.find_member(status.host)
        # Seats are dense: one beyond the new number of members cannot be kept.
        if member is not None and member.seat < count:
            seats[status.host] = member.seat
    free = iter(sorted(set(range(count)) - set(seats.values())))
    members = [
        _make_member(status, seats[status.host] if status.host in seats else Seat(next(free)))
        for status in (*kept, *joiners)
    ]
    return tuple(sorted(members, key=lambda m: m.seat))


def _make_member(status: HostStatus, seat: Seat) -> Member:
    assert status.worker is not None, "only hosts with a worker are kept or join"
    return Member(
        host=status.host,
        incarnation=status.worker.incarnation,
        seat=seat,
        endpoint=status.worker.report.endpoint,
    )
