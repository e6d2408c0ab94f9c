"""The policy: what to do at a change of members, as a pure function of a situation.

Each option is a course of pauses and speeds until the next failure; the best score wins (`recovery_score`). Some
options exclude each other by the rules: hosts that can go on in place never form a new world, and no older state is
taken while there is a newer one. Such an option is listed with its score, and with the reason why it is not possible.

What is left to choose:
- after a loss: to go on at once, or to wait for hosts that are on their way back, which saves a second pause;
- while others train: that hosts which are ready join now, or together with others that are on their way, or later,
  because a join costs all hosts a pause. With many hosts it may cost more than it brings until the next failure, at
  which they would join without a pause of their own; and a host that is lost again and again costs one each time;
- while a host is slow: whether it stays, which costs no pause, or a spare takes its place, or the others go on without
  it, or it goes on without those of its devices that are slow, or a pipeline gives it fewer layers. Shares by speed are
  chosen before that, by the workers, and cost nothing.

So that decisions do not flutter, another option than the usual one, or than the one that was chosen before in the same
situation, must lose less by `HYSTERESIS` of that, and by `MIN_SAVED_S` at least. A wait has an end: hosts that have not
come by then are not awaited again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

from resilient_jax.planning.recovery_score import HOUR_S, Phase, estimate_failure_rate, score_phases
from resilient_jax.protocol.recovery_records import (
    WAITING_ACTIONS,
    JobHistory,
    RecoveryAction,
    RecoveryOption,
    TimedChange,
)
from resilient_jax.protocol.slow_hosts import Slowdown

PRIOR_S: Final[Mapping[TimedChange, float]] = {
    TimedChange.SHRINK: 0.2,
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
PATIENCE: Final = 1.5
"""A wait lasts so many times the expected time of what is waited for, at most."""
MIN_SPEED_GAIN: Final = 0.05
"""The part by which an action on a slow host must raise the speed: what hosts take is known no better."""
RECONSIDER_S: Final = 60.0
"""How long a join is postponed until it is looked at again: the job has seen more of its failures by then."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The members are idle after a loss, and know who is left.

    Attributes:
        places: how many hosts the job has at most.
        ready: the hosts that can go on now.
        num_seated: how many of them were no members before.
        awaited: the hosts that are on their way back.
        is_in_place: whether those that are ready can go on in their world.
        can_join_in_place: whether those that come later will have seats in it.
        needs_restore: whether no host has the newest state, only a snapshot or a checkpoint.
        may_wait: whether it may be waited; the rules allow it once in a change.
    """

    places: int
    ready: int
    num_seated: int = 0
    awaited: int = 0
    is_in_place: bool = True
    can_join_in_place: bool = True
    needs_restore: bool = False
    may_wait: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Hosts are ready to join while others train.

    Attributes:
        places: how many hosts the job has at most.
        training: the hosts that train.
        joining: the hosts that are ready to join.
        awaited: the hosts that are on their way back.
        can_join_in_place: whether those that are ready have taken seats.
        is_last_copy: whether the next loss may be that of the state.
        before: what was chosen for the same hosts before; None: nothing.
    """

    places: int
    training: int
    joining: int
    awaited: int = 0
    can_join_in_place: bool = True
    is_last_copy: bool = False
    before: RecoveryAction | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowTraining:
    """Hosts train, and slow ones among them, or a division of layers by speeds of the past, cost them time.

    Attributes:
        places: how many hosts the job has at most.
        training: the hosts that train.
        slowdown: what is slow, and what each action makes of it.
        has_spare: whether a host is ready to take the place of the slow one.
        is_spare_in_place: whether it has a seat of their world.
        can_stay_in_place: whether all hosts that train can go on in their world.
        can_shrink_in_place: whether they can without the slow one.
        needs_restore: whether the state of the slow host is on no other one, so that it is read from a snapshot.
        refusal: why no host may be taken out now; empty: one may.
        refusal_without: why the others may not go on with a host less; empty: they may.
        refusal_fewer_devices: why its worker may not be started again on fewer devices; empty: it may.
        can_return_in_place: whether the worker that is started again will have a seat in their world.
    """

    places: int
    training: int
    slowdown: Slowdown
    has_spare: bool = False
    is_spare_in_place: bool = True
    can_stay_in_place: bool = True
    can_shrink_in_place: bool = True
    needs_restore: bool = False
    refusal: str = ""
    refusal_without: str = ""
    refusal_fewer_devices: str = ""
    can_return_in_place: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the options of a job cost.

    Attributes:
        seconds: of each change: the job's own measurement, or the prior.
        next_failure_s: the expected time to the next failure.
        joiner_share: the probability that the next failure is of a host that joins now.
    """

    seconds: Mapping[TimedChange, float]
    next_failure_s: float
    joiner_share: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the policy has chosen.

    Attributes:
        action: of the first option.
        reason: in a sentence.
        options: all of them, the chosen one first, then by score.
        next_failure_s: the expected time to the next failure.
        wait_s: how long the action lasts, if it changes no members; else 0.
    """

    action: RecoveryAction
    reason: str
    options: tuple[RecoveryOption, ...]
    next_failure_s: float
    wait_s: float = 0.0


