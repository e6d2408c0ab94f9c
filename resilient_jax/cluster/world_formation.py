"""The next world, from the hosts that resume: their state, their process indexes, in place or by a re-form. Pure."""

import dataclasses

import msgspec

from resilient_jax.cluster.membership_state import MembershipState, find_snapshot, has_service, list_services
from resilient_jax.cluster.state_loss import explain_state_loss
from resilient_jax.ids import HostName, ProcessIndex, WorldId
from resilient_jax.protocol.records import (
    Generation,
    GenerationPhase,
    HostStatus,
    Member,
    StateLoss,
    StateSource,
    WorldChange,
)
from resilient_jax.protocol.snapshots import SnapshotPlan


@dataclasses.dataclass(frozen=True, slots=True)
class StartCoordinationService:
    """Have a coordination service for this world run on the leader's host; idempotent."""

    world: WorldId
    num_processes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateOrigin:
    """The state that the next generation resumes from, and where it is.

    Attributes:
        step: of the state; 0 if there is none.
        sources: members that have the complete state.
        snapshot: that has the state, if no member has it.
    """

    step: int = 0
    sources: tuple[StateSource, ...] = ()
    snapshot: SnapshotPlan | None = None

    @property
    def exists(self) -> bool:
        """Whether there is a state; else the job begins."""
        return bool(self.sources) or self.snapshot is not None


def find_state_origin(
    state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus]
) -> StateOrigin:
    """Return the newest complete state: a worker's, or, if that is newer, a snapshot's."""
    holders = {s.host: s.worker for s in _holders_of(kept, joiners) if s.worker}
    step = max((w.report.step for w in holders.values()), default=0)
    snapshot = find_snapshot(state)
    # At the same step the worker's wins: it is in device memory, and a snapshot must be read first.
    if snapshot is not None and (not holders or snapshot.id.step > step):
        return StateOrigin(step=snapshot.id.step, snapshot=snapshot)
    return StateOrigin(
        step=step,
        sources=tuple(
            StateSource(host=host, endpoint=w.report.endpoint)
            for host, w in holders.items()
            if w.report.step == step
        ),
    )


def _holders_of(kept: list[HostStatus], joiners: list[HostStatus]) -> list[HostStatus]:
    """Return the hosts that may serve the state: members; only if none of them has it, hosts that come back."""
    of_kept, of_joiners = (
        [s for s in hosts if s.worker is not None and s.worker.report.holds_state]
        for hosts in (kept, joiners)
    )
    return of_kept or of_joiners


def form_next_generation(
    state: MembershipState,
    kept: list[HostStatus],
    joiners: list[HostStatus],
    origin: StateOrigin,
    state_loss: StateLoss | None,
) -> Generation | StartCoordinationService:
    """Build the next generation.

    Args:
        state: of the machine.
        kept: members that continue.
        joiners: hosts that join.
        origin: of the state.
        state_loss: of the job's state, if it was just found out.

    Returns:
        The generation, or the service that must run before it.
    """
    generation = state.generation
    in_place = _can_shrink_in_place(state, kept, joiners)
    # A generation's number is never used twice, so neither is a world's id: a late process cannot enter a later world.
    world = generation.world if in_place else WorldId(generation.number)
    members = _keep_seats(generation, kept) if in_place else _assign_seats(generation, kept, joiners)
    address = generation.service_address if in_place else _address_for(state, world, len(members))
    if address is None:
        return StartCoordinationService(world, len(members))
    held = {source.host for source in origin.sources}
    return msgspec.structs.replace(
        generation,
        phase=GenerationPhase.FORM,
        change=WorldChange.SHRINK if in_place else WorldChange.REFORM,
        world=world,
        members=members,
        service_address=address,
        step=origin.step,
        sources=origin.sources,
        # If no member has the state there is none to fetch: it is read from a snapshot or storage, or made anew.
        receivers=tuple(m.host for m in members if m.host not in held) if held else (),
        snapshot=origin.snapshot,
        state_loss=None
        if origin.exists
        else state_loss or generation.state_loss,  # the world in which it was to be read may be lost, too
        reason=f"{generation.reason}: {explain_state_loss(state_loss)}"
        if state_loss is not None
        else generation.reason,
        progress=max(generation.progress, origin.step) if origin.exists else 0,
        # Without a state the job begins anew: snapshots of earlier generations do not count any more.
        initial_generation=generation.initial_generation if origin.exists else generation.number,
    )


def _can_shrink_in_place(state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus]) -> bool:
    """Return whether all are in the world already and its service runs (new cliques need it).

    After a failure that no death explains, a new world is more likely to work; and the last host resumes in a world of
    its own, where its devices need no network between them.
    """
    generation = state.generation
    if len(kept) < 2 or joiners or generation.attempts > 0:
        return False
    connected = all(s.worker is not None and s.worker.report.world == generation.world for s in kept)
    return connected and generation.world > 0 and has_service(state)


def _address_for(state: MembershipState, world: WorldId, nodes: int) -> str | None:
    """Return the address of a service for this many members: it admits exactly as many as it was started for."""
    return next((s.address for s in list_services(state, world) if s.num_processes == nodes), None)


def _keep_seats(generation: Generation, kept: list[HostStatus]) -> tuple[Member, ...]:
    names = {status.host for status in kept}
    return tuple(m for m in generation.members if m.host in names)


def _assign_seats(
    generation: Generation, kept: list[HostStatus], joiners: list[HostStatus]
) -> tuple[Member, ...]:
    """Return members with dense process indexes; a host keeps its index if possible, because compiled programs
    depend on it.
    """
    count = len(kept) + len(joiners)
    seats: dict[HostName, int] = {}
    for status in kept:
        member = generation.find_member(status.host)
        # Indexes are dense: one beyond the new number of members cannot be kept.
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
                endpoint=status.worker.report.endpoint,
            )
        )
    return tuple(sorted(members, key=lambda m: m.process_index))
