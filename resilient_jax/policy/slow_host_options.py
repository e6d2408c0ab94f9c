"""The options about a slow host, with their prices: it stays, a spare takes its place, or others go on without it.

That it stays costs no pause. Or it goes on without those of its devices that are slow, or a pipeline gives it fewer
layers. Shares by speed are chosen before that, by the workers, and cost nothing.
"""

from typing import Final

import msgspec

from resilient_jax.policy.offer import Offer, make_option
from resilient_jax.policy.prices import Prices
from resilient_jax.policy.score import Phase
from resilient_jax.policy.situations import SlowTraining
from resilient_jax.protocol.recovery_records import RecoveryAction, TimedChange
from resilient_jax.protocol.slow_hosts import Slowdown

MIN_SPEED_GAIN: Final = 0.05
"""The part by which an action on a slow host must raise the speed: what hosts take is known no better."""


def count_standby_devices(slowdown: Slowdown, num_standby: int) -> Slowdown:
    """Return what slow hosts cost if devices that stand by take the place of slow ones, where they are enough.

    The worker that has estimated the speeds knows only the devices that it uses. With as many sound ones as before its
    host is as fast as a sound host in its place would be.

    Args:
        num_standby: sound devices of the slowest host that the host's worker does not use.
    """
    slow = slowdown.slow_devices
    if not slow or num_standby < len(slow) or slowdown.replaced <= slowdown.fewer_devices:
        return slowdown
    return msgspec.structs.replace(slowdown, devices=slow, fewer_devices=slowdown.replaced)


def list_slow_host_options(training: SlowTraining, prices: Prices) -> Offer:
    """Return what may be done about a host that is slow, or about layers that are divided as if one were."""
    share = training.training / training.places
    speeds = list_speeds(training.slowdown)
    options = tuple(
        make_option(
            action,
            _list_phases(action, share * speed, training, prices),
            prices,
            _explain_refusal(action, speed, training),
        )
        for action, speed in speeds.items()
    )
    return Offer(options=options, usual=RecoveryAction.KEEP, reachable=share * max(1.0, *speeds.values()))


def list_speeds(slowdown: Slowdown) -> dict[RecoveryAction, float]:
    """Return the speed after each action; 0: the action is not possible."""
    return {
        RecoveryAction.KEEP: slowdown.kept,
        RecoveryAction.REPLACE: slowdown.replaced,
        RecoveryAction.TAKE_OUT: slowdown.without,
        RecoveryAction.FEWER_DEVICES: slowdown.fewer_devices,
        RecoveryAction.REDIVIDE: slowdown.redivided,
    }


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
    join_s = prices.seconds[TimedChange.GROW if training.can_return_in_place else TimedChange.REFORM_COLD]
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
            pause_s = seconds[TimedChange.GROW if training.is_spare_in_place else TimedChange.REFORM_COLD]
    # The mean of a change in which a state was read counts what else it took, so that the sum is an upper bound.
    return pause_s + (seconds[TimedChange.RESTORE] if training.needs_restore else 0.0)


def _explain_refusal(action: RecoveryAction, speed: float, training: SlowTraining) -> str:
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
