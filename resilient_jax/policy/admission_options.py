"""The options while hosts are ready to join others that train, with their prices."""

from typing import Final

from resilient_jax.policy.offer import Offer, Wait, count_awaited, explain_new_axes, find_join_s, make_option
from resilient_jax.policy.prices import Prices
from resilient_jax.policy.return_groups import ReturnGroup, group_returns, list_phases
from resilient_jax.policy.score import Phase
from resilient_jax.policy.situations import Admission
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryOption, TimedChange

RECONSIDER_S: Final = 60.0
"""How long a join is postponed until it is looked at again: the job has seen more of its failures by then."""


def list_admission_options(admission: Admission, prices: Prices) -> Offer:
    """Return whether hosts that are ready may join now, with others, or later."""
    # What losses of the hosts that join would cost the others: they would not have them without these.
    risk_s = prices.joiner_losses * prices.seconds[TimedChange.SHRINK]
    groups = group_returns(admission.awaited)
    before = Phase(pause_s=0.0, speed=admission.training / admission.places)
    refusal = "the stage of a host that is ready was kept for it" if admission.has_stage else ""
    refusal = "the next loss may be that of the state" if admission.is_last_copy else refusal
    gathers = [
        (_price_gather(admission, prices, number, refusal, risk_s), group)
        for number, group in enumerate(groups, 1)
    ]
    none = _price_gather(admission, prices, 0, refusal or "no other host is on its way", risk_s)
    gather, last = max(gathers, key=lambda one: one[0].score, default=(none, None))
    keep_axes = RecoveryAction.KEEP_AXES
    options = (
        _price_join(RecoveryAction.JOIN, admission, prices, "", risk_s),
        _price_join(keep_axes, admission, prices, explain_new_axes(admission), risk_s),
        gather,
        make_option(RecoveryAction.POSTPONE, (before,), prices, refusal),
    )
    usual = admission.before or RecoveryAction.JOIN
    if any(option.action is usual and option.why_not for option in options):
        usual = RecoveryAction.JOIN
    waits = {
        RecoveryAction.GATHER: Wait.for_group(last),
        RecoveryAction.POSTPONE: Wait(RECONSIDER_S),
    }
    if admission.plan is not None and admission.has_new_axes:
        waits[keep_axes] = Wait(_find_break_even_s(admission, prices))
    ready = min(admission.training + admission.joining, admission.places) + count_awaited(admission)
    reachable = min(ready, admission.places) / admission.places
    return Offer(options=options, usual=usual, reachable=reachable, waits=waits)


def _find_break_even_s(admission: Admission, prices: Prices) -> float:
    """Return when axes that are kept although hosts join have cost as much as to give them up would, in seconds."""
    assert admission.plan is not None, "else nothing is kept"
    present = min(admission.training + admission.joining, admission.places) / admission.places
    # T = (longer pause) / (speed lost)
    slower = present * (1 - admission.plan.kept / admission.plan.best)
    most_s = prices.next_failure_s
    return min(admission.plan.prepare_s / slower, most_s) if slower > 0 else most_s


def _price_join(
    action: RecoveryAction, admission: Admission, prices: Prices, why_not: str, risk_s: float
) -> RecoveryOption:
    """Return the option that hosts which are ready join now: with the best axes, or with those that the job has."""
    places, join_s = admission.places, find_join_s(admission, prices)
    ready = min(admission.training + admission.joining, places)
    first = Phase(pause_s=join_s, speed=ready / places)
    if admission.plan is not None and admission.has_new_axes:
        # The planner's speeds are rough: they count in their proportion, and never against a join.
        kept = first.speed * admission.plan.kept / admission.plan.best
        is_kept = action is RecoveryAction.KEEP_AXES
        first = Phase(
            pause_s=join_s if is_kept else max(join_s, admission.plan.move_s) + admission.plan.prepare_s,
            speed=kept if is_kept else first.speed,
        )
    phases = list_phases(first, ready, group_returns(admission.awaited), join_s=join_s, places=places)
    return make_option(action, phases, prices, why_not, risk_s=risk_s)


def _price_gather(
    admission: Admission, prices: Prices, num_groups: int, why_not: str, risk_s: float
) -> RecoveryOption:
    """Return the option that hosts which are ready join together with the first groups of those that come back."""
    places, join_s = admission.places, find_join_s(admission, prices)
    groups = group_returns(admission.awaited)
    last = groups[num_groups - 1] if num_groups else ReturnGroup(prices.seconds[TimedChange.RETURN], 0, 0)
    present = admission.training + admission.joining
    wait = Phase(pause_s=0.0, speed=admission.training / places, training_s=last.return_s)
    # Programs of new axes are prepared meanwhile.
    is_new = admission.plan is not None and admission.has_new_axes
    unprepared_s = max(admission.plan.prepare_s - last.return_s, 0.0) if admission.plan and is_new else 0.0
    joined = Phase(pause_s=join_s + unprepared_s, speed=min(present + last.hosts, places) / places)
    # From the join on, which is so long after the choice.
    later = [one._replace(return_s=max(one.return_s - last.return_s, 0.0)) for one in groups[num_groups:]]
    phases = (wait, *list_phases(joined, present, later, join_s=join_s, places=places))
    return make_option(RecoveryAction.GATHER, phases, prices, why_not, risk_s=risk_s)
