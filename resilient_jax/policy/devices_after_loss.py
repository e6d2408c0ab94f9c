"""Which devices of a host its workers use, when some of them are out."""

from collections.abc import Collection
from typing import Literal

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
