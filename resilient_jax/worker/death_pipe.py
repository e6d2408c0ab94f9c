"""A pipe that closes as soon as this process is killed, before the kernel has released the process's memory.

SIGKILL ends all threads within milliseconds, but the kernel first releases the process's memory and only then closes
its descriptors and announces its exit: 0.2 to 0.5 s later for a worker of 600 MB on a busy machine. A thread with a
descriptor table of its own closes that table when it ends, whatever the rest of the process still does. So such a
thread holds the only write end of a pipe, and does nothing else.
"""

import ctypes
import os
import threading
from typing import Final

CLONE_FILES: Final = 0x400
MAX_DESCRIPTOR: Final = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)


def isolate_death_pipe(descriptor: int) -> str | None:
    """Move `descriptor`, the write end of a pipe, out of this process's descriptor table into that of a thread.

    Returns:
        None, or why the descriptor was not moved (a sandbox may forbid it). Then the descriptor stays where it is, and
            closes only when the
        kernel closes all descriptors of this process.
    """
    problem: list[str] = []
    ready = threading.Event()
    thread = threading.Thread(
        target=_hold, args=(descriptor, problem, ready), name="resilient-jax-death-pipe", daemon=True
    )
    thread.start()
    ready.wait()
    if problem:
        return problem[0]
    os.close(descriptor)
    return None


def _hold(descriptor: int, problem: list[str], ready: threading.Event) -> None:
    if _libc.unshare(CLONE_FILES) != 0:
        problem.append(f"unshare(CLONE_FILES): {os.strerror(ctypes.get_errno())}")
        ready.set()
        return
    # The copies of all other descriptors are closed: they would keep every socket open that is closed elsewhere.
    os.closerange(0, descriptor)
    os.closerange(descriptor + 1, MAX_DESCRIPTOR)
    ready.set()
    _libc.pause()  # forever; no Python code may run here any more: this thread has no open files
