"""A change between two steps: hosts leave after a notice or as slow ones, and hosts that are ready join. Pure."""

from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.doubt import are_parts_trusted
from resilient_jax.membership.facts import (
    MembershipState,
    awaits_seat,
    has_service,
    is_draining,
    join_names,
    list_live_workers,
)
from resilient_jax.membership.job_end import have_all_notice, saves_on_notice
from resilient_jax.membership.kept_stages import list_absent
from resilient_jax.membership.next_members import (
    LEAVING_COPY_TIMEOUT_S,
    expect_members,
    is_wait_too_long_for,
    limit_notice_copies_s,
)
from resilient_jax.membership.planned_axes import keeps_axes
from resilient_jax.membership.planned_pause import begin_pause
from resilient_jax.membership.recovery_decision import are_axes_overdue, decide_admission, find_overdue
from resilient_jax.membership.slowness import act_on_slow_host
from resilient_jax.membership.spare_hosts import list_staying
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import JOINING_ACTIONS
from resilient_jax.protocol.state_records import COPY_TIMEOUT_S, NextMembers, are_parts_complete


def plan_change(
    state: MembershipState,
    joiners: list[HostStatus],
    now: float,
    config: MembershipConfig,
) -> Generation | None:
    """Return the next number, in PAUSE, or the present one with a decision to wait; None if nothing changes.

    Args:
        state: the members of the state train.
        joiners: ready hosts, no more than there are places.
        now: monotonic time in seconds.
    """
    generation = state.generation
    decision, reason = generation.record.decision, _find_reason_to_change(state, now)
    joining = [status for status in joiners if not awaits_seat(generation, status)]
    # In a change that must be, hosts that are ready join without a pause of their own.
    if reason is None and joining:
        admission = decide_admission(state, joining, now, config)
        # While a stage or axes are kept, the record says so, and until when: hosts that are ready and do not join yet
        # wait as long at most.
        if admission is not None and admission.action in JOINING_ACTIONS:
            decision, reason = admission, f"{join_names(status.host for status in joining)} asked to join"
        elif admission is not None and not list_absent(generation) and not keeps_axes(generation):
            return change_fields(generation, decision=admission)
    if reason is None:
        return act_on_slow_host(state, config)
    is_join = decision is not generation.record.decision
    ends_job = not joiners and have_all_notice(state) and saves_on_notice(state)
    members = _expect_members(state, is_join=is_join, now=now, config=config)
    pause = begin_pause(generation, reason, members, ends_job=ends_job)
    return change_fields(pause, decision=decision)


def decide_in_pause(state: MembershipState) -> Generation | None:
    """Return the boundary, once all members have said where they can stop; or the pause without copies, if a member
    must leave before they are made; None: nothing is decided yet.

    Args:
        state: the generation of the state is in PAUSE.
    """
    generation = state.generation
    limits = [
        w.report.earliest_stop_step
        for w in list_live_workers(state)
        if w.report.generation == generation.number
    ]
    # A member that has not answered may be in any step, so no boundary can be chosen yet.
    if len(limits) == len(generation.membership.members) and None not in limits:
        # The latest of the members' earliest steps: the furthest ahead cannot go back, and all others reach it.
        boundary = max(limit for limit in limits if limit is not None)
        return change_fields(
            generation,
            phase=GenerationPhase.BOUNDARY,
            boundary_step=boundary,
            parts_stay=_do_parts_stay(state),
        )
    if any(is_wait_too_long_for(state, member.host) for member in generation.membership.members):
        return change_fields(generation, next_members=None)
    return None


def _do_parts_stay(state: MembershipState) -> bool:
    """Return whether the members that stay have all of the state in parts, which they take into another world, too.

    Then a snapshot is worth no more in the pause than between any two steps, where nobody waits for one.
    """
    workers = [status.worker for status in list_staying(state) if status.worker is not None]
    parts = [worker.report.held.part for worker in workers if worker.report.held.part is not None]
    return are_parts_trusted(state.generation) and are_parts_complete(parts)


def _expect_members(
    state: MembershipState, *, is_join: bool, now: float, config: MembershipConfig
) -> NextMembers | None:
    """Return the members that blocks are copied for; None: for none.

    A host that joins has asked for copies by itself, and is ready only when they are there.
    """
    if is_join:
        return None
    leaving = [state.hosts[m.host] for m in state.generation.membership.members if is_draining(state, m.host)]
    timeout_s = LEAVING_COPY_TIMEOUT_S if leaving else COPY_TIMEOUT_S
    if any(status.is_draining for status in leaving):
        timeout_s = limit_notice_copies_s(state, now, config)
    if not timeout_s:
        return None
    speeds = state.generation.record.slowness.speeds
    return expect_members(state, list_staying(state), speeds, config, timeout_s)


def _find_reason_to_change(state: MembershipState, now: float) -> str | None:
    """Return why the members must change, whether hosts join or not; None: they need not."""
    staying = {status.host for status in list_staying(state)}
    leaving = [
        m.host for m in state.generation.membership.members if m.host in state.hosts and m.host not in staying
    ]
    if leaving:
        return f"{join_names(leaving)} got a notice to leave"
    if overdue := find_overdue(state, now):
        decision = state.generation.record.decision
        is_awaited = decision is not None and not set(overdue).isdisjoint(decision.awaited)
        is_or_are = "is" if len(overdue) == 1 else "are"
        why = "did not come back" if is_awaited else f"{is_or_are} not awaited"
        stages = "its stage is" if len(overdue) == 1 else "their stages are"
        return f"{join_names(overdue)} {why}: {stages} kept no longer, and layers are divided anew"
    if are_axes_overdue(state, now):
        decision = state.generation.record.decision
        awaited = join_names(decision.awaited) if decision is not None else ""
        why = f", and {awaited} did not come back" if awaited else ""
        return f"axes were kept long enough{why}: the best ones for these hosts follow"
    return None if has_service(state) else "the coordination service has ended"
