"""Memory of messages, used again: else every message of MiBs is new pages that the kernel has to clear.

glibc gives large blocks back as soon as they are freed, and maps new ones for the next message, under a lock that all
threads share. Messages of 4 MiB then pass at less than half the speed (mallopt(3), M_MMAP_THRESHOLD, M_TRIM_THRESHOLD).
"""

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
MMAP_THRESHOLD_BYTES: Final = 32 * 2**20
"""The most that glibc takes. States and their buffers are larger, so they go back to the kernel as before."""
TRIM_THRESHOLD_BYTES: Final = 64 * 2**20
"""That each arena keeps at its end: some messages of every thread."""


def keep_freed_memory() -> bool:
    """Has the C library of this process keep what messages leave; False where it has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    )
