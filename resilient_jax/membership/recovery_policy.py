"""The policy: what to do at a change of members, as a pure function of a situation.

Each option is a course of pauses and speeds until the next failure; the best score wins (`recovery_score`). Some
options exclude each other by the rules: hosts that can go on in place never form a new world, and no older state is
taken while there is a newer one. Such an option is listed with its score, and with the reason why it is not possible.

What is left to choose:
- after a loss: to go on at once, or to wait for hosts that are on their way back, which saves a second pause; where a
  pipeline has lost a stage, whether its blocks move at once (`stage_prices`);
- while others train: that hosts which are ready join now, or together with others that are on their way, or later,
  because a join costs all hosts a pause. With many hosts it may cost more than it brings until the next failure, at
  which they would join without a pause of their own; and a host that is lost again and again costs one each time.
When hosts are back, and when the next failure comes, is expected by their own records (`failure_forecast`). Of several
hosts the first ones are waited for, as far as that pays. What is chosen for slow hosts has a policy of its own.

So that decisions do not flutter, another option than the usual one, or than the one that was chosen before in the same
situation, must lose less by `HYSTERESIS` of that, and by `MIN_SAVED_S` at least. A wait has an end: hosts that have not
come by then are not awaited again.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from resilient_jax.ids import HostName
from resilient_jax.membership.failure_forecast import estimate_rate
from resilient_jax.membership.return_groups import PATIENCE, ReturnGroup, group_returns, list_phases
from resilient_jax.membership.stage_prices import find_break_even_s, price_copied, price_cut, price_kept
from resilient_jax.planning.recovery_score import Phase, describe_s, score_phases
from resilient_jax.protocol.recovery_records import (
    WAITING_ACTIONS,
    JobHistory,
    RecoveryAction,
    RecoveryOption,
    TimedChange,
)
from resilient_jax.protocol.state_records import StageLoss

PRIOR_S: Final[Mapping[TimedChange, float]] = {
    TimedChange.SHRINK: 0.2,
    TimedChange.KEEP_STAGES: 0.2,
    TimedChange.GROW: 0.6,
    TimedChange.REFORM: 3.0,
    TimedChange.RESTORE: 3.0,
    TimedChange.RETURN: 5.0,
    TimedChange.REDIVIDE: 0.6,
}
"""Seconds until a job has measured its own: docs/benchmarks.md, the stalls of a small model on 4 hosts of one machine.
A large model and a GPU need more; the first change of each kind corrects that."""
HYSTERESIS: Final = 0.2
"""The part of what the usual option loses until the next failure that another one must save."""
MIN_SAVED_S: Final = 0.5
"""And it must save so many seconds: the times of one kind of change differ by that much (docs/benchmarks.md)."""
RECONSIDER_S: Final = 60.0
"""How long a join is postponed until it is looked at again: the job has seen more of its failures by then."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The members are idle after a loss, and know who is left.

    Attributes:
        places: how many hosts the job has at most.
        ready: the hosts that can go on now.
        num_seated: how many of them were no members before.
        awaited: of each host that is expected back the seconds until it is ready, ascending.
        is_in_place: whether those that are ready can go on in their world.
        can_join_in_place: whether those that come later will have seats in it.
        needs_restore: whether no host has the newest state, only a snapshot or a checkpoint.
        may_wait: whether it may be waited; the rules allow it once in a change.
        stage: what the loss makes of a pipeline, if one host was lost and that is known.
        stage_return_s: until that host is expected to be ready, in seconds; None: it is none of those that are awaited.
    """

    places: int
    ready: int
    num_seated: int = 0
    awaited: tuple[float, ...] = ()
    is_in_place: bool = True
    can_join_in_place: bool = True
    needs_restore: bool = False
    may_wait: bool = True
    stage: StageLoss | None = None
    stage_return_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Hosts are ready to join while others train.

    Attributes:
        places: how many hosts the job has at most.
        training: the hosts that train.
        joining: the hosts that are ready to join.
        awaited: of each other host that is expected back the seconds until it is ready, ascending.
        can_join_in_place: whether those that are ready have taken seats.
        is_last_copy: whether the next loss may be that of the state.
        has_stage: whether the stage of one that is ready was kept for it.
        before: what was chosen for the same hosts before; None: nothing.
    """

    places: int
    training: int
    joining: int
    awaited: tuple[float, ...] = ()
    can_join_in_place: bool = True
    is_last_copy: bool = False
    has_stage: bool = False
    before: RecoveryAction | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the options of a job cost.

    Attributes:
        seconds: of each change: the job's own measurement, or the prior.
        next_failure_s: the expected time to the next failure.
        joiner_losses: how often hosts that join now are expected to be lost, or to leave, until then.
    """

    seconds: Mapping[TimedChange, float]
    next_failure_s: float
    joiner_losses: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the policy has chosen.

    Attributes:
        action: of the first option.
        reason: in a sentence.
        options: all of them, the chosen one first, then by score.
        next_failure_s: the expected time to the next failure.
        wait_s: how long the action lasts, if it changes no members; else 0.
        num_awaited: for how many of the hosts that are expected back, the first ones.
    """

    action: RecoveryAction
    reason: str
    options: tuple[RecoveryOption, ...]
    next_failure_s: float
    wait_s: float = 0.0
    num_awaited: int = 0


