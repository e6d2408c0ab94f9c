"""The statuses of all hosts, read as facts about a generation: live workers, failures and joiners. Pure."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from resilient_jax.ids import GenerationNumber, HostName, WorldId
from resilient_jax.membership.leader_memory import LeaderMemory
from resilient_jax.protocol.dropped_worker import DroppedWorker
from resilient_jax.protocol.generation import Generation, GenerationPhase, Member, SeatId
from resilient_jax.protocol.host_status import CoordinationServiceStatus, HostStatus, WorkerStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import NeededHosts
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotPhase, SnapshotPlan, SnapshotStatus
from resilient_jax.protocol.worker_report import WorkerState
from resilient_jax.snapshot.snapshot_choice import ReportedStatuses, choose_snapshot, explain_loss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MembershipState:
    """The complete state of the machine."""

    generation: Generation
    hosts: Mapping[HostName, HostStatus]
    phase_since_s: float
    quarantined: frozenset[HostName] = frozenset()
    """Hosts that take no part for a while, by the store's records."""
    memory: LeaderMemory = dataclasses.field(default_factory=LeaderMemory)


def join_names(hosts: Iterable[HostName]) -> str:
    """Return the hosts as a text for messages."""
    return ", ".join(hosts)


def find_worker(state: MembershipState, member: Member) -> WorkerStatus | None:
    """Return the live worker that became this member; None if it died or was restarted."""
    status = state.hosts.get(member.host)
    worker = status.worker if status else None
    if worker is None or worker.incarnation != member.incarnation or not worker.is_alive:
        return None
    return worker


def view_standby(status: HostStatus) -> HostStatus | None:
    """Return the host with its standby as the worker, as if that had died; None if it has none that is a worker."""
    standby = status.standby.worker if status.standby is not None else None
    return change_fields(status, worker=standby) if standby is not None else None


def is_newcomer_alive(state: MembershipState, newcomer: Member) -> bool:
    """Return whether a newcomer lives: its host's worker, or the standby of that."""
    if find_worker(state, newcomer) is not None:
        return True
    status = state.hosts.get(newcomer.host)
    standby = view_standby(status) if status is not None else None
    return (
        standby is not None
        and standby.worker is not None
        and standby.worker.incarnation == newcomer.incarnation
        and standby.worker.is_alive
    )


def list_unseated_standbys(state: MembershipState) -> list[HostStatus]:
    """Return the hosts whose worker is a member and whose standby waits for a seat, with the standby as the worker."""
    trains = {member.host for member in list_survivors(state)}
    views = (view_standby(status) for host, status in sorted(state.hosts.items()) if host in trains)
    return [
        view
        for view in views
        if view is not None
        and view.worker is not None
        and view.worker.is_alive
        and is_idle(view.worker)
        and not is_draining(state, view.host)
        and find_seat(state.generation, view) is None
    ]


def list_live_workers(state: MembershipState) -> list[WorkerStatus]:
    """Return the members' live workers, in order of their seats."""
    return [w for m in state.generation.membership.members if (w := find_worker(state, m)) is not None]


def list_late_members(state: MembershipState) -> list[HostStatus]:
    """Return the members' hosts that the others wait for in the present phase."""
    generation = state.generation
    late: list[HostStatus] = []
    for member in generation.membership.members:
        status, worker = state.hosts.get(member.host), find_worker(state, member)
        if status is None or worker is None:
            continue
        is_current = worker.report.generation >= generation.number
        match generation.phase:
            case GenerationPhase.QUIESCE:
                has_answered = is_current and is_idle(worker)
            case GenerationPhase.PAUSE:
                has_answered = is_current
            case GenerationPhase.BOUNDARY:
                has_answered = is_idle(worker)
            case GenerationPhase.FORM:
                has_answered = is_current and worker.report.place.has_formed
            case GenerationPhase.ACTIVE | GenerationPhase.FINISHED:
                has_answered = True
        if not has_answered:
            late.append(status)
    return late


def list_survivors(state: MembershipState) -> tuple[Member, ...]:
    """Return the members whose worker is alive."""
    return tuple(m for m in state.generation.membership.members if find_worker(state, m) is not None)


def is_idle(worker: WorkerStatus) -> bool:
    """Return whether the worker reports that it has unwound."""
    return worker.report.state is WorkerState.IDLE


