"""Faults that are signals, sent to processes that may be gone already."""

import contextlib
import os
import signal
from collections.abc import Iterable


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """To each that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def resume_processes(pids: Iterable[int]) -> None:
    """SIGCONT to each that is stopped."""
    send_signal(pids, signal.SIGCONT)
