"""This machine's wall clock, set as an administrator or a time server sets it: for all programs at once."""

import time
from collections.abc import Callable


def jump_clock(seconds: float) -> Callable[[], None]:
    """Sets it ahead, or back if negative; gives what sets it back by as much.

    Raises:
        OSError: not permitted.
    """
    _move(seconds)
    return lambda: _move(-seconds)


def _move(seconds: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME) + seconds)
