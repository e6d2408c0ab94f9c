"""A change between two steps: hosts leave after a notice or as slow ones, and hosts that are ready join. Pure."""

import msgspec

from resilient_jax.ids import GenerationNumber
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState, awaits_seat, has_service, join_names
from resilient_jax.membership.kept_stages import list_absent
from resilient_jax.membership.next_members import (
    NOTICE_COPY_TIMEOUT_S,
    expect_members,
    is_notice_long_enough,
)
from resilient_jax.membership.recovery_decision import decide_admission, find_overdue
from resilient_jax.membership.slowness import act_on_slow_host
from resilient_jax.membership.spare_hosts import list_staying
from resilient_jax.protocol.records import Generation, GenerationPhase, HostStatus
from resilient_jax.protocol.recovery_records import RecoveryAction
from resilient_jax.protocol.state_records import NextMembers


def plan_change(
    state: MembershipState,
    joiners: list[HostStatus],
    now: float,
    config: MembershipConfig,
) -> Generation | None:
    """Return the next number, in PAUSE, or the present one with a decision to wait; None if nothing changes.

    Args:
        state: of the machine, whose members train.
        joiners: hosts that are ready, no more than there are places.
        now: the monotonic time in seconds.
        config: of the machine.
    """
    generation = state.generation
    decision, reason = generation.decision, _find_reason_to_change(state, now)
    joining = [status for status in joiners if not awaits_seat(generation, status)]
    # In a change that must be, hosts that are ready join without a pause of their own.
    if reason is None and joining:
        admission = decide_admission(state, joining, now, config)
        # While a stage is kept, the record says so, and until when: others that are ready wait as long at most.
        if admission is not None and admission.action is RecoveryAction.JOIN:
            decision, reason = admission, f"{join_names(status.host for status in joining)} asked to join"
        elif admission is not None and not list_absent(generation):
            return msgspec.structs.replace(generation, decision=admission)
    if reason is None:
        return act_on_slow_host(state, config)
    return msgspec.structs.replace(
        generation,
        number=GenerationNumber(generation.number + 1),
        phase=GenerationPhase.PAUSE,
        attempts=0,
        are_parts_doubtful=False,
        taken_out=None,
        decision=decision,
        reason=reason,
        next_members=_expect_members(
            state, is_join=decision is not generation.decision, now=now, config=config
        ),
    )


def _expect_members(
    state: MembershipState, *, is_join: bool, now: float, config: MembershipConfig
) -> NextMembers | None:
    """Return the members that blocks are copied for; None: for none.

    A host that joins has asked for copies by itself, and is ready only when they are there.
    """
    kept = list_staying(state)
    has_notice = any(
        state.hosts[m.host].is_draining for m in state.generation.members if m.host in state.hosts
    )
    if is_join or (has_notice and not is_notice_long_enough(state, now)):
        return None
    found = expect_members(state, kept, state.generation.slowness.speeds, config)
    if found is None or not has_notice:
        return found
    return msgspec.structs.replace(found, copy_timeout_s=NOTICE_COPY_TIMEOUT_S)


def _find_reason_to_change(state: MembershipState, now: float) -> str | None:
    """Return why the members must change, whether hosts join or not; None: they need not."""
    staying = {status.host for status in list_staying(state)}
    leaving = [m.host for m in state.generation.members if m.host in state.hosts and m.host not in staying]
    if leaving:
        return f"{join_names(leaving)} got a notice to leave"
    if overdue := find_overdue(state, now):
        return f"{join_names(overdue)} did not come back: its stage is kept no longer, and layers are divided anew"
    return None if has_service(state) else "the coordination service has ended"
