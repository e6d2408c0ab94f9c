"""The policy: what to do at a change of members, as a pure function of a situation.

The options and their prices are those of `recovery_options`; the best score wins. What there is to choose:
- after a loss: to go on at once, or to wait for hosts that are on their way back, which saves a second pause; where a
  pipeline has lost a stage, whether its blocks move at once; where other planned axes are best, whether to take them;
- while others train: that hosts which are ready join now, or together with others that are on their way, or later,
  because a join costs all hosts a pause; where other planned axes are best then, whether to take them. With many
  hosts a join may cost more than it brings until the next failure, at which they would join without a pause of their
  own; and a host that is lost again and again costs one each time.
When hosts are back, and when the next failure comes, is expected by their own records (`failure_forecast`). Of several
hosts the first ones are waited for, as far as that pays. What is chosen for slow hosts has a policy of its own.

So that decisions do not flutter, another option than the usual one, or than the one that was chosen before in the same
situation, must lose less by `HYSTERESIS` of that, and by `MIN_SAVED_S` at least. A wait has an end: hosts that have not
come by then are not awaited again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

from resilient_jax.membership.recovery_options import (
    CHANGE_OF,
    Admission,
    Loss,
    Prices,
    count_awaited,
    explain_new_axes,
    explain_refusal,
    find_break_even_s,
    find_join_break_even_s,
    find_reachable,
    find_usual,
    make_option,
    price_after_loss,
    price_gather,
    price_join,
    price_kept_stage,
    price_wait,
)
from resilient_jax.membership.return_groups import PATIENCE, group_returns
from resilient_jax.planning.recovery_score import Phase, describe_s
from resilient_jax.protocol.recovery_records import (
    WAITING_ACTIONS,
    RecoveryAction,
    RecoveryOption,
    TimedChange,
)

HYSTERESIS: Final = 0.2
"""The part of what the usual option loses until the next failure that another one must save."""
MIN_SAVED_S: Final = 0.5
"""And it must save so many seconds: the times of one kind of change differ by that much (docs/benchmarks.md)."""
RECONSIDER_S: Final = 60.0
"""How long a join is postponed until it is looked at again: the job has seen more of its failures by then."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the policy has chosen.

    Attributes:
        reason: one sentence for people.
        options: all options, the chosen one first, then by score.
        wait_s: the longest time for which the job waits, or keeps a stage or axes; 0: the action is carried out.
        num_awaited: number of hosts waited for: the first ones of those expected back.
    """

    action: RecoveryAction
    reason: str
    options: tuple[RecoveryOption, ...]
    next_failure_s: float
    wait_s: float = 0.0
    num_awaited: int = 0


def choose_after_loss(loss: Loss, prices: Prices) -> Choice:
    """Return what to do now that the members are idle after a loss."""
    usual = find_usual(loss)
    options = {
        action: price_after_loss(action, loss, prices, explain_refusal(action, usual, loss))
        for action in CHANGE_OF
    }
    keep, own = price_kept_stage(loss, prices, explain_refusal(RecoveryAction.KEEP_STAGES, usual, loss))
    options[RecoveryAction.KEEP_STAGES] = keep
    groups = group_returns(loss.awaited)
    waits = [
        (price_wait(loss, prices, num_groups, explain_refusal(RecoveryAction.WAIT, usual, loss)), group)
        for num_groups, group in enumerate(groups, 1)
    ]
    wait, last = max(waits, key=lambda one: one[0].score, default=(None, None))
    options[RecoveryAction.WAIT] = wait or price_wait(
        loss, prices, 0, explain_refusal(RecoveryAction.WAIT, usual, loss)
    )
    stop = RecoveryOption(
        action=RecoveryAction.STOP, score=0.0, pause_s=0.0, speed=0.0, why_not="hosts can go on"
    )
    chosen = choose_option(options, usual, prices, find_reachable(loss))
    waits_for = {
        RecoveryAction.WAIT: last,
        RecoveryAction.KEEP_STAGES: own,
        RecoveryAction.KEEP_AXES: next(iter(groups), None),
    }.get(chosen)
    wait_s = PATIENCE * waits_for.return_s if waits_for is not None else 0.0
    # A stage that no host is awaited for is kept until its blocks are copied.
    if chosen is RecoveryAction.KEEP_AXES or (chosen is RecoveryAction.KEEP_STAGES and own is not None):
        wait_s = max(wait_s, find_break_even_s(loss, prices))
    choice = make_choice(
        chosen, usual, (*options.values(), stop), prices, wait_s, new_world_because=loss.new_world_because
    )
    return dataclasses.replace(choice, num_awaited=waits_for.num_hosts if waits_for is not None else 0)


_ACTION_TEXTS: Final[Mapping[RecoveryAction, str]] = {
    RecoveryAction.SHRINK: "goes on in place",
    RecoveryAction.KEEP_STAGES: "keeps the stage of the lost host for it",
    RecoveryAction.KEEP_AXES: "goes on in place with the axes that it has",
    RecoveryAction.REPLACE: "goes on in place with hosts in their seats",
    RecoveryAction.REFORM: "goes on in a new world",
    RecoveryAction.REFORM_COLD: "goes on in a new world, for which hosts load their programs while all wait",
    RecoveryAction.RESTORE: "goes on from an older state",
    RecoveryAction.WAIT: "waits for hosts that come back",
    RecoveryAction.JOIN: "has the hosts that are ready join",
    RecoveryAction.GATHER: "has the hosts that are ready join together with others",
    RecoveryAction.POSTPONE: "trains on without the hosts that are ready",
    RecoveryAction.KEEP: "trains on as it is",
    RecoveryAction.TAKE_OUT: "goes on without the slow host",
    RecoveryAction.FEWER_DEVICES: "goes on without the slow devices",
    RecoveryAction.REDIVIDE: "divides its layers anew",
}


def choose_admission(admission: Admission, prices: Prices) -> Choice:
    """Return whether hosts that are ready join now, with others, or later."""
    places = admission.places
    ready = min(admission.training + admission.joining, places)
    # What losses of the hosts that join would cost the others: they would not have them without these.
    risk_s = prices.joiner_losses * prices.seconds[TimedChange.SHRINK]
    groups = group_returns(admission.awaited)
    before = Phase(pause_s=0.0, speed=admission.training / places)
    refusal = "the stage of a host that is ready was kept for it" if admission.has_stage else ""
    refusal = "the next loss may be that of the state" if admission.is_last_copy else refusal
    gathers = [
        (price_gather(admission, prices, number, refusal, risk_s), group)
        for number, group in enumerate(groups, 1)
    ]
    gather, last = max(gathers, key=lambda one: one[0].score, default=(None, None))
    options = {
        option.action: option
        for option in (
            price_join(RecoveryAction.JOIN, admission, prices, "", risk_s),
            price_join(RecoveryAction.KEEP_AXES, admission, prices, explain_new_axes(admission), risk_s),
            gather or price_gather(admission, prices, 0, refusal or "no other host is on its way", risk_s),
            make_option(RecoveryAction.POSTPONE, (before,), prices, refusal),
        )
    }
    usual = admission.before or RecoveryAction.JOIN
    if options[usual].why_not:
        usual = RecoveryAction.JOIN
    reachable = min(ready + count_awaited(admission), places) / places
    chosen = choose_option(options, usual, prices, reachable)
    gathers_s = PATIENCE * last.return_s if last is not None else 0.0
    wait_s = {RecoveryAction.GATHER: gathers_s, RecoveryAction.POSTPONE: RECONSIDER_S}.get(chosen, 0.0)
    if chosen is RecoveryAction.KEEP_AXES:
        wait_s = find_join_break_even_s(admission, prices)
    choice = make_choice(
        chosen,
        usual,
        tuple(options.values()),
        prices,
        wait_s,
        new_world_because=admission.new_world_because,
    )
    gathers_for = last if chosen is RecoveryAction.GATHER else None
    return dataclasses.replace(choice, num_awaited=gathers_for.num_hosts if gathers_for is not None else 0)


def choose_option(
    options: Mapping[RecoveryAction, RecoveryOption], usual: RecoveryAction, prices: Prices, reachable: float
) -> RecoveryAction:
    """Return the best possible option, or the usual one if the best does not save enough."""
    best = max((o for o in options.values() if not o.why_not), key=lambda o: (o.score, o.action is usual))
    lost = _compute_lost_s(options[usual], reachable, prices)
    saved = lost - _compute_lost_s(best, reachable, prices)
    return best.action if saved > max(HYSTERESIS * lost, MIN_SAVED_S) else usual


def _compute_lost_s(option: RecoveryOption, reachable: float, prices: Prices) -> float:
    # D (1 - score / best speed that can be reached), in s: what is lost until the next failure, as time at that speed.
    return prices.next_failure_s * (1 - option.score / reachable)


def make_choice(
    chosen: RecoveryAction,
    usual: RecoveryAction,
    options: tuple[RecoveryOption, ...],
    prices: Prices,
    wait_s: float,
    *,
    new_world_because: str = "",
) -> Choice:
    """Return the choice of an option, with the reason: what the next best one would lose or save.

    Args:
        usual: the action from which it takes more than noise to change.
        wait_s: as in `Choice`.
        new_world_because: why these hosts cannot go on in their world; empty if they can.
    """
    ordered = sorted(
        options, key=lambda option: (option.action is not chosen, bool(option.why_not), -option.score)
    )
    first, *others = ordered
    course = _ACTION_TEXTS[chosen]
    if chosen is RecoveryAction.KEEP_STAGES and not wait_s:
        course = "keeps the lost stages until others have copies of their blocks"
    if new_world_because and chosen is RecoveryAction.JOIN:
        course += " in a new world"
    if new_world_because and chosen in (
        RecoveryAction.REFORM,
        RecoveryAction.REFORM_COLD,
        RecoveryAction.JOIN,
    ):
        course += f" ({new_world_because})"
    reason = f"the job {course}: {first.describe_speed()}"
    if chosen in WAITING_ACTIONS:
        reason = f"the job {course}, for {wait_s:.2g} s at most"
    rival = next((option for option in others if not option.why_not), None)
    if rival is None:
        why = "nothing else is possible"
    else:
        # D (s - s'), in s at the speed of all hosts.
        gain_s = prices.next_failure_s * (first.score - rival.score)
        expected = describe_s(prices.next_failure_s)
        text = f"{describe_s(abs(gain_s))} of training until the next failure, expected in {expected}"
        why = f"to {rival.action} would lose {text}"
        if gain_s < 0:
            why = f"to {rival.action} would save no more than {text}, too little for a change from the usual {usual}"
    return Choice(
        action=chosen,
        reason=f"{reason}; {why}",
        options=tuple(ordered),
        next_failure_s=prices.next_failure_s,
        wait_s=wait_s,
    )
