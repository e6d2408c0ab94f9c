"""Sets this machine's wall clock for all programs, as an administrator or a time server does."""

import time
from collections.abc import Callable


def jump_clock(seconds: float) -> Callable[[], None]:
    """Set the clock ahead, or back if negative, and return the function that reverts the jump.

    Raises:
        OSError: this process may not set the clock.
    """
    _move(seconds)
    return lambda: _move(-seconds)


def _move(seconds: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME) + seconds)