def count_unreplaced(state: MembershipState) -> int:
    """Return how many hosts have a live worker of a world that was left, which their standby may yet replace."""
    dropped = {d.host: d for d in state.generation.membership.dropped_workers}
    return sum(is_unreplaced(status, dropped.get(host)) for host, status in state.hosts.items())


def is_unreplaced(status: HostStatus, dropped: DroppedWorker | None) -> bool:
    """Return whether a host has a live worker of a world that was left, such as the one that was dropped."""
    worker = status.worker
    if worker is None or not worker.is_alive:
        return False
    is_dropped = dropped is not None and dropped.incarnation == worker.incarnation
    return is_dropped or worker.report.state is WorkerState.RUNNING


def is_draining(state: MembershipState, host: HostName) -> bool:
    """Return whether the host got a notice to leave, or is in quarantine."""
    return host in state.hosts and (state.hosts[host].is_draining or host in state.quarantined)


def find_seat(generation: Generation, status: HostStatus) -> Member | None:
    """Return the seat that a host's worker was given while others train; None if it was given none."""
    return (
        generation.membership.find_newcomer(status.host, status.worker.incarnation) if status.worker else None
    )


def has_taken_seat(generation: Generation, status: HostStatus) -> bool:
    """Return whether a worker is connected to the world through the seat that it was given."""
    worker = status.worker
    if worker is None or find_seat(generation, status) is None or awaits_seat(generation, status):
        return False
    return worker.report.place.world == generation.membership.world


def awaits_seat(generation: Generation, status: HostStatus) -> bool:
    """Return whether a worker was given a seat that it has not tried to take yet."""
    newcomer = find_seat(generation, status)
    if newcomer is None or status.worker is None:
        return False
    return status.worker.report.place.seat != SeatId(generation.membership.world, newcomer.seat)


def is_cold(status: HostStatus) -> bool:
    """Return whether a host's worker has loaded no programs: it has neither trained nor tried to take a seat.

    One that could not take its seat would not be warmer in the next world: it has had its try.
    """
    worker = status.worker
    return worker is not None and not worker.report.entered and worker.report.place.seat is None


def is_on_its_way(status: HostStatus) -> bool:
    """Return whether a host's worker has started, or takes a seat, and has not asked to join yet."""
    if status.worker is None or not status.worker.is_alive or status.is_draining:
        return False
    return status.worker.report.state in (WorkerState.STARTING, WorkerState.PREPARING)


def list_joiners(state: MembershipState) -> list[HostStatus]:
    """Return the hosts whose worker is idle and not a member, by name; none that is in quarantine."""
    return list_able(state, state.hosts.keys() - state.quarantined)


def list_able(state: MembershipState, hosts: Collection[HostName]) -> list[HostStatus]:
    """Return those of some hosts that could join: their worker is idle and not a member. By name."""
    generation = state.generation
    dropped = {d.host: d for d in generation.membership.dropped_workers}
    return [
        status
        for host, status in sorted(state.hosts.items())
        if host in hosts and is_joiner(generation, status, dropped.get(host))
    ]


def is_joiner(generation: Generation, status: HostStatus, dropped: DroppedWorker | None) -> bool:
    """Return whether a host's worker is idle and not a member.

    Args:
        dropped: the worker of this host that was left out; None: none was. An order that is newer than the status may
            have sent that worker training.
    """
    worker = status.worker
    if worker is None or not worker.is_alive or not is_idle(worker) or status.is_draining:
        return False
    member = generation.membership.find_member(status.host)
    if member is not None and member.incarnation == worker.incarnation:
        return False
    return not (
        dropped is not None
        and dropped.incarnation == worker.incarnation
        and worker.report.generation < dropped.required_generation
    )


def list_replaced_workers(state: MembershipState, generation: GenerationNumber) -> tuple[DroppedWorker, ...]:
    """Return the workers that are to be killed because a world was left with this generation.

    No agent asks them for the answer that they owe, so none of them can join.
    """
    workers = {m: find_worker(state, m) for m in state.generation.membership.members}
    replaced = tuple(
        DroppedWorker(host=m.host, incarnation=m.incarnation, required_generation=generation)
        for m, worker in workers.items()
        if worker is not None and worker.exit_code is None
    )
    hosts = {d.host for d in replaced}
    return tuple(d for d in state.generation.membership.dropped_workers if d.host not in hosts) + replaced


