"""Ends a command by SIGTERM and SIGHUP as Ctrl-C does."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the block at SIGTERM and SIGHUP as at Ctrl-C, so that disks, networks, clock and processes are restored.

    The exit code is 128 plus the signal's number. A signal that was ignored before stays ignored (`nohup`).
    """

    def end(number: int, _: FrameType | None) -> None:
        for other in before:  # a second signal must not interrupt the cleanup that the first began
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    ended_by = (signal.SIGTERM, signal.SIGHUP)
    before = {n: handler for n in ended_by if (handler := signal.getsignal(n)) is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
