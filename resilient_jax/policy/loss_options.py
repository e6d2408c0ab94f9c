"""The options after a loss, with their prices.

Some exclude each other by the rules: hosts that can go on in place never form a new world, and no older state is taken
while there is a newer one. Such an option is listed with its score, and with the reason why it is not possible.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

from resilient_jax.policy.offer import Offer, Wait, count_awaited, explain_new_axes, find_join_s, make_option
from resilient_jax.policy.prices import Prices
from resilient_jax.policy.return_groups import ExpectedReturn, ReturnGroup, group_returns, list_phases
from resilient_jax.policy.score import Phase
from resilient_jax.policy.situations import Loss
from resilient_jax.policy.stage_prices import find_stage_break_even_s, price_copied, price_cut, price_kept
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryOption, TimedChange

CHANGE_OF: Final[Mapping[RecoveryAction, TimedChange]] = {
    RecoveryAction.SHRINK: TimedChange.SHRINK,
    RecoveryAction.KEEP_AXES: TimedChange.SHRINK,
    RecoveryAction.REPLACE: TimedChange.GROW,
    RecoveryAction.REFORM: TimedChange.REFORM,
    RecoveryAction.REFORM_COLD: TimedChange.REFORM_COLD,
    RecoveryAction.RESTORE: TimedChange.RESTORE,
}


def list_loss_options(loss: Loss, prices: Prices) -> Offer:
    """Return how the members may go on that are idle after a loss."""
    usual = find_usual(loss)

    def refuse(action: RecoveryAction) -> str:
        return _explain_refusal(action, usual, loss)

    options = [_price_after_loss(action, loss, prices, refuse(action)) for action in CHANGE_OF]
    keep, own = _price_kept_stage(loss, prices, refuse(RecoveryAction.KEEP_STAGES))
    groups = group_returns(loss.awaited)
    no_wait = refuse(RecoveryAction.WAIT)
    waits = [(_price_wait(loss, prices, number, no_wait), group) for number, group in enumerate(groups, 1)]
    wait, last = max(
        waits, key=lambda one: one[0].score, default=(_price_wait(loss, prices, 0, no_wait), None)
    )
    stop = RecoveryOption(
        action=RecoveryAction.STOP, score=0.0, pause_s=0.0, speed=0.0, why_not="hosts can go on"
    )
    # A stage that no host is awaited for is kept until its blocks are copied.
    kept_s = _find_break_even_s(loss, prices) if loss.stage is not None or loss.plan is not None else 0.0
    return Offer(
        options=(*options, keep, wait, stop),
        usual=usual,
        reachable=_find_reachable(loss),
        waits={
            RecoveryAction.WAIT: Wait.for_group(last),
            RecoveryAction.KEEP_STAGES: Wait.for_group(own, kept_s if own is not None else 0.0),
            RecoveryAction.KEEP_AXES: Wait.for_group(next(iter(groups), None), kept_s),
        },
    )


def find_usual(loss: Loss) -> RecoveryAction:
    """Return how the hosts that are ready go on, as the rules have it."""
    if loss.needs_restore:
        return RecoveryAction.RESTORE
    if not loss.is_in_place:
        must_wait = loss.num_cold and loss.cold_join_because
        return RecoveryAction.REFORM_COLD if must_wait else RecoveryAction.REFORM
    return RecoveryAction.REPLACE if loss.num_seated else RecoveryAction.SHRINK


def _price_after_loss(action: RecoveryAction, loss: Loss, prices: Prices, why_not: str) -> RecoveryOption:
    """Return the option of an action after a loss that is no wait."""
    ready, awaited = loss.ready, loss.awaited
    if action is RecoveryAction.SHRINK:  # leaves out hosts that are ready in their seats
        ready -= loss.num_seated
    elif action is RecoveryAction.REFORM and loss.num_cold:
        # Beside the training they need about as long as all would wait for them otherwise.
        ready -= loss.num_cold
        preparing = ExpectedReturn(prices.seconds[TimedChange.REFORM_COLD], loss.num_cold)
        awaited = tuple(sorted((*awaited, preparing)))
    first = Phase(pause_s=prices.seconds[CHANGE_OF[action]], speed=ready / loss.places)
    if loss.stage is not None and action is RecoveryAction.SHRINK:
        first = price_cut(loss.stage, loss.present_speed, prices.seconds)
    elif loss.plan is not None and action is RecoveryAction.KEEP_AXES:
        first = dataclasses.replace(first, speed=loss.present_speed * loss.plan.kept)
    elif loss.plan is not None and action is RecoveryAction.SHRINK:
        first = Phase(pause_s=_find_axes_s(loss, prices), speed=loss.present_speed * loss.plan.best)
    join_s = find_join_s(loss, prices)
    phases = list_phases(first, ready, group_returns(awaited), join_s=join_s, places=loss.places)
    return make_option(action, phases, prices, why_not)


def _price_kept_stage(loss: Loss, prices: Prices, why_not: str) -> tuple[RecoveryOption, ReturnGroup | None]:
    """Return the option to keep the lost stage, and until when its host is waited for; None: it is not, and the stage
    is kept until its blocks are copied.
    """
    action, stage, ready = RecoveryAction.KEEP_STAGES, loss.stage, loss.ready
    if stage is None:
        first = Phase(pause_s=prices.seconds[TimedChange.KEEP_STAGES], speed=ready / loss.places)
        return make_option(action, (first,), prices, why_not), None
    present, join_s = loss.present_speed, find_join_s(loss, prices)
    later = group_returns(loss.awaited)
    copied, divided = price_copied(stage, present, prices.seconds)
    divided_s = copied.pause_s + (copied.training_s or 0.0)
    then = [one._replace(return_s=max(one.return_s - divided_s, 0.0)) for one in later]
    phases = (copied, *list_phases(divided, ready, then, join_s=join_s, places=loss.places))
    without = make_option(action, phases, prices, why_not)
    if loss.stage_return_s is None or not loss.can_join_in_place:
        return without, None
    # Another host that joins sooner would end it.
    sooner = [one.share for one in loss.awaited if one.return_s <= loss.stage_return_s]
    own = ReturnGroup(loss.stage_return_s, len(sooner), sum(sooner))
    later = [own, *(one for one in later if one.return_s > own.return_s)]
    first = price_kept(stage, present, prices.seconds)
    phases = list_phases(first, ready, later, join_s=join_s, places=loss.places)
    awaiting = make_option(action, phases, prices, why_not)
    return (awaiting, own) if awaiting.score >= without.score else (without, None)


def _find_reachable(loss: Loss) -> float:
    """Return the best speed that any option reaches, as a part of that of all hosts."""
    back = min(loss.ready + count_awaited(loss), loss.places) / loss.places
    if loss.stage is not None:
        left = max(loss.stage.cut, loss.stage.kept)
    elif loss.plan is not None:
        left = max(loss.plan.best, loss.plan.kept)
    else:
        return back
    here = loss.present_speed * left
    return max(here, back) if loss.awaited else here


def _find_axes_s(loss: Loss, prices: Prices) -> float:
    """Return the pause of a shrink to the best axes, in seconds: no shorter than with those that the job has."""
    form_s = prices.seconds[TimedChange.SHRINK]
    if loss.plan is None or not loss.has_new_axes:
        return form_s
    # What was measured in this job has the move of shards in it.
    return max(form_s, prices.seconds[TimedChange.NEW_AXES], loss.plan.move_s) + loss.plan.prepare_s


def _find_break_even_s(loss: Loss, prices: Prices) -> float:
    """Return when what is kept, a stage or axes, has cost as much as to give it up would, in seconds; until the next
    failure at most.

    To give it up then is 2-competitive: whenever the host is back, at most about twice the least is lost.
    """
    # T = (longer pause) / (speed lost)
    most_s = prices.next_failure_s
    if loss.stage is not None:
        return min(find_stage_break_even_s(loss.stage, loss.present_speed, prices.seconds), most_s)
    assert loss.plan is not None, "else nothing is kept"
    longer_s = _find_axes_s(loss, prices) - prices.seconds[TimedChange.SHRINK]
    slower = loss.present_speed * (loss.plan.best - loss.plan.kept)
    return min(max(longer_s, 0.0) / slower, most_s) if slower > 0 else most_s


def _price_wait(loss: Loss, prices: Prices, num_groups: int, why_not: str) -> RecoveryOption:
    """Return the option of a wait for the first groups of hosts that come back."""
    groups = group_returns(loss.awaited)
    last = groups[num_groups - 1] if num_groups else ReturnGroup(prices.seconds[TimedChange.RETURN], 0, 0)
    join_s = find_join_s(loss, prices)
    ready = min(loss.ready + last.hosts, loss.places)
    usual = find_usual(loss)
    # In a new world all wait for the programs of those that have come.
    change = TimedChange.REFORM_COLD if usual is RecoveryAction.REFORM else CHANGE_OF[usual]
    pause_s = last.return_s + max(join_s, prices.seconds[change])
    first = Phase(pause_s=pause_s, speed=ready / loss.places)
    later = groups[num_groups:]
    phases = list_phases(first, loss.ready, later, join_s=join_s, places=loss.places)
    return make_option(RecoveryAction.WAIT, phases, prices, why_not)


def _explain_refusal(action: RecoveryAction, usual: RecoveryAction, loss: Loss) -> str:
    """Return why an action after a loss is not possible; empty if it is."""
    if action is usual:
        return ""
    match action:
        case RecoveryAction.WAIT:
            return _explain_wait_refusal(loss)
        case RecoveryAction.KEEP_STAGES | RecoveryAction.KEEP_AXES:
            explain = (
                _explain_stage_refusal if action is RecoveryAction.KEEP_STAGES else _explain_axes_refusal
            )
            return explain(usual, loss)
        case RecoveryAction.RESTORE:
            return "the hosts have a newer state"
        case RecoveryAction.REFORM | RecoveryAction.REFORM_COLD if usual is not RecoveryAction.RESTORE:
            return _explain_reform_refusal(action, loss)
        case RecoveryAction.REPLACE if usual is RecoveryAction.SHRINK:
            return "no other host is ready in a seat"
        case RecoveryAction.SHRINK if usual is RecoveryAction.REPLACE:
            return "other hosts are ready in their seats"
        case _:
            if usual is RecoveryAction.RESTORE:
                return "no host has the newest state"
            return f"the hosts cannot go on in place: {loss.new_world_because}"


def _explain_wait_refusal(loss: Loss) -> str:
    """Return why no host is waited for after a loss; empty if one may be."""
    if not loss.awaited:
        return "no host is on its way back"
    if loss.is_in_place and loss.can_join_in_place:
        return "a host that comes back joins in place"
    return "" if loss.may_wait else "the rules wait no longer in this change"


def _explain_reform_refusal(action: RecoveryAction, loss: Loss) -> str:
    """Return why another new world than the usual one is not possible after a loss; empty if it is."""
    if loss.is_in_place:
        return "the hosts can go on in place"
    if action is RecoveryAction.REFORM:
        return f"the hosts that have no programs must join: {loss.cold_join_because}"
    return "" if loss.num_cold else "all hosts that are ready have loaded programs"


def _explain_stage_refusal(usual: RecoveryAction, loss: Loss) -> str:
    """Return why the stage of a lost host cannot be kept; empty if it can."""
    if loss.stage is None:
        return "no stage of a pipeline is to be kept"
    if usual is not RecoveryAction.SHRINK:
        why = f": {loss.new_world_because}" if loss.new_world_because else ""
        return f"the hosts do not go on as they are in their world{why}"
    return "" if loss.stage.kept else "no other replica is complete"


def _explain_axes_refusal(usual: RecoveryAction, loss: Loss) -> str:
    """Return why the axes that the job has cannot be kept after a loss; empty if they can."""
    if loss.plan is not None and usual is not RecoveryAction.SHRINK:
        if loss.new_world_because:
            return f"the hosts cannot go on in place: {loss.new_world_because}"
        return "other hosts are ready" if loss.num_seated else "no host has the newest state"
    return explain_new_axes(loss)
