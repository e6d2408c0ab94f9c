"""What a standby has used and freed is given back to the machine."""

import os
from pathlib import Path

from resilient_jax.snapshot.malloc_settings import release_freed_memory

MIB = 2**20
PIECE_BYTES = 2**16
"""Smaller than what glibc maps, and so gives back, by itself."""


def measure_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_freed_memory_is_released() -> None:
    pieces = [bytearray(os.urandom(1) * PIECE_BYTES) for _ in range(256 * MIB // PIECE_BYTES)]
    last = pieces.pop()  # at the end of the heap, which is why glibc keeps what is before it
    pieces.clear()
    before = measure_resident_bytes()
    release_freed_memory()
    assert before - measure_resident_bytes() > 128 * MIB
    assert len(last) == PIECE_BYTES
