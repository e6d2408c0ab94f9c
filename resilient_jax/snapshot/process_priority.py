"""The scheduling priority of a snapshot server: below that of training, or the same when the state needs its parity."""

import contextlib
import os

NICENESS = 5
"""Encoding yields to training where both need a processor, but is not starved: other hosts wait for the parity."""


def lower_priority(pid: int) -> None:
    """Lower the priority of all threads of a process below that of training, where the sandbox allows it."""
    _set_priority(pid, os.SCHED_BATCH, NICENESS)


def raise_priority(pid: int) -> None:
    """Give all threads of a process normal priority. Without the privilege CAP_SYS_NICE their niceness stays."""
    _set_priority(pid, os.SCHED_OTHER, 0)


def _set_priority(pid: int, policy: int, niceness: int) -> None:
    with contextlib.suppress(OSError):  # the process is gone
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, policy, os.sched_param(0))
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
