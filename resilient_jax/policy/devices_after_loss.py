"""Which devices of a host its workers use, when some of them are out; and which slow ones a host leaves out.

The devices of a replica, such as a tensor group, wait for the slowest of them: n devices of speeds p_i compute at
`n min_i p_i`. Without the slowest ones there are fewer, as many as `devices_after_loss` says, but the slowest of these
is faster. With "even" and a power of two of devices these are powers of two, too, and the choice is that of ResiHP
(arXiv 2605.06374): `argmax_{k = 2^q} k min_{i in top-k} p_i`.
"""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

DevicesAfterLoss = Literal["even", "all", "host"]
"""See `JobConfig.devices_after_loss`."""


def select_devices(num_devices: int, lost: Collection[int], after_loss: DevicesAfterLoss) -> tuple[int, ...]:
    """Return the devices that a worker uses, by number from 0; () if the host can do without none that it lost.

    With "even" they are as many as divide the host's number, so that a mesh whose axes are powers of two still fits:
    of eight devices without one, four. The others stand by, and are used if one of these is lost.

    >>> select_devices(8, [2], "even"), select_devices(4, [0], "all"), select_devices(1, [0], "all")
    ((0, 1, 3, 4), (1, 2, 3), ())
    """
    left = [device for device in range(num_devices) if device not in lost]
    if len(left) == num_devices or after_loss == "all":
        return tuple(left)
    if after_loss == "host":
        return ()
    count = max((size for size in range(1, len(left) + 1) if num_devices % size == 0), default=0)
    return tuple(left[:count])


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
    speeds: Sequence[tuple[int, float]],
    slow: Collection[int],
    after_loss: DevicesAfterLoss,
    lost: Collection[int] = (),
) -> DeviceChoice | None:
    """Return which of the slow devices a host does best without; None: it cannot do without any.

    Args:
        speeds: (number, part of the speed of the fastest one) of each device that the host computes on.
        slow: the numbers of those that may be left out.
        after_loss: what a host does with the devices that are left.
        lost: numbers of devices that the host had before: it uses a part of all that it ever had.

    >>> choose_devices_to_leave_out([(0, 1.0), (1, 1.0), (2, 1.0), (3, 0.4)], [3], "even")
    DeviceChoice(out=(3,), used=(0, 1), speed=0.5)
    """
    known = dict(speeds)
    numbers = sorted({*known, *lost})
    slowest_first = sorted((one for one in known if one in slow), key=lambda one: (known[one], -one))
    best: DeviceChoice | None = None
    for count in range(1, 1 + len(slowest_first)):
        out = slowest_first[:count]
        gone = [place for place, number in enumerate(numbers) if number in out or number in lost]
        used = tuple(numbers[place] for place in select_devices(len(numbers), gone, after_loss))
        if not used:
            continue
        speed = len(used) * min(known[number] for number in used) / len(known)
        if best is None or speed > best.speed:
            best = DeviceChoice(out=tuple(sorted(out)), used=used, speed=speed)
    return best
