"""How a generation ends: with the next number, in which members stop and are counted, or with the job. Pure."""

from resilient_jax.ids import GenerationNumber
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.disruptions import Disruption
from resilient_jax.membership.doubt import doubt_newer_states, doubt_parts
from resilient_jax.membership.facts import (
    MembershipState,
    find_recoverable_step,
    list_dropped_workers,
    list_live_workers,
    list_replaced_workers,
    list_survivors,
)
from resilient_jax.membership.kept_stages import list_groups
from resilient_jax.membership.last_holders import have_last_copy
from resilient_jax.membership.recovery_decision import decide_to_stop
from resilient_jax.protocol.generation import Generation, GenerationPhase, JobOutcome, Member
from resilient_jax.protocol.record_parts import change_fields


def finish(generation: Generation, outcome: JobOutcome) -> Generation:
    """Return the generation with which the job ends."""
    return change_fields(
        generation,
        phase=GenerationPhase.FINISHED,
        outcome=outcome,
        reason=str(outcome.kind),
        decision=decide_to_stop(generation, outcome),
    )


def quiesce(state: MembershipState, why: Disruption, members: tuple[Member, ...] | None = None) -> Generation:
    """Return the next number, in QUIESCE, with the members that are left."""
    generation, number = state.generation, GenerationNumber(state.generation.number + 1)
    # Before any of them is left out, for only that one may know it.
    doubted = doubt_newer_states(state, number) or generation
    members = list_survivors(state) if members is None else members
    no_member_died = members == generation.membership.members
    # The members' own steps: one that only a dead host committed would count as progress forever.
    made_progress = any(w.report.held.step > generation.state.step for w in list_live_workers(state))
    # A death explains the failure. Others are counted, as long as no step is committed between them (rule 7).
    failed = int(why.is_failure)
    attempts = (failed if made_progress else generation.failures.attempts + failed) if no_member_died else 0
    before = generation.failures.suspects if attempts > failed else ()
    suspects = (*before, why.failed_host) if attempts and why.failed_host is not None else before
    return change_fields(
        doubted,
        number=number,
        phase=GenerationPhase.QUIESCE,
        members=members,
        unreadable_snapshots=generation.state.unreadable_snapshots
        + ((why.unreadable_snapshot,) if why.unreadable_snapshot is not None else ()),
        boundary_step=None,
        ends_job=False,
        parts_stay=False,
        next_members=None,
        earlier_stage_hosts=list_groups(state),
        dropped_workers=list_dropped_workers(state, members),
        progress=find_recoverable_step(state),
        attempts=attempts,
        are_parts_doubtful=doubt_parts(state, attempts, is_explained=why.is_explained),
        failed_host=why.failed_host,
        suspects=suspects,
        taken_out=generation.failures.taken_out if attempts > failed else None,
        failure_text=why.failure_text,
        reason=why.reason,
        hang="",
    )


def break_off(
    state: MembershipState,
    why: Disruption,
    config: MembershipConfig,
    members: tuple[Member, ...] | None = None,
) -> Generation:
    """Return the next number, in QUIESCE; without members where all workers of the world are replaced.

    Those that have the last copy of the state are not replaced: they are interrupted, if need be by the time-outs of
    their network, and take the state along into the next generation.
    """
    left = quiesce(state, why, members)
    if not config.replaces_workers:
        return left
    if have_last_copy(state, left, left.membership.members):
        kept = (
            f"{left.reason}; workers that are left are not replaced: no snapshot has the state that they have"
        )
        return change_fields(left, reason=kept)
    return change_fields(left, members=(), dropped_workers=list_replaced_workers(state, left.number))
