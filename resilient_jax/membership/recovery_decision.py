"""The decision at a change of members: the situation, read from the statuses, and the policy's choice of it. Pure.

A decision follows from the generation, its history included, and the statuses alone, so it is the same whoever leads.
Time only ends a wait: `RecoveryDecision.wait_s` after the decision was recorded, or after a new leader's term began,
the policy is asked again, without the hosts that were awaited in vain.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import (
    MembershipState,
    awaits_seat,
    has_service,
    has_taken_seat,
    is_cold,
    is_draining,
    is_on_its_way,
    join_names,
)
from resilient_jax.membership.host_shares import HostShares
from resilient_jax.membership.kept_stages import find_stage_loss, list_absent, list_order
from resilient_jax.membership.planned_axes import (
    find_plan_change,
    keeps_axes,
    list_lost,
    note_axes,
)
from resilient_jax.membership.spare_hosts import count_places, explain_cold_join, list_staying
from resilient_jax.membership.world_formation import StateOrigin, explain_new_world, is_in_place
from resilient_jax.policy.choice import choose
from resilient_jax.policy.failure_forecast import (
    count_host_losses,
    describe_record,
    expect_return_s,
    list_expected,
)
from resilient_jax.policy.prices import PRIOR_S, price_job
from resilient_jax.policy.return_groups import ExpectedReturn
from resilient_jax.policy.situations import Admission, Loss
from resilient_jax.protocol.generation import Generation, GenerationPhase, JobOutcome, JobOutcomeKind
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.recovery_records import (
    WAITING_ACTIONS,
    LossCause,
    RecoveryAction,
    RecoveryDecision,
    RecoveryOption,
    TimedChange,
)

MAX_NAMES: Final = 8
"""Of hosts in a reason."""
_STOPS: Final = frozenset(
    {JobOutcomeKind.STATE_LOST, JobOutcomeKind.TOO_FEW_HOSTS, JobOutcomeKind.INTERRUPTED}
)


def decide_after_loss(
    state: MembershipState,
    kept: list[HostStatus],
    joiners: list[HostStatus],
    origin: StateOrigin,
    now: float,
    config: MembershipConfig,
) -> RecoveryDecision | None:
    """Return how these hosts go on, which are enough by the rules; None while a wait that was decided lasts.

    Args:
        origin: origin of the state that the hosts resume from.
        now: monotonic time in seconds.
    """
    generation, present = state.generation, [*kept, *joiners]
    places = count_places(state, present, config.num_hosts)
    awaited = _list_awaited(state, present, places)
    recorded = generation.record.decision
    has_waited = (
        recorded is not None
        and recorded.action is RecoveryAction.WAIT
        and recorded.number == generation.number
    )
    if recorded is not None and has_waited:
        if not is_wait_over(state, now) and not set(recorded.awaited).isdisjoint(awaited):
            return None
        awaited = {host: return_s for host, return_s in awaited.items() if host not in recorded.awaited}
    # Not where all leave their world after the step: the model is cut anew at once.
    stage = find_stage_loss(kept, joiners) if has_service(state) else None
    in_place = is_in_place(state, kept, joiners, origin)
    planned = find_plan_change(kept, joiners)
    # With hosts that join now no other axes are an option; those that follow are recorded all the same.
    foreseen = planned if planned is not None and planned[1].groups and not joiners else None
    lost = [one.host for one in generation.record.history.away if one.number == generation.number]
    # What was estimated is of all that are gone, also if they were lost one after the other.
    if stage is not None:
        lost = list(stage.hosts)
    elif foreseen is not None:
        lost = list_lost(foreseen[0], kept)
    shares, names = HostShares.of(state), {*(status.host for status in present), *awaited}
    num_seated = shares.sum_used(status.host for status in joiners)
    loss = Loss(
        places=shares.sum_complete(names) + max(places - len(names), 0),
        ready=shares.sum_used(status.host for status in kept) + num_seated,
        num_seated=num_seated,
        num_cold=shares.sum_used(status.host for status in joiners if is_cold(status)),
        cold_join_because=explain_cold_join(state, kept, joiners, config),
        num_lost=_count_lost(generation, lost, shares),
        awaited=_list_returns(awaited, shares),
        new_world_because="" if in_place else explain_new_world(state, kept, joiners),
        can_join_in_place=_has_seats(state, config, is_same_world=in_place and has_service(state)),
        needs_restore=not (origin.sources or origin.part_holders)
        and (origin.snapshot is not None or generation.record.progress > 0),
        stage=stage,
        plan=foreseen[1] if foreseen is not None else None,
        has_new_axes=foreseen is not None and foreseen[1].best_axes != foreseen[0].axes,
        stage_return_s=awaited.get(stage.hosts[0]) if stage is not None and len(stage.hosts) == 1 else None,
        may_wait=bool(kept) and generation.phase is GenerationPhase.QUIESCE and not has_waited,
    )
    choice = choose(loss, price_job(generation.record.history, names))
    if stage is not None and choice.action is RecoveryAction.KEEP_STAGES:
        hosts = stage.hosts if choice.wait_s else ()
        choice = msgspec.structs.replace(choice, awaited=hosts, stage_hosts=list_order(generation, kept))
        return _record(state, choice, about=lost)
    decision = _record(state, choice, about=lost)
    return note_axes(generation, decision, *planned) if planned is not None else decision


def _has_seats(state: MembershipState, config: MembershipConfig, *, is_same_world: bool) -> bool:
    """Return whether hosts that come later will find seats: in a new world there are some again, also in one that
    follows between two steps.
    """
    generation = state.generation
    return (
        generation.membership.next_seat < generation.membership.num_seats
        if is_same_world
        else config.spare_seats > 0
    )


def find_overdue(state: MembershipState, now: float) -> tuple[HostName, ...]:
    """Return the hosts whose stages were kept long enough; none while the decision to wait for them lasts.

    None of them is on its way, or has a seat. A stage that is kept until its blocks are copied does not wait for a host
    that is on its way: only one that can join now has it back.
    """
    generation = state.generation
    decision, is_until_copied = generation.record.decision, False
    if decision is not None and decision.action is RecoveryAction.KEEP_STAGES:
        if decision.wait_s and not is_wait_over(state, now):
            return ()
        is_until_copied = not decision.wait_s
    return tuple(
        host
        for host in list_absent(generation)
        if not (_has_joined_world(state, host) or (not is_until_copied and _comes(state, host)))
    )


def are_axes_overdue(state: MembershipState, now: float) -> bool:
    """Return whether axes that are not the best were kept long enough; not while a host that was awaited is coming.

    One that is ready, but does not join yet, joins in the change to the best axes.
    """
    decision = state.generation.record.decision
    return (
        decision is not None
        and keeps_axes(state.generation)
        and is_wait_over(state, now)
        and not any(_comes(state, host) for host in decision.awaited)
    )


def _comes(state: MembershipState, host: HostName) -> bool:
    """Return whether a host's worker has started, or has a seat to take, and cannot join yet."""
    status = state.hosts.get(host)
    if status is None or is_draining(state, host) or status.worker is None or not status.worker.is_alive:
        return False
    return is_on_its_way(status) or awaits_seat(state.generation, status)


