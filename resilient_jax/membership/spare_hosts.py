"""Which hosts are members where more are ready than there are places. Pure.

A job has a place for each host that was not started as a spare. A place becomes free when its host is lost or leaves;
whichever host is ready first takes it, but one without a seat leaves it to one that prepares in a seat. No member gives
up its place for another, so a host that comes back while a spare has its place is a spare itself.

The place of a host that was taken out as a slow one is kept from hosts that were slow more often than it, as long as it
is in quarantine: at planned changes, and if the loss of another host would not be that of the state.

A host without a place is a newcomer like any other: its worker takes a seat of the world and loads its programs, and
waits then. It has no part of the state and of no snapshot, so it counts neither for the redundancy of the state nor for
`min_hosts`.
"""

from collections.abc import Iterable

from resilient_jax.ids import HostName
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import (
    MembershipState,
    find_seat,
    has_service,
    has_taken_seat,
    is_cold,
    is_draining,
    is_on_its_way,
    list_joiners,
)
from resilient_jax.membership.last_holders import list_quarantined_holders
from resilient_jax.membership.world_formation import (
    can_be_seated,
    can_change_in_place,
    can_go_on_by_mail,
    find_state_origin,
)
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.host_status import HostStatus


def count_missing_places(state: MembershipState) -> int:
    """Return how many places are left empty by hosts in quarantine, at most: a spare may have the place of one."""
    if not state.quarantined:
        return 0
    spares = sum(status.is_spare and host not in state.quarantined for host, status in state.hosts.items())
    return max(len(state.quarantined) - spares, 0)


def list_staying(state: MembershipState) -> list[HostStatus]:
    """Return the members that got no notice to leave. A quarantine alone ends no job: the last members stay in it."""
    members = [
        state.hosts[member.host]
        for member in state.generation.membership.members
        if member.host in state.hosts
    ]
    staying = [status for status in members if not is_draining(state, status.host)]
    return staying or [status for status in members if not status.is_draining]


def count_places(state: MembershipState, ready: Iterable[HostStatus], num_hosts: int) -> int:
    """Return how many hosts may be members: as many as there are, or ever were at once, that are no spares.

    Args:
        ready: the members that stay, and the hosts that are ready to join.
        num_hosts: hosts that the job was started for, without spares.
    """
    return max(
        state.generation.membership.max_members, num_hosts, sum(not status.is_spare for status in ready)
    )


def admit_hosts(
    state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus], num_hosts: int
) -> tuple[list[HostStatus], list[HostStatus]]:
    """Return the joiners for which there is a place beside the members that stay, and the others.

    If there are too many: those for which stages are kept, and those with the newest state if no member has it, then
    those that have taken a seat, and of these spares last. None has the place that is kept from it, and none without a
    seat that of a host which prepares in one while others train: it would cost a re-form that the other saves.
    """
    free = max(0, count_places(state, [*kept, *joiners], num_hosts) - len(kept))
    is_state_kept = any(_find_held_step(status) >= 0 for status in kept)

    def rank(status: HostStatus) -> tuple[bool, int, bool, bool]:
        is_unseated = not has_taken_seat(state.generation, status)
        has_no_stage = status.host not in state.generation.shape.stage_hosts
        step = 0 if is_state_kept else _find_held_step(status)
        return has_no_stage, -step, is_unseated, status.is_spare

    preparing = _count_preparing(state)
    if len(joiners) <= free - preparing and not state.quarantined:
        return joiners, []
    admitted: set[HostName] = set()
    for status in sorted(joiners, key=rank):
        is_later = find_seat(state.generation, status) is None
        if len(admitted) < free - _count_kept_places(state, status.host) - preparing * is_later:
            admitted.add(status.host)
    return (
        [status for status in joiners if status.host in admitted],
        [status for status in joiners if status.host not in admitted],
    )


