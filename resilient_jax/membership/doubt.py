"""States that are in doubt: a host that computed wrongly may have touched them, or their parts may not fit together.

Pure.
"""

from collections.abc import Iterable

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.membership.facts import (
    MembershipState,
    has_lost_service,
    have_all_finished_step,
    list_live_workers,
)
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.snapshots import VoidSnapshots
from resilient_jax.protocol.state_records import are_parts_complete
from resilient_jax.protocol.worker_report import WorkerReport


def find_trusted_step(state: MembershipState) -> int | None:
    """Return of how many steps a state may be at most, because a host computed wrongly after it; None: of any.

    What a single member knows counts: the others may have been interrupted before they learned it. What a member found
    before the job last went back was acted on then.
    """
    reports = [worker.report for worker in list_live_workers(state)]
    void = state.generation.state.void_snapshots
    acted_on = void[-1].before if void else 0
    steps = [report.doubt.trusted_step for report in reports if report.entered >= acted_on]
    return min((s for s in (state.generation.state.trusted_step, *steps) if s is not None), default=None)


def find_corrupt_hosts(state: MembershipState) -> frozenset[HostName]:
    """Return the hosts that compute wrongly, as any live worker has found. Such hosts take no part any more.

    They leave by themselves, too, but may be interrupted before they learn what they are.
    """
    named = (worker.report.doubt.corrupt_hosts for worker in list_live_workers(state))
    return frozenset(host for hosts in named for host in hosts)


def is_trusted(generation: Generation, report: WorkerReport) -> bool:
    """Return whether a worker's state is not in doubt: it is old enough, or was computed from one that is."""
    if generation.state.trusted_step is None or report.held.step <= generation.state.trusted_step:
        return True
    return report.place.has_finished_step and report.entered >= generation.state.void_snapshots[-1].before


def are_parts_trusted(generation: Generation) -> bool:
    """Return whether what members have in parts may be one state.

    After a failure that no death explains parts may not fit together; a snapshot surely does.
    """
    return generation.state.trusted_step is None and not generation.failures.are_parts_doubtful


def is_part_trusted(generation: Generation, report: WorkerReport) -> bool:
    """Return whether a member's part is one of a state: also once it has finished a step, to which all contribute."""
    if are_parts_trusted(generation):
        return True
    is_current = generation.phase is GenerationPhase.ACTIVE and report.generation == generation.number
    return generation.state.trusted_step is None and is_current and report.place.has_finished_step


def is_newest(generation: Generation, report: WorkerReport) -> bool:
    """Return whether what a worker has is of the step that the generation resumed from, or a later one."""
    # Those that a failure met between two commits catch up with the others.
    behind = 1 if generation.state.is_in_parts else 0
    return report.held.step + behind >= generation.state.step


def have_state(generation: Generation, hosts: Iterable[HostStatus]) -> bool:
    """Return whether workers of these hosts have the newest state that counts: one all of it, or together all parts."""
    reports = [status.worker.report for status in hosts if status.worker is not None]
    if generation.state.trusted_step is None:
        reports = [report for report in reports if is_newest(generation, report)]
    if any(report.held.holds_state and is_trusted(generation, report) for report in reports):
        return True
    parts = [r.held.part for r in reports if r.held.part is not None and is_part_trusted(generation, r)]
    return bool(parts) and are_parts_complete(parts)


def doubt_parts(state: MembershipState, attempts: int, *, is_explained: bool) -> bool:
    """Return whether parts may not fit together when a generation ends early.

    Args:
        attempts: attempts that have failed in a row although no host died, the present attempt included.
        is_explained: whether the end of the service explains the failed attempt, as a death would.
    """
    generation = state.generation
    if attempts and not (is_explained or has_lost_service(state)):
        return True
    # Peers may notice a death before its agent does: then it explains the failure that they have reported.
    is_explained_late = (
        generation.phase is GenerationPhase.QUIESCE and generation.failures.attempts == 1 and attempts == 0
    )
    # Not if all have finished a step in it.
    is_over = generation.phase is GenerationPhase.ACTIVE and have_all_finished_step(state)
    return generation.failures.are_parts_doubtful and not (is_over or is_explained_late)


def doubt_newer_states(state: MembershipState, before: GenerationNumber) -> Generation | None:
    """Return the generation that says which states count no more; None: it says so already, or none is in doubt.

    Args:
        before: number of the generation from which on states and snapshots are made from one that counts.
    """
    generation, trusted = state.generation, find_trusted_step(state)
    if trusted is None or trusted == generation.state.trusted_step:
        return None
    void = VoidSnapshots(before=before, after_step=trusted)
    return change_fields(
        generation, trusted_step=trusted, void_snapshots=(*generation.state.void_snapshots, void)
    )
