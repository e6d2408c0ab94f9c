"""Threads that wait in C++ for what is not needed any more, and that no Python signal reaches. Imports no jax."""

import atexit
import threading
from typing import Final

JOIN_AT_EXIT_TIMEOUT_S: Final = 1.0

_abandoned: list[threading.Thread] = []


def abandon_thread(thread: threading.Thread) -> None:
    """Leave a daemon thread to itself; it is joined, for a second at most, when the process ends."""
    _abandoned[:] = [*(t for t in _abandoned if t.is_alive()), thread]


@atexit.register
def _await_abandoned() -> None:
    """Join abandoned threads: one that returns from C++ while the interpreter shuts down would crash the process."""
    for thread in _abandoned:
        thread.join(JOIN_AT_EXIT_TIMEOUT_S)
