"""Signals by which a scheduler says that a host, or a whole job, is about to end; and who listens to them.

A scheduler, or a person, often sends them to every process of a job at once (`scancel`, Slurm's time limit, a service
manager that stops a group). Only agents and the launcher answer: they have the time to end a job well. Rules:

- Every other process of ours ignores these signals from its first instruction on: `blocked_notices` around its start,
  `ignore_notices` in it.
- What a script starts must not inherit that. So a process that runs a script has handlers that do nothing in place of
  SIG_IGN (`catch_notices`): the kernel drops them at an `exec`, and a child that is forked gives them up. A handler
  that the script sets takes their place, and so gets the signal.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final

NOTICE_SIGNALS: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def list_handled_notices() -> list[signal.Signals]:
    """Return the signals that an agent, or the launcher, takes for a notice: not SIGINT, which a person sends.

    SIGHUP that was ignored from the start (`nohup`) stays so: the end of a terminal is no notice then.
    """
    is_hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [
        number
        for number in NOTICE_SIGNALS
        if number is not signal.SIGINT and not (number is signal.SIGHUP and is_hangup_ignored)
    ]


@contextlib.contextmanager
def blocked_notices() -> Iterator[None]:
    """Block the signals in this thread, and in the processes that it starts meanwhile, until these ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICE_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_notices() -> None:
    """Ignore the signals in this process, which runs no script; those that were blocked are dropped."""
    for number in NOTICE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICE_SIGNALS)


def catch_notices() -> None:
    """Replace SIG_IGN by handlers that do nothing, before a script runs in this process."""
    for number in NOTICE_SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _do_nothing)
            # A read or a wait of a library's must not fail because of the signal.
            signal.siginterrupt(number, False)
    os.register_at_fork(after_in_child=_restore_defaults)


def _do_nothing(_: int, __: FrameType | None) -> None:
    """Handle a signal that is not for this process."""


def _restore_defaults() -> None:
    """Give a forked child the handlers that Python begins with, but for those that the script has set."""
    for number in NOTICE_SIGNALS:
        if signal.getsignal(number) is _do_nothing:
            default = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