def list_dropped_workers(state: MembershipState, members: tuple[Member, ...]) -> tuple[DroppedWorker, ...]:
    """Return the workers that owe an answer when only `members` stay: from before, and those dropped while idle.

    A worker that ran at its last report owes none: when it reports that it is idle, it has unwound.
    """
    generation = state.generation
    # In FORM all answered this number before they were sent in; else this number is what they owe an answer to.
    answer = GenerationNumber(generation.number + (generation.phase is GenerationPhase.FORM))
    found = {d.host: d for d in generation.membership.dropped_workers}
    stay = set(members)
    for member in generation.membership.members:
        status = state.hosts.get(member.host)
        worker = status.worker if status else None
        if member not in stay and worker is not None and worker.incarnation == member.incarnation:
            found[member.host] = DroppedWorker(
                host=member.host, incarnation=member.incarnation, required_generation=answer
            )
    workers = {host: status.worker for host, status in state.hosts.items()}
    return tuple(
        d
        for d in found.values()
        if (worker := workers.get(d.host)) is not None
        and worker.incarnation == d.incarnation
        and worker.exit_code is None
        and is_idle(worker)
        and worker.report.generation < d.required_generation
    )


def is_cut_off(state: MembershipState, host: HostName) -> bool:
    """Return whether a host was taken out because others cannot reach it, and has not been let in again since."""
    return host in state.generation.failures.separated and host in state.quarantined


def list_services(state: MembershipState, world: WorldId) -> list[tuple[HostName, CoordinationServiceStatus]]:
    """Return the services of a world, each with its host; a former leader, or an earlier guess of the number of
    members, may have left its own. None of a host that other members cannot reach.
    """
    return [
        (host, s)
        for host, status in state.hosts.items()
        if not is_cut_off(state, host)
        for s in status.services
        if s.world == world
    ]


def has_service(state: MembershipState) -> bool:
    """Return whether the service that the members connect to runs."""
    generation = state.generation
    return any(
        s.address == generation.membership.service_address
        for _, s in list_services(state, generation.membership.world)
    )


def has_lost_service(state: MembershipState) -> bool:
    """Return whether the service has ended since the generation formed.

    One that formed without needs none: no clique is formed in it.
    """
    return bool(state.generation.membership.service_address) and not has_service(state)


def owes_reach_report(generation: Generation, status: HostStatus) -> bool:
    """Return whether a member has yet to report whom it reaches, after a failure that no death explains."""
    if generation.failures.attempts == 0 or len(generation.membership.members) < 2:
        return False
    return status.reach is None or status.reach.generation < generation.number


def find_needed_hosts(state: MembershipState) -> NeededHosts:
    """Return the newest word of members on how many hosts training needs."""
    found = (worker.report.findings.needed_hosts for worker in list_live_workers(state))
    return max([state.generation.record.needed_hosts, *found])


def count_needed_hosts(state: MembershipState, waited_s: float, grace_s: float) -> int:
    """Return how many hosts are waited for because training needs them; one where that is to be tried again.

    It is with fewer hosts than those that found it. It is at a later step as well, once hosts that were lost had their
    time to come back: a try costs a generation.
    """
    needed, phase = find_needed_hosts(state), state.generation.phase
    if phase in (GenerationPhase.FORM, GenerationPhase.ACTIVE):
        return needed.count
    num_hosts = sum(not is_draining(state, host) for host in state.hosts)
    is_outdated = waited_s > grace_s and find_newest_step(state) > needed.step
    return 1 if is_outdated or num_hosts < needed.num_hosts else needed.count


def find_newest_step(state: MembershipState) -> int:
    """Return the newest committed step that any host or worker has reported."""
    of_workers = [w.report.held.step for w in list_live_workers(state)]
    # A host's own record outlives the worker that committed the step.
    of_hosts = [status.progress.step for status in state.hosts.values()]
    return max([state.generation.record.progress, *of_workers, *of_hosts])


