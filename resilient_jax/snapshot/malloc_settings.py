"""What glibc's malloc does with freed memory: kept for the next messages, or given back to the kernel.

By default glibc returns large blocks to the kernel as soon as they are freed, and maps new ones for the next message,
which the kernel has to clear under a lock that all threads share. Messages of 4 MiB are then transferred at less than
half the speed (mallopt(3), M_MMAP_THRESHOLD, M_TRIM_THRESHOLD).
"""

import ctypes
import gc
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
MMAP_THRESHOLD_BYTES: Final = 32 * 2**20
"""The largest value that glibc accepts. States and their buffers are larger, so they are returned to the kernel."""
TRIM_THRESHOLD_BYTES: Final = 64 * 2**20
"""That each malloc arena keeps at its end: some messages of every thread."""


def keep_freed_memory() -> bool:
    """Make the C library keep the freed memory of messages; return False where it has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    )


def release_freed_memory() -> None:
    """Collect garbage, and have glibc give back what it keeps for later; without glibc, only the former."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