def _has_joined_world(state: MembershipState, host: HostName) -> bool:
    """Return whether a host's worker is in the seat that it was given, so that it can join at the next boundary."""
    status = state.hosts.get(host)
    if status is None or is_draining(state, host) or status.worker is None or not status.worker.is_alive:
        return False
    return has_taken_seat(state.generation, status) and not is_on_its_way(status)


def decide_admission(
    state: MembershipState, joining: list[HostStatus], now: float, config: MembershipConfig
) -> RecoveryDecision | None:
    """Return whether hosts that are ready join others that train; None while a wait that was decided lasts.

    Args:
        state: the members of the state train.
        joining: hosts that are ready, no more than there are places.
        now: monotonic time in seconds.
    """
    generation = state.generation
    staying = list_staying(state)
    names = tuple(sorted(status.host for status in joining))
    places = count_places(state, [*staying, *joining], config.num_hosts)
    awaited = _list_awaited(state, [*staying, *joining], places)
    recorded = generation.record.decision
    is_same = (
        recorded is not None
        and recorded.number == generation.number
        and recorded.action in WAITING_ACTIONS
        and set(recorded.joining) == set(names)
    )
    before: RecoveryAction | None = None
    if recorded is not None and is_same:
        is_awaited = recorded.action is RecoveryAction.POSTPONE or not set(recorded.awaited).isdisjoint(
            awaited
        )
        if is_awaited and generation.record.losses_left and not is_wait_over(state, now):
            return None
        awaited = {host: return_s for host, return_s in awaited.items() if host not in recorded.awaited}
        before = RecoveryAction.POSTPONE if recorded.action is RecoveryAction.POSTPONE else None
    new_world_because = explain_new_world(state, staying, joining)
    # In a new world no programs are ready, whichever axes it has.
    planned = find_plan_change(staying, joining) if not new_world_because else None
    shares, hosts = HostShares.of(state), {*(status.host for status in staying), *names}
    admission = Admission(
        places=shares.sum_complete([*hosts, *awaited]) + max(places - len(hosts) - len(awaited), 0),
        training=shares.sum_used(status.host for status in staying),
        joining=shares.sum_used(names),
        awaited=_list_returns(awaited, shares),
        new_world_because=new_world_because,
        is_last_copy=not generation.record.losses_left,
        has_stage=not set(names).isdisjoint(list_absent(generation)),
        before=before,
        plan=planned[1] if planned is not None else None,
        has_new_axes=planned is not None and planned[1].best_axes != planned[0].axes,
    )
    choice = choose(admission, price_job(generation.record.history, hosts, names))
    again = (host for host in names if count_host_losses(generation.record.history, host) > 1)
    decision = _record(state, msgspec.structs.replace(choice, joining=names), about=again)
    return note_axes(generation, decision, *planned) if planned is not None else decision


