"""Why members cannot continue as they are: one is lost, or has failed, or the coordination service has ended. Pure."""

import dataclasses

from resilient_jax.ids import HostName
from resilient_jax.membership.facts import (
    MembershipState,
    find_worker,
    has_lost_service,
    have_all_finished_step,
    join_names,
    list_live_workers,
)
from resilient_jax.protocol.generation import Generation, GenerationPhase, Member
from resilient_jax.protocol.host_status import WorkerStatus
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.protocol.worker_report import WorkerFailureKind, WorkerState


@dataclasses.dataclass(frozen=True, slots=True)
class Disruption:
    """The reason why the members cannot continue, and what the next generation records of it."""

    reason: str
    failed_host: HostName | None = None
    failure_text: str = ""
    unreadable_snapshot: SnapshotId | None = None
    """A snapshot that must not be read again."""
    is_explained: bool = False
    """Whether the end of the coordination service explains it, as a death would; or that there are too few hosts."""
    is_failure: bool = True
    """Whether an attempt to train has failed; else there was none."""


def find_disruption(state: MembershipState) -> Disruption | None:
    """Return why the members cannot continue as they are; None if they can."""
    generation = state.generation
    lost = [m.host for m in generation.membership.members if find_worker(state, m) is None]
    if lost:
        return Disruption(f"lost {join_names(lost)}")
    for member, worker in zip(generation.membership.members, list_live_workers(state), strict=True):
        if (disruption := find_disruption_by(generation, member, worker)) is not None:
            return disruption
    cliques_pending = generation.phase is GenerationPhase.FORM or (
        generation.phase is GenerationPhase.ACTIVE and not have_all_finished_step(state)
    )
    if cliques_pending and has_lost_service(state):
        return Disruption("lost the coordination service before the world was complete", is_explained=True)
    return None


def find_disruption_by(generation: Generation, member: Member, worker: WorkerStatus) -> Disruption | None:
    """Return why the members cannot continue because of this one, whose worker lives; None if they can."""
    failure = worker.report.failure
    # In FORM, a joiner may still carry the failure of a generation it was in long ago.
    is_old = generation.phase is GenerationPhase.FORM and worker.report.generation < generation.number
    if failure is not None and not is_old and failure.kind is WorkerFailureKind.COLLECTIVE:
        return Disruption(f"a collective failed on {member.host}", member.host, failure.text)
    if failure is not None and not is_old and failure.kind is WorkerFailureKind.NO_CLIQUE:
        text = f"{member.host} needs a clique that its world cannot form"
        return Disruption(text, failure_text=failure.text, is_explained=True)
    if failure is not None and not is_old and failure.kind is WorkerFailureKind.TOO_FEW_HOSTS:
        text = f"training needs more hosts, as {member.host} has found"
        return Disruption(text, failure_text=failure.text, is_explained=True, is_failure=False)
    if failure is not None and not is_old and failure.kind is WorkerFailureKind.SNAPSHOT:
        return Disruption(
            f"{member.host} could not read the snapshot",
            member.host,
            failure.text,
            unreadable_snapshot=generation.state.snapshot.id
            if generation.state.snapshot is not None
            else None,
        )
    if failure is not None and not is_old and failure.kind is WorkerFailureKind.CORRUPTION:
        return Disruption(failure.text, member.host, failure.text)
    if _stopped_early(generation, worker):
        return Disruption(f"{member.host} stopped training (it lost the store)")
    return None


def _stopped_early(generation: Generation, worker: WorkerStatus) -> bool:
    """Return whether a worker is idle where it should train, because it stopped when its host lost the store."""
    report = worker.report
    if report.is_done or report.state is not WorkerState.IDLE:
        return False
    at_boundary = (
        generation.phase is GenerationPhase.BOUNDARY and report.held.step == generation.planned.boundary_step
    )
    return generation.phase is not GenerationPhase.FORM and not at_boundary