def find_recoverable_step(state: MembershipState) -> int:
    """Return the newest step if a complete state has ever been reported; before that, the generation's progress.

    A job without a committed snapshot, whose state is complete on no host, restarts after a failure: nothing else is
    guaranteed.
    """
    held = any(
        status.worker is not None and status.worker.report.held.holds_state for status in state.hosts.values()
    )
    kept = any(
        s.phase is SnapshotPhase.COMMITTED
        for statuses in get_snapshot_reports(state).values()
        for s in statuses[1]
    )
    if held or kept or state.generation.record.progress > 0 or find_snapshot(state) is not None:
        return find_newest_step(state)
    return 0


def have_all_finished_step(state: MembershipState) -> bool:
    """Return whether every member has finished a step in this generation, or all of its training."""
    return all(w.report.place.has_finished_step or w.report.is_done for w in list_live_workers(state))


def find_snapshot(state: MembershipState) -> SnapshotPlan | None:
    """Return the newest snapshot of this job's state of which enough is left, also on hosts that do not train.

    On hosts that some members cannot reach only if there is none without them.
    """
    reports = get_snapshot_reports(state)
    reached = {
        host: report for host, report in reports.items() if host not in state.generation.failures.separated
    }
    return choose_snapshot(reached) or choose_snapshot(reports)


def is_snapshot_settling(state: MembershipState, present: SnapshotPlan) -> bool:
    """Return whether a snapshot newer than `present` may soon be complete: all live workers have copied it.

    It needs the parts of all hosts, so each host's server must be there: its part of `present` shows that. Whether a
    dead worker had copied its part is not known.
    """
    if len(present.sources) < sum(len(group.hosts) for group in present.groups):
        return False
    copied = [worker.report.held.copied for worker in list_live_workers(state)]
    return bool(copied) and all(
        id is not None
        and id.generation == present.id.generation
        and id.step > present.id.step
        and _counts(state.generation, id)
        for id in copied
    )


def is_snapshot_needed(state: MembershipState) -> bool:
    """Return whether hosts that left training, and are still registered, have data that no other host has.

    They do until a snapshot of this generation is committed, or a member has the complete state.
    """
    generation = state.generation
    members = {member.host for member in generation.membership.members}
    kept = generation.state.snapshot.sources if generation.state.snapshot is not None else ()
    if not any(source.host in state.hosts and source.host not in members for source in kept):
        return False
    is_newer_safe = any(
        s.id.generation == generation.number and s.phase is SnapshotPhase.COMMITTED
        for host, status in state.hosts.items()
        if host in members
        for s in status.snapshots
    )
    return not (is_newer_safe or any(worker.report.held.holds_state for worker in list_live_workers(state)))


def explain_snapshots(state: MembershipState) -> str:
    """Explain why `find_snapshot` finds none."""
    return explain_loss(get_snapshot_reports(state))


def get_snapshot_reports(state: MembershipState) -> ReportedStatuses:
    """Return what every snapshot server reports of this job's state, without snapshots that do not count any more."""
    return {
        host: (status.snapshot_server.endpoint, list_counted_snapshots(state.generation, status))
        for host, status in state.hosts.items()
        if status.snapshot_server is not None
    }


def list_counted_snapshots(generation: Generation, status: HostStatus) -> tuple[SnapshotStatus, ...]:
    """Return the snapshots of this job's state that a host reports, without those that do not count any more."""
    if status.snapshot_server is None:
        return ()
    return tuple(s for s in status.snapshots if _counts(generation, s.id))


def _counts(generation: Generation, id: SnapshotId) -> bool:
    # Snapshots from before the job began anew are of another course of the training.
    return (
        id.generation >= generation.state.initial_generation
        and id not in generation.state.unreadable_snapshots
        and not any(void.has(id) for void in generation.state.void_snapshots)
    )


def owes_answer(generation: Generation, status: HostStatus) -> bool:
    """Return whether a host that does not train may have other snapshots than it had when it wrote its status."""
    return (
        generation.membership.world > 0  # else there is no snapshot, and no generation in the store to answer
        and status.snapshot_server is not None
        and status.generation < generation.number
        and generation.membership.find_member(status.host) is None
    )


def awaits_snapshot_report(status: HostStatus) -> bool:
    """Return whether the worker has reported a snapshot that its host's server has yet to report."""
    reported = status.worker.report.held.snapshot if status.worker is not None else None
    return (
        reported is not None
        and status.snapshot_server is not None
        and all(s.id != reported for s in status.snapshots)
    )
