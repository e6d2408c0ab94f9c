"""Memory that was freed, given back to the kernel."""

import ctypes
import gc


def release_freed_memory() -> None:
    """Collect garbage, and have glibc give back what it keeps for later; without glibc, only the former."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
