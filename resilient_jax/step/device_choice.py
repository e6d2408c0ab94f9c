"""Which slow devices a host leaves out: those without which its other ones are fastest together. Pure.

The devices of a replica, such as a tensor group, wait for the slowest of them: n devices of speeds p_i compute at
`n min_i p_i`. Without the slowest ones there are fewer, as many as `devices_after_loss` says, but the slowest of these
is faster. With "even" and a power of two of devices these are powers of two, too, and the choice is that of ResiHP
(arXiv 2605.06374): `argmax_{k = 2^q} k min_{i in top-k} p_i`.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from resilient_jax.policy.devices_after_loss import DevicesAfterLoss, select_devices


class DeviceChoice(NamedTuple):
    """The devices that a host leaves out.

    Attributes:
        out: numbers of the devices on the host, ascending.
        used: numbers of those that the host computes on then.
        speed: what the host then has of the speed it had if all its devices were as fast as its fastest one.
    """

    out: tuple[int, ...]
    used: tuple[int, ...]
    speed: float


def explain_all_devices(slow: Collection[int], after_loss: DevicesAfterLoss) -> str:
    """Return why a slow host keeps all of its devices, where none can be left out.

    Args:
        slow: numbers of the devices that are slower than the host's other ones.
        after_loss: what the host does with the devices that are left.
    """
    if not slow:
        return "no device of it is known to be slower than its other ones"
    return f'devices_after_loss = "{after_loss}": it cannot do without a device'


def choose_devices_to_leave_out(
    speeds: Sequence[tuple[int, float]], slow: Collection[int], after_loss: DevicesAfterLoss
) -> DeviceChoice | None:
    """Return which of the slow devices a host does best without; None: it cannot do without any.

    Args:
        speeds: (number, part of the speed of the fastest one) of each device that the host computes on.
        slow: the numbers of those that may be left out.
        after_loss: what a host does with the devices that are left.

    >>> choose_devices_to_leave_out([(0, 1.0), (1, 1.0), (2, 1.0), (3, 0.4)], [3], "even")
    DeviceChoice(out=(3,), used=(0, 1), speed=0.5)
    """
    numbers, known = [number for number, _ in speeds], [speed for _, speed in speeds]
    slowest_first = sorted(
        (place for place, number in enumerate(numbers) if number in slow),
        key=lambda place: (known[place], -place),
    )
    best: DeviceChoice | None = None
    for count in range(1, 1 + len(slowest_first)):
        out = slowest_first[:count]
        used = select_devices(len(numbers), out, after_loss)
        if not used:
            continue
        choice = DeviceChoice(
            out=tuple(sorted(numbers[place] for place in out)),
            used=tuple(numbers[place] for place in used),
            speed=len(used) * min(known[place] for place in used) / len(numbers),
        )
        if best is None or choice.speed > best.speed:
            best = choice
    return best