def _count_kept_places(state: MembershipState, host: HostName) -> int:
    """Return how many free places a host may not have, as they are those of hosts that were slow less often."""
    generation, slowness = state.generation, state.generation.record.slowness
    if generation.phase is GenerationPhase.QUIESCE or not generation.record.losses_left:
        return 0
    count = slowness.count_taken_out
    # The count of a host that is out includes this time.
    return sum(count(host) > count(out) - 1 for out in slowness.out if out in state.quarantined)


def _count_preparing(state: MembershipState) -> int:
    """Return how many hosts load their programs in seats, while others train, for places that are free."""
    generation = state.generation
    if generation.phase is not GenerationPhase.ACTIVE:
        return 0
    hosts = (state.hosts[m.host] for m in generation.membership.newcomers if m.host in state.hosts)
    return sum(
        is_on_its_way(status)
        and find_seat(generation, status) is not None
        and status.host not in generation.membership.spares
        and status.host not in state.quarantined
        and generation.membership.find_member(status.host) is None
        for status in hosts
    )


def _find_held_step(status: HostStatus) -> int:
    """Return the step of the complete state that a host's worker has; -1 if it has none."""
    if status.worker is None or not status.worker.report.held.holds_state:
        return -1
    return status.worker.report.held.step


def list_unseated(state: MembershipState, config: MembershipConfig) -> list[HostName]:
    """Return the spares for which this world has no seat left."""
    generation = state.generation
    if not config.spare_seats or generation.phase is not GenerationPhase.ACTIVE:
        return []
    if generation.membership.next_seat < generation.membership.num_seats:
        return []
    _, spares = admit_hosts(state, list_staying(state), list_joiners(state), config.num_hosts)
    return [status.host for status in spares if find_seat(generation, status) is None]


def list_used(before: Generation | None, state: MembershipState) -> list[HostName]:
    """Return the hosts that spared in the generation before, and are members of the one that forms now."""
    if before is None or state.generation.phase is not GenerationPhase.FORM:
        return []
    came = {m.host for m in state.generation.membership.members} - {m.host for m in before.membership.members}
    return [
        status.host
        for status in state.hosts.values()
        if status.host in came and (status.is_spare or status.host in before.membership.spares)
    ]


def choose_joiners(
    state: MembershipState, kept: list[HostStatus], config: MembershipConfig
) -> list[HostStatus]:
    """Return the hosts that join now.

    Only those that have a seat, if the others can go on in place with them. None of those that come while members
    finish a step in a world whose service has ended, or leave it: they would load their programs while all wait, and in
    the new world there are seats to do that beforehand.
    """
    generation = state.generation
    if not has_service(state) and config.spare_seats and len(kept) >= max(config.min_hosts, 1):
        leaves_world = generation.phase is GenerationPhase.BOUNDARY
        if leaves_world or can_go_on_by_mail(state, kept, [], find_state_origin(state, kept, [])):
            return []
    joiners = list_joiners(state)
    joiners += list_quarantined_holders(state, kept, joiners)
    admitted, _ = admit_hosts(state, kept, joiners, config.num_hosts)
    seated = [status for status in admitted if has_taken_seat(generation, status)]
    unseated = [status for status in admitted if not has_taken_seat(generation, status)]
    if (
        (kept or config.replaces_workers)  # else those that have a seat would wait for those that have none
        and can_change_in_place(state, kept, seated)
        and can_be_seated(generation, unseated)
        and len(kept) + len(seated) >= config.min_hosts
        # Else a host without a seat may have the state.
        and find_state_origin(state, kept, seated).exists
    ):
        return seated
    return admitted


def explain_cold_join(
    state: MembershipState, kept: list[HostStatus], joiners: list[HostStatus], config: MembershipConfig
) -> str:
    """Return why hosts that have loaded no programs join in a new world all the same; empty if others go on without."""
    warm = [status for status in joiners if not is_cold(status)]
    if not config.spare_seats:
        return "a new world has no spare seats"
    if not kept or len(kept) + len(warm) < config.min_hosts:
        return "the others are too few without them"
    with_all = find_state_origin(state, kept, joiners)
    return "" if find_state_origin(state, kept, warm) == with_all else "they bring a state"