def price_job(history: JobHistory, num_hosts: int, joining: frozenset[str] = frozenset()) -> Prices:
    """Return the prices for a job, from its history.

    Args:
        history: of the job.
        num_hosts: of the job, those that join included.
        joining: the hosts that join.
    """
    measured = {time.change: time.mean_s for time in history.times}
    of_joiners = sum(failures.count for failures in history.host_failures if failures.host in joining)
    # Rates of independent hosts add up: of all hosts, and of those that join.
    rate = estimate_failure_rate(num_hosts, history.failures, history.observed_s)
    joiner_rate = estimate_failure_rate(len(joining), of_joiners, history.observed_s)
    return Prices(
        seconds={change: measured.get(change, prior_s) for change, prior_s in PRIOR_S.items()},
        next_failure_s=1 / rate,
        # Failures of several hosts at once are one of the job's, and one of each host's.
        joiner_share=min(joiner_rate / rate, 1.0),
    )


def choose_after_loss(loss: Loss, prices: Prices) -> Choice:
    """Return what to do now that the members are idle after a loss."""
    usual = _find_usual(loss)
    options = {
        action: _price_after_loss(action, loss, prices, _explain_refusal(action, usual, loss))
        for action in (*_CHANGE_OF, RecoveryAction.WAIT)
    }
    stop = RecoveryOption(
        action=RecoveryAction.STOP, score=0.0, pause_s=0.0, num_hosts=0, why_not="hosts can go on"
    )
    reachable = min(loss.ready + loss.awaited, loss.places)
    chosen = _choose(options, usual, prices, reachable / loss.places)
    wait_s = PATIENCE * prices.seconds[TimedChange.RETURN] if chosen is RecoveryAction.WAIT else 0.0
    return _make_choice(chosen, usual, (*options.values(), stop), prices, wait_s)