def price_job(history: JobHistory, hosts: Collection[HostName], joining: Collection[HostName] = ()) -> Prices:
    """Return the prices for a job, from its history.

    Args:
        history: of the job.
        hosts: that train from then on, those that join included.
        joining: the hosts that join.
    """
    measured = {time.change: time.typical_s for time in history.times}
    next_failure_s = 1 / estimate_rate(history, hosts)
    return Prices(
        seconds={change: measured.get(change, prior_s) for change, prior_s in PRIOR_S.items()},
        next_failure_s=next_failure_s,
        joiner_losses=next_failure_s * estimate_rate(history, joining, with_notices=True) if joining else 0.0,
    )


def choose_after_loss(loss: Loss, prices: Prices) -> Choice:
    """Return what to do now that the members are idle after a loss."""
    usual = _find_usual(loss)
    options = {
        action: _price_after_loss(action, loss, prices, _explain_refusal(action, usual, loss))
        for action in _CHANGE_OF
    }
    keep, own = _price_kept_stage(loss, prices, _explain_refusal(RecoveryAction.KEEP_STAGES, usual, loss))
    options[RecoveryAction.KEEP_STAGES] = keep
    waits = [
        (_price_wait(loss, prices, num_groups, _explain_refusal(RecoveryAction.WAIT, usual, loss)), group)
        for num_groups, group in enumerate(group_returns(loss.awaited), 1)
    ]
    wait, last = max(waits, key=lambda one: one[0].score, default=(None, None))
    options[RecoveryAction.WAIT] = wait or _price_wait(
        loss, prices, 0, _explain_refusal(RecoveryAction.WAIT, usual, loss)
    )
    stop = RecoveryOption(
        action=RecoveryAction.STOP, score=0.0, pause_s=0.0, num_hosts=0, why_not="hosts can go on"
    )
    chosen = choose_option(options, usual, prices, _find_reachable(loss))
    waits_for = {RecoveryAction.WAIT: last, RecoveryAction.KEEP_STAGES: own}.get(chosen)
    wait_s = PATIENCE * waits_for.return_s if waits_for is not None else 0.0
    if waits_for is not None and loss.stage is not None and chosen is RecoveryAction.KEEP_STAGES:
        break_even_s = find_break_even_s(loss.stage, _find_present_speed(loss), prices.seconds)
        wait_s = max(wait_s, min(break_even_s, prices.next_failure_s))
    choice = make_choice(chosen, usual, (*options.values(), stop), prices, wait_s)
    return dataclasses.replace(choice, num_awaited=waits_for.count if waits_for is not None else 0)


