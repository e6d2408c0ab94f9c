"""The choice: what to do in a situation, as a pure function of it and of the prices of a job.

The options and their prices are those of `loss_options`, `admission_options` and `slow_host_options`; the best score
wins. What there is to choose:
- after a loss: to go on at once, or to wait for hosts that are on their way back, which saves a second pause; where a
  pipeline has lost a stage, whether its blocks move at once; where other planned axes are best, whether to take them;
- while others train: that hosts which are ready join now, or together with others that are on their way, or later,
  because a join costs all hosts a pause; where other planned axes are best then, whether to take them. With many
  hosts a join may cost more than it brings until the next failure, at which they would join without a pause of their
  own; and a host that is lost again and again costs one each time;
- while a host is slow: that it stays, without its slow devices or with fewer layers, or leaves.
When hosts are back, and when the next failure comes, is expected by their own records (`failure_forecast`). Of several
hosts the first ones are waited for, as far as that pays.

So that decisions do not flutter, another option than the usual one, or than the one that was chosen before in the same
situation, must lose less by `HYSTERESIS` of that, and by `MIN_SAVED_S` at least. A wait has an end: hosts that have not
come by then are not awaited again.
"""

from collections.abc import Mapping
from typing import Final, assert_never

from resilient_jax.policy.admission_options import list_admission_options
from resilient_jax.policy.loss_options import list_loss_options
from resilient_jax.policy.offer import NO_WAIT, Offer
from resilient_jax.policy.prices import Prices
from resilient_jax.policy.score import describe_s
from resilient_jax.policy.situations import Admission, Loss, Situation, SlowTraining
from resilient_jax.policy.slow_host_options import list_slow_host_options
from resilient_jax.protocol.recovery_records import (
    WAITING_ACTIONS,
    RecoveryAction,
    RecoveryDecision,
    RecoveryOption,
)

HYSTERESIS: Final = 0.2
"""The part of what the usual option loses until the next failure that another one must save."""
MIN_SAVED_S: Final = 0.5
"""And it must save so many seconds: the times of one kind of change differ by that much (docs/benchmarks.md)."""
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


def choose(situation: Situation, prices: Prices) -> RecoveryDecision:
    """Return what to do in a situation, and why; a reader adds what it alone knows to the record."""
    offer = list_options(situation, prices)
    chosen = _choose_action(offer, prices)
    wait = offer.waits.get(chosen, NO_WAIT)
    options = sorted(
        offer.options, key=lambda option: (option.action is not chosen, bool(option.why_not), -option.score)
    )
    expected, new_world_because = (), ""
    if not isinstance(situation, SlowTraining):
        expected, new_world_because = situation.awaited, situation.new_world_because
    course = _describe_course(chosen, wait.wait_s, new_world_because)
    return RecoveryDecision(
        action=chosen,
        reason=f"the job {course}{_compare(options, offer.usual, prices)}",
        options=tuple(options),
        next_failure_s=prices.next_failure_s,
        awaited=tuple(one.host for one in expected[: wait.num_awaited]),
        wait_s=wait.wait_s,
    )


def list_options(situation: Situation, prices: Prices) -> Offer:
    """Return what there is to choose in a situation."""
    match situation:
        case Loss():
            return list_loss_options(situation, prices)
        case Admission():
            return list_admission_options(situation, prices)
        case SlowTraining():
            return list_slow_host_options(situation, prices)
    assert_never(situation)


def _choose_action(offer: Offer, prices: Prices) -> RecoveryAction:
    """Return the best possible option, or the usual one if the best does not save enough."""
    possible = (option for option in offer.options if not option.why_not)
    best = max(possible, key=lambda option: (option.score, option.action is offer.usual))
    # D (1 - score / best speed that can be reached), in s: what is lost until the next failure, as time at that speed.
    lost, least = (
        prices.next_failure_s * (1 - option.score / offer.reachable)
        for option in (offer.find(offer.usual), best)
    )
    return best.action if lost - least > max(HYSTERESIS * lost, MIN_SAVED_S) else offer.usual


def _describe_course(action: RecoveryAction, wait_s: float, new_world_because: str) -> str:
    course = _ACTION_TEXTS[action]
    if action is RecoveryAction.KEEP_STAGES and not wait_s:
        course = "keeps the lost stages until others have copies of their blocks"
    if new_world_because and action is RecoveryAction.JOIN:
        course += " in a new world"
    if new_world_because and action in (
        RecoveryAction.REFORM,
        RecoveryAction.REFORM_COLD,
        RecoveryAction.JOIN,
    ):
        course += f" ({new_world_because})"
    return f"{course}, for {wait_s:.2g} s at most" if action in WAITING_ACTIONS else course


def _compare(options: list[RecoveryOption], usual: RecoveryAction, prices: Prices) -> str:
    """Return what the chosen option, which is the first, brings, and what the next best one would lose or save."""
    first, *others = options
    speed = "" if first.action in WAITING_ACTIONS else f": {first.describe_speed()}"
    rival = next((option for option in others if not option.why_not), None)
    if rival is None:
        return f"{speed}; nothing else is possible"
    # D (s - s'), in s at the speed of all hosts.
    gain_s = prices.next_failure_s * (first.score - rival.score)
    expected = describe_s(prices.next_failure_s)
    text = f"{describe_s(abs(gain_s))} of training until the next failure, expected in {expected}"
    if gain_s < 0:
        text += f", too little for a change from the usual {usual}"
        return f"{speed}; to {rival.action} would save no more than {text}"
    return f"{speed}; to {rival.action} would lose {text}"