def decide_to_stop(generation: Generation, outcome: JobOutcome) -> RecoveryDecision | None:
    """Return the decision to end a job for which nothing else is left; None if it ends for another reason."""
    if outcome.kind not in _STOPS:
        return generation.record.decision
    option = RecoveryOption(action=RecoveryAction.STOP, score=0.0, pause_s=0.0, speed=0.0)
    return RecoveryDecision(
        action=RecoveryAction.STOP,
        number=generation.number,
        reason=f"the job stops, because nothing else is possible: {outcome.message}",
        options=(option,),
    )


def is_wait_over(state: MembershipState, now: float) -> bool:
    """Return whether the recorded decision is to be looked at again."""
    decision = state.generation.record.decision
    return decision is not None and now - state.memory.decided_s > decision.wait_s


def _list_awaited(
    state: MembershipState, present: Collection[HostStatus], places: int
) -> dict[HostName, float]:
    """Return the hosts without part in this change that are expected back, and after how many seconds; soonest first.

    Their agent lives, and has a worker start or a new one to start. Or it is gone, as it was before, and each time the
    host has come back.
    """
    names, history = {status.host for status in present}, state.generation.record.history
    coming = [
        host
        for host, status in state.hosts.items()
        if host not in names and not is_draining(state, host) and _is_coming(state, status)
    ]
    gone = [
        host for host in list_expected(history) if host not in state.hosts and host not in state.quarantined
    ]
    expected = {
        host: expect_return_s(history, host, PRIOR_S[TimedChange.RETURN]) for host in {*coming, *gone}
    }
    soonest = sorted(expected.items(), key=lambda one: (one[1], one[0]))
    return dict(soonest[: max(places - len(present), 0)])


def _count_lost(generation: Generation, lost: Iterable[HostName], shares: HostShares) -> float:
    """Return what hosts counted before their loss: one that was lost with a device had more than it has now."""
    with_device = {one.host for one in generation.record.history.away if one.cause is LossCause.DEVICE}
    with_device.update(host for host, _ in generation.record.slowness.restarting)
    return sum(
        shares.count_complete(host) if host in with_device else shares.count_used(host) for host in lost
    )


def _list_returns(awaited: Mapping[HostName, float], shares: HostShares) -> tuple[ExpectedReturn, ...]:
    return tuple(
        ExpectedReturn(return_s, shares.count_used(host), host) for host, return_s in awaited.items()
    )


def _is_coming(state: MembershipState, status: HostStatus) -> bool:
    worker = status.worker
    if worker is None or worker.exit_code is not None or worker.is_dying:
        return True
    return is_on_its_way(status) or awaits_seat(state.generation, status)


def _record(
    state: MembershipState, choice: RecoveryDecision, *, about: Iterable[HostName]
) -> RecoveryDecision:
    """Return the record of a choice, whose reason begins with why hosts were lost."""
    causes = describe_record(state.generation.record.history, list(about)[:MAX_NAMES])
    reason = f"{causes}; {choice.reason}" if causes else choice.reason
    if choice.awaited:
        reason += f"; awaited: {_describe_hosts(choice.awaited)}"
    return msgspec.structs.replace(choice, number=state.generation.number, reason=reason)


def _describe_hosts(hosts: tuple[HostName, ...]) -> str:
    more = f" and {len(hosts) - MAX_NAMES} more" if len(hosts) > MAX_NAMES else ""
    return join_names(hosts[:MAX_NAMES]) + more
