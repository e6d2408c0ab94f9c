"""Limits a process to its present memory or descriptors, so that the kernel refuses more."""

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path


def limit_memory(pid: int) -> Callable[[], None]:
    """Limit a process to its present address space, and return the function that lifts the limit.

    Raises:
        OSError: this process may not set limits.
    """
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return _limit(pid, resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE"))


def limit_descriptors(pid: int) -> Callable[[], None]:
    """Limit a process to its present descriptors, and return the function that lifts the limit.

    Raises:
        OSError: this process may not set limits.
    """
    highest = max(map(int, os.listdir(f"/proc/{pid}/fd")), default=0)
    return _limit(pid, resource.RLIMIT_NOFILE, highest + 1)


def _limit(pid: int, what: int, soft: int) -> Callable[[], None]:
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (soft, before[1]))

    def lift() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)

    return lift
