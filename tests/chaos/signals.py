"""Signals to processes that may be gone already."""

import contextlib
import os
import signal
from collections.abc import Iterable


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def resume_processes(pids: Iterable[int]) -> None:
    """Send SIGCONT to each process that still exists."""
    send_signal(pids, signal.SIGCONT)
