"""How many more hosts may be lost before the committed state is. Pure.

The state outlives the loss of a set of hosts if a member outside of the set has a complete copy, or if what the other
hosts have of the newest snapshot is enough to rebuild it. The measure is the largest n such that the state outlives the
loss of any n hosts, each with its agent, worker and snapshot server:

    n = copies + min over groups of max(0, spare + 1 - copies in the group) - 1

Copies are the members with a complete state, and `spare` is how many of a group's hosts that have the snapshot may be
lost. The state is lost with the fewest hosts when all copies are, and with them one more of a group than it can spare.
Without a snapshot the minimum is 0, without copies `copies` is.
"""

from collections.abc import Iterator, Set

import msgspec

from resilient_jax.cluster.membership_state import MembershipState, find_worker, get_snapshot_reports
from resilient_jax.ids import HostName
from resilient_jax.protocol.records import Generation, GenerationPhase, Member, WorkerStatus
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotPhase, SnapshotPlan
from resilient_jax.snapshot.snapshot_choice import ReportedStatuses, choose_snapshot


class Redundancy(msgspec.Struct, frozen=True, kw_only=True):
    """What stands between a job's committed state and its loss.

    Attributes:
        losses: how many more hosts may be lost, whichever they are. 0: the next loss may be that of the state.
        step: the number of committed steps in that state.
        copies: how many members have a complete state.
        snapshot: the newest snapshot that can be rebuilt from the hosts' memory; None: there is none.
    """

    losses: int
    step: int
    copies: int
    snapshot: SnapshotId | None = None


def measure_redundancy(state: MembershipState) -> Redundancy | None:
    """Return the redundancy of the committed state; None if no host has a state, or enough of one."""
    copies = {member.host: worker.report.step for member, worker in _list_copies(state)}
    plan = choose_snapshot(_complete_reports(get_snapshot_reports(state)))
    if not copies and plan is None:
        return None
    return Redundancy(
        losses=count_survivable_losses(copies.keys(), plan),
        step=max(copies.values()) if copies else plan.id.step if plan is not None else 0,
        copies=len(copies),
        snapshot=plan.id if plan is not None else None,
    )


def count_losses_left(state: MembershipState) -> int | None:
    """Return how many more hosts may be lost before the state is; None if there is no state."""
    redundancy = measure_redundancy(state)
    return redundancy.losses if redundancy is not None else None


def is_last_copy_without(state: MembershipState, members: tuple[Member, ...]) -> bool:
    """Return whether the next loss may be that of the state if only `members` of the generation are left."""
    left = msgspec.structs.replace(state.generation, members=members)
    return not count_losses_left(
        MembershipState(generation=left, hosts=state.hosts, phase_since_s=state.phase_since_s)
    )


def count_survivable_losses(copies: Set[HostName], snapshot: SnapshotPlan | None) -> int:
    """Return the largest n such that the state outlives the loss of any n hosts.

    Args:
        copies: hosts that have a complete state in their worker.
        snapshot: that can be rebuilt from its sources; None if there is none.

    Returns:
        n; -1 if there is neither a copy nor a snapshot.
    """
    if snapshot is None:
        return len(copies) - 1
    sources = {source.host for source in snapshot.sources}
    # The hosts to be lost beside all copies until one group cannot be rebuilt.
    more = [
        max(0, group.parity - sum(host not in sources or host in copies for host in group.hosts) + 1)
        for group in snapshot.groups
    ]
    return len(copies) + min(more, default=0) - 1


def _list_copies(state: MembershipState) -> Iterator[tuple[Member, WorkerStatus]]:
    """Yield the members whose live worker has all of the state that the generation resumed from, or of a later step.

    None where the loss of one worker costs all.
    """
    generation = state.generation
    if not generation.keeps_workers:
        return
    for member in generation.members:
        worker = find_worker(state, member)
        if worker is None or not worker.report.holds_state or worker.report.step < generation.step:
            continue
        if not _is_receiving(generation, member, worker):
            yield member, worker


def _is_receiving(generation: Generation, member: Member, worker: WorkerStatus) -> bool:
    """Return whether a member gives up what it has for the state that it fetches now."""
    if generation.phase is not GenerationPhase.FORM or member.host not in generation.receivers:
        return False
    return not (worker.report.has_formed and worker.report.generation == generation.number)


def _complete_reports(reports: ReportedStatuses) -> ReportedStatuses:
    """Return the reports with each committed snapshot also on hosts that have yet to report it.

    Hosts report one after the other, and a snapshot is committed only once all hosts of its groups have it; a server
    that reports another snapshot of that generation has been there all the time. Else the measure would fall and rise
    with every snapshot.
    """
    committed = {
        status.id: status
        for _, statuses in reports.values()
        for status in statuses
        if status.phase is SnapshotPhase.COMMITTED
    }
    newest = committed[max(committed)] if committed else None
    if newest is None:
        return reports
    filled = dict(reports)
    for group in newest.groups:
        for host in group.hosts:
            endpoint, statuses = reports.get(host, ("", ()))
            is_there = any(status.id.generation == newest.id.generation for status in statuses)
            if is_there and all(status.id != newest.id for status in statuses):
                filled[host] = (endpoint, (*statuses, newest))
    return filled