_CHANGE_OF: Final[Mapping[RecoveryAction, TimedChange]] = {
    RecoveryAction.SHRINK: TimedChange.SHRINK,
    RecoveryAction.REPLACE: TimedChange.GROW,
    RecoveryAction.REFORM: TimedChange.REFORM,
    RecoveryAction.RESTORE: TimedChange.RESTORE,
}
_ACTION_TEXTS: Final[Mapping[RecoveryAction, str]] = {
    RecoveryAction.SHRINK: "goes on in place",
    RecoveryAction.KEEP_STAGES: "keeps the stage of the lost host for it",
    RecoveryAction.REPLACE: "goes on in place with hosts in their seats",
    RecoveryAction.REFORM: "goes on in a new world",
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


def _find_usual(loss: Loss) -> RecoveryAction:
    """Return how the hosts that are ready go on, as the rules have it."""
    if loss.needs_restore:
        return RecoveryAction.RESTORE
    if not loss.is_in_place:
        return RecoveryAction.REFORM
    return RecoveryAction.REPLACE if loss.num_seated else RecoveryAction.SHRINK


def _price_after_loss(action: RecoveryAction, loss: Loss, prices: Prices, why_not: str) -> RecoveryOption:
    # A shrink leaves out hosts that are ready in their seats.
    ready = loss.ready - (loss.num_seated if action is RecoveryAction.SHRINK else 0)
    first = Phase(pause_s=prices.seconds[_CHANGE_OF[action]], speed=ready / loss.places)
    if loss.stage is not None and action is RecoveryAction.SHRINK:
        first = price_cut(loss.stage, _find_present_speed(loss), prices.seconds)
    join_s = _find_join_s(loss, prices)
    phases = list_phases(first, ready, group_returns(loss.awaited), join_s=join_s, places=loss.places)
    return make_option(action, phases, ready, prices, why_not)


def _price_kept_stage(loss: Loss, prices: Prices, why_not: str) -> tuple[RecoveryOption, ReturnGroup | None]:
    """Return the option to keep the lost stage, and until when its host is waited for; None: it is not, and the stage
    is kept until its blocks are copied.
    """
    action, stage, ready = RecoveryAction.KEEP_STAGES, loss.stage, loss.ready
    if stage is None:
        first = Phase(pause_s=prices.seconds[TimedChange.KEEP_STAGES], speed=ready / loss.places)
        return make_option(action, (first,), ready, prices, why_not), None
    present, join_s = _find_present_speed(loss), _find_join_s(loss, prices)
    later = group_returns(loss.awaited)
    copied, divided = price_copied(stage, present, prices.seconds)
    divided_s = copied.pause_s + (copied.training_s or 0.0)
    then = [ReturnGroup(max(one.return_s - divided_s, 0.0), one.count) for one in later]
    phases = (copied, *list_phases(divided, ready, then, join_s=join_s, places=loss.places))
    without = make_option(action, phases, ready, prices, why_not)
    if loss.stage_return_s is None or not loss.can_join_in_place:
        return without, None
    # Another host that joins sooner would end it.
    own = ReturnGroup(loss.stage_return_s, sum(one <= loss.stage_return_s for one in loss.awaited))
    later = [own, *(one for one in later if one.return_s > own.return_s)]
    first = price_kept(stage, present, prices.seconds)
    phases = list_phases(first, ready, later, join_s=join_s, places=loss.places)
    awaiting = make_option(action, phases, ready, prices, why_not)
    return (awaiting, own) if awaiting.score >= without.score else (without, None)


def _find_present_speed(loss: Loss) -> float:
    """Return the speed before the loss of a stage, as a part of that of all hosts."""
    return (loss.ready + 1) / loss.places


def _find_reachable(loss: Loss) -> float:
    """Return the best speed that any option reaches, as a part of that of all hosts."""
    back = min(loss.ready + len(loss.awaited), loss.places) / loss.places
    if loss.stage is None:
        return back
    here = _find_present_speed(loss) * max(loss.stage.cut, loss.stage.kept)
    return max(here, back) if loss.awaited else here


def _price_wait(loss: Loss, prices: Prices, num_groups: int, why_not: str) -> RecoveryOption:
    """Return the option of a wait for the first groups of hosts that come back."""
    groups = group_returns(loss.awaited)
    last = groups[num_groups - 1] if num_groups else ReturnGroup(prices.seconds[TimedChange.RETURN], 0)
    join_s = _find_join_s(loss, prices)
    ready = min(loss.ready + last.count, loss.places)
    pause_s = last.return_s + max(join_s, prices.seconds[_CHANGE_OF[_find_usual(loss)]])
    first = Phase(pause_s=pause_s, speed=ready / loss.places)
    later = groups[num_groups:]
    phases = list_phases(first, loss.ready, later, join_s=join_s, places=loss.places)
    return make_option(RecoveryAction.WAIT, phases, ready, prices, why_not)


def _find_join_s(change: Loss | Admission, prices: Prices) -> float:
    """Return the pause in which hosts join that are ready, in seconds."""
    return prices.seconds[TimedChange.GROW if change.can_join_in_place else TimedChange.REFORM]


def _explain_refusal(action: RecoveryAction, usual: RecoveryAction, loss: Loss) -> str:
    """Return why an action after a loss is not possible; empty if it is."""
    if action is usual:
        return ""
    match action:
        case RecoveryAction.WAIT if not loss.awaited:
            return "no host is on its way back"
        case RecoveryAction.WAIT if loss.is_in_place and loss.can_join_in_place:
            return "a host that comes back joins in place"
        case RecoveryAction.WAIT:
            return "" if loss.may_wait else "the rules wait no longer in this change"
        case RecoveryAction.KEEP_STAGES:
            return _explain_stage_refusal(usual, loss)
        case RecoveryAction.RESTORE:
            return "the hosts have a newer state"
        case RecoveryAction.REFORM if usual is not RecoveryAction.RESTORE:
            return "the hosts can go on in place"
        case RecoveryAction.REPLACE if usual is RecoveryAction.SHRINK:
            return "no other host is ready in a seat"
        case RecoveryAction.SHRINK if usual is RecoveryAction.REPLACE:
            return "other hosts are ready in their seats"
        case _:
            is_lost = usual is RecoveryAction.RESTORE
            return "no host has the newest state" if is_lost else "the hosts cannot go on in place"


def _explain_stage_refusal(usual: RecoveryAction, loss: Loss) -> str:
    """Return why the stage of a lost host cannot be kept; empty if it can."""
    if loss.stage is None:
        return "no stage of a pipeline is to be kept"
    if usual is not RecoveryAction.SHRINK:
        return "the hosts do not go on as they are in their world"
    return "" if loss.stage.kept else "no other replica is complete"


def choose_admission(admission: Admission, prices: Prices) -> Choice:
    """Return whether hosts that are ready join now, with others, or later."""
    places, join_s = admission.places, _find_join_s(admission, prices)
    ready = min(admission.training + admission.joining, places)
    # What losses of the hosts that join would cost the others: they would not have them without these.
    risk_s = prices.joiner_losses * prices.seconds[TimedChange.SHRINK]
    groups = group_returns(admission.awaited)
    first = Phase(pause_s=join_s, speed=ready / places)
    now = list_phases(first, ready, groups, join_s=join_s, places=places)
    before = Phase(pause_s=0.0, speed=admission.training / places)
    refusal = "the stage of a host that is ready was kept for it" if admission.has_stage else ""
    refusal = "the next loss may be that of the state" if admission.is_last_copy else refusal
    gathers = [
        (_price_gather(admission, prices, number, refusal, risk_s), group)
        for number, group in enumerate(groups, 1)
    ]
    gather, last = max(gathers, key=lambda one: one[0].score, default=(None, None))
    options = {
        option.action: option
        for option in (
            make_option(RecoveryAction.JOIN, now, ready, prices, risk_s=risk_s),
            gather or _price_gather(admission, prices, 0, refusal or "no other host is on its way", risk_s),
            make_option(RecoveryAction.POSTPONE, (before,), admission.training, prices, refusal),
        )
    }
    usual = admission.before or RecoveryAction.JOIN
    if options[usual].why_not:
        usual = RecoveryAction.JOIN
    reachable = min(ready + len(admission.awaited), places) / places
    chosen = choose_option(options, usual, prices, reachable)
    gathers_s = PATIENCE * last.return_s if last is not None else 0.0
    wait_s = {RecoveryAction.GATHER: gathers_s, RecoveryAction.POSTPONE: RECONSIDER_S}.get(chosen, 0.0)
    choice = make_choice(chosen, usual, tuple(options.values()), prices, wait_s)
    gathers_for = last if chosen is RecoveryAction.GATHER else None
    return dataclasses.replace(choice, num_awaited=gathers_for.count if gathers_for is not None else 0)


def _price_gather(
    admission: Admission, prices: Prices, num_groups: int, why_not: str, risk_s: float
) -> RecoveryOption:
    """Return the option that hosts which are ready join together with the first groups of those that come back."""
    places, join_s = admission.places, _find_join_s(admission, prices)
    groups = group_returns(admission.awaited)
    last = groups[num_groups - 1] if num_groups else ReturnGroup(prices.seconds[TimedChange.RETURN], 0)
    present = admission.training + admission.joining
    wait = Phase(pause_s=0.0, speed=admission.training / places, training_s=last.return_s)
    joined = Phase(pause_s=join_s, speed=min(present + last.count, places) / places)
    # From the join on, which is so long after the choice.
    later = [ReturnGroup(max(one.return_s - last.return_s, 0.0), one.count) for one in groups[num_groups:]]
    phases = (wait, *list_phases(joined, present, later, join_s=join_s, places=places))
    return make_option(RecoveryAction.GATHER, phases, admission.training, prices, why_not, risk_s=risk_s)


def make_option(
    action: RecoveryAction,
    phases: tuple[Phase, ...],
    num_hosts: int,
    prices: Prices,
    why_not: str = "",
    *,
    risk_s: float = 0.0,
) -> RecoveryOption:
    """Return an option with its score; `risk_s` is a further loss of time, at any moment until the next failure."""
    first, *later = phases
    priced = (dataclasses.replace(first, pause_s=first.pause_s + risk_s), *later)
    return RecoveryOption(
        action=action,
        score=score_phases(priced, prices.next_failure_s),
        pause_s=first.pause_s,
        num_hosts=num_hosts,
        why_not=why_not,
    )


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
) -> Choice:
    """Return the choice of an option, with the reason: what the next best one would lose or save.

    Args:
        chosen: the action.
        usual: the one from which it takes more than noise to change.
        options: all of them.
        prices: by which they were scored.
        wait_s: how long the action lasts, if it changes no members; else 0.
    """
    ordered = sorted(
        options, key=lambda option: (option.action is not chosen, bool(option.why_not), -option.score)
    )
    first, *others = ordered
    text = _ACTION_TEXTS[chosen]
    if chosen is RecoveryAction.KEEP_STAGES and not wait_s:
        text = "keeps the stage of the lost host until others have copies of its blocks"
    reason = f"the job {text}: {first.num_hosts} hosts after {first.pause_s:.2g} s"
    if chosen in WAITING_ACTIONS:
        reason = f"the job {text}, for {wait_s:.2g} s at most"
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