_CHANGE_OF: Final[Mapping[RecoveryAction, TimedChange]] = {
    RecoveryAction.SHRINK: TimedChange.SHRINK,
    RecoveryAction.REPLACE: TimedChange.GROW,
    RecoveryAction.REFORM: TimedChange.REFORM,
    RecoveryAction.RESTORE: TimedChange.RESTORE,
}
_ACTION_TEXTS: Final[Mapping[RecoveryAction, str]] = {
    RecoveryAction.SHRINK: "goes on in place",
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
    seconds = prices.seconds
    later = min(loss.ready + loss.awaited, loss.places)
    join_s = seconds[TimedChange.GROW if loss.can_join_in_place else TimedChange.REFORM]
    return_s = seconds[TimedChange.RETURN]
    if action is RecoveryAction.WAIT:
        pause_s = return_s + max(join_s, seconds[_CHANGE_OF[_find_usual(loss)]])
        phases = (Phase(pause_s=pause_s, speed=later / loss.places),)
        return _make_option(action, phases, later, prices, why_not)
    # A shrink leaves out hosts that are ready in their seats.
    ready = loss.ready - (loss.num_seated if action is RecoveryAction.SHRINK else 0)
    pause_s = seconds[_CHANGE_OF[action]]
    phases = (Phase(pause_s=pause_s, speed=ready / loss.places),)
    if later > ready:
        first = dataclasses.replace(phases[0], training_s=max(return_s - pause_s, 0.0))
        phases = (first, Phase(pause_s=join_s, speed=later / loss.places))
    return _make_option(action, phases, ready, prices, why_not)


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


def choose_admission(admission: Admission, prices: Prices) -> Choice:
    """Return whether hosts that are ready join now, with others, or later."""
    seconds, places = prices.seconds, admission.places
    ready = min(admission.training + admission.joining, places)
    later = min(ready + admission.awaited, places)
    join_s = seconds[TimedChange.GROW if admission.can_join_in_place else TimedChange.REFORM]
    # What a loss of one of them would cost the others: they would not have it without them.
    risk_s = prices.joiner_share * seconds[TimedChange.SHRINK]
    now = (Phase(pause_s=join_s, speed=ready / places),)
    if later > ready:
        first = dataclasses.replace(now[0], training_s=max(seconds[TimedChange.RETURN] - join_s, 0.0))
        now = (first, Phase(pause_s=join_s, speed=later / places))
    before = Phase(pause_s=0.0, speed=admission.training / places)
    wait = dataclasses.replace(before, training_s=seconds[TimedChange.RETURN])
    gather = (wait, Phase(pause_s=join_s, speed=later / places))
    refusal = "the next loss may be that of the state" if admission.is_last_copy else ""
    no_more = "" if admission.awaited else "no other host is on its way"
    options = {
        option.action: option
        for option in (
            _make_option(RecoveryAction.JOIN, now, ready, prices, risk_s=risk_s),
            _make_option(
                RecoveryAction.GATHER, gather, admission.training, prices, refusal or no_more, risk_s=risk_s
            ),
            _make_option(RecoveryAction.POSTPONE, (before,), admission.training, prices, refusal),
        )
    }
    usual = admission.before or RecoveryAction.JOIN
    if options[usual].why_not:
        usual = RecoveryAction.JOIN
    chosen = _choose(options, usual, prices, later / places)
    waits = {
        RecoveryAction.GATHER: PATIENCE * seconds[TimedChange.RETURN],
        RecoveryAction.POSTPONE: RECONSIDER_S,
    }
    return _make_choice(chosen, usual, tuple(options.values()), prices, waits.get(chosen, 0.0))


def choose_for_slow_host(training: SlowTraining, prices: Prices) -> Choice:
    """Return what to do about a host that is slow, or about layers that are divided as if one were."""
    slowdown, share = training.slowdown, training.training / training.places
    speeds = {
        RecoveryAction.KEEP: slowdown.kept,
        RecoveryAction.REPLACE: slowdown.replaced,
        RecoveryAction.TAKE_OUT: slowdown.without,
        RecoveryAction.FEWER_DEVICES: slowdown.fewer_devices,
        RecoveryAction.REDIVIDE: slowdown.redivided,
    }
    options = {
        action: _make_option(
            action,
            _list_phases(action, share * speed, training, prices),
            training.training - (action is RecoveryAction.TAKE_OUT),
            prices,
            _explain_slow_refusal(action, speed, training),
        )
        for action, speed in speeds.items()
    }
    reachable = share * max(1.0, *speeds.values())
    chosen = _choose(options, RecoveryAction.KEEP, prices, reachable)
    return _make_choice(chosen, RecoveryAction.KEEP, tuple(options.values()), prices, 0.0)


def _list_phases(
    action: RecoveryAction, speed: float, training: SlowTraining, prices: Prices
) -> tuple[Phase, ...]:
    """Return what follows an action on a slow host, until the speed is `speed`."""
    pause_s = _price_action(action, training, prices)
    if action is not RecoveryAction.FEWER_DEVICES:
        return (Phase(pause_s=pause_s, speed=speed),)
    # Its worker ends, the others go on without it, and the next one joins them when it is ready.
    share = training.training / training.places
    return_s = prices.seconds[TimedChange.RETURN]
    join_s = prices.seconds[TimedChange.GROW if training.can_return_in_place else TimedChange.REFORM]
    meanwhile = Phase(
        pause_s=pause_s,
        speed=share * training.slowdown.without,
        training_s=max(return_s - pause_s, 0.0),
    )
    return meanwhile, Phase(pause_s=join_s, speed=speed)


def _price_action(action: RecoveryAction, training: SlowTraining, prices: Prices) -> float:
    """Return the pause of an action on a slow host, in seconds: the first one, if there are two."""
    seconds = prices.seconds
    match action:
        case RecoveryAction.KEEP:
            return 0.0
        case RecoveryAction.REDIVIDE:
            return seconds[TimedChange.REDIVIDE if training.can_stay_in_place else TimedChange.REFORM]
        case RecoveryAction.TAKE_OUT | RecoveryAction.FEWER_DEVICES:
            pause_s = seconds[TimedChange.SHRINK if training.can_shrink_in_place else TimedChange.REFORM]
        case _:
            pause_s = seconds[TimedChange.GROW if training.is_spare_in_place else TimedChange.REFORM]
    # The mean of a change in which a state was read counts what else it took, so that the sum is an upper bound.
    return pause_s + (seconds[TimedChange.RESTORE] if training.needs_restore else 0.0)


def _explain_slow_refusal(action: RecoveryAction, speed: float, training: SlowTraining) -> str:
    """Return why an action on a slow host is not possible, or not worth it; empty if it may be."""
    slowdown = training.slowdown
    takes_out = action in (RecoveryAction.REPLACE, RecoveryAction.TAKE_OUT)
    if action is RecoveryAction.KEEP:
        return ""
    if takes_out and (not slowdown.host or training.refusal):
        return training.refusal if slowdown.host else "no host is slow"
    if action is RecoveryAction.REPLACE and not training.has_spare:
        return "no spare is ready"
    if action is RecoveryAction.TAKE_OUT and training.has_spare:
        return "a spare would take its place"
    if action is RecoveryAction.TAKE_OUT and (training.refusal_without or not speed):
        return training.refusal_without or "the others cannot do without it"
    if action is RecoveryAction.FEWER_DEVICES and (why := _explain_all_devices(training)):
        return why
    if action is RecoveryAction.REDIVIDE and not speed:
        return "no other division of layers is faster"
    if speed < slowdown.kept * (1 + MIN_SPEED_GAIN):
        return f"the speed rises by less than {MIN_SPEED_GAIN:.0%}"
    return ""


def _explain_all_devices(training: SlowTraining) -> str:
    """Return why a slow host keeps all of its devices; empty: it may go on without some."""
    slowdown = training.slowdown
    if not slowdown.host:
        return "no host is slow"
    if not slowdown.devices:
        return slowdown.why_all_devices or "no device of it is known to be slower than its other ones"
    if not slowdown.fewer_devices:
        return slowdown.why_all_devices or "it cannot do without a device"
    return training.refusal_fewer_devices


def describe_option(option: RecoveryOption) -> str:
    """Return a text such as "shrink: score 0.999731, 3 hosts after 0.2 s"."""
    text = f"{option.action}: score {option.score:.6f}, {option.num_hosts} hosts after {option.pause_s:.2g} s"
    return f"{text} (not possible: {option.why_not})" if option.why_not else text


def _make_option(
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


def _choose(
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


def _make_choice(
    chosen: RecoveryAction,
    usual: RecoveryAction,
    options: tuple[RecoveryOption, ...],
    prices: Prices,
    wait_s: float,
) -> Choice:
    ordered = sorted(
        options, key=lambda option: (option.action is not chosen, bool(option.why_not), -option.score)
    )
    first, *others = ordered
    reason = f"the job {_ACTION_TEXTS[chosen]}: {first.num_hosts} hosts after {first.pause_s:.2g} s"
    if chosen in WAITING_ACTIONS:
        reason = f"the job {_ACTION_TEXTS[chosen]}, for {wait_s:.2g} s at most"
    rival = next((option for option in others if not option.why_not), None)
    if rival is None:
        why = "nothing else is possible"
    else:
        # D (s - s'), in s at the speed of all hosts.
        gain_s = prices.next_failure_s * (first.score - rival.score)
        expected = _describe_s(prices.next_failure_s)
        text = f"{_describe_s(abs(gain_s))} of training until the next failure, expected in {expected}"
        why = (
            f"to {rival.action} would lose {text}"
            if gain_s >= 0
            else f"to {rival.action} would save no more than {text}, too little for a change from the usual {usual}"
        )
    return Choice(
        action=chosen,
        reason=f"{reason}; {why}",
        options=tuple(ordered),
        next_failure_s=prices.next_failure_s,
        wait_s=wait_s,
    )


def _describe_s(seconds: float) -> str:
    if seconds >= HOUR_S:
        hours = seconds / HOUR_S
        return f"{hours:.0f} h" if hours >= 100 else f"{hours:.3g} h"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2f} s"
