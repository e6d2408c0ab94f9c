"""Which columns of a stripe do not belong together.

The check equations are computed for each column; what should be zero and is not is the syndrome, and the column
is dirty. An error changes up to r = len(shards) - k bytes of a column: it is always found. More may turn one
codeword into another and go unseen, once in about 256^r; that is what checksums are for.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from resilient_jax.erasure.buffers import Buffer, view_bytes
from resilient_jax.erasure.errors import ErasureCodeError
from resilient_jax.erasure.kernel import Kernel
from resilient_jax.erasure.matrix import Vector
from resilient_jax.erasure.reed_solomon import Check, ReedSolomon

BLOCK_BYTES = 2**18
"""Columns that are checked at once: long enough for a kernel's best speed, and the syndromes stay in cache."""

_NONZERO = re.compile(rb"[^\x00]")


@dataclass(frozen=True, slots=True)
class DirtyBlock:
    """A run of columns, some of them dirty.

    Attributes:
        start: offset of the first column, in bytes from the start of the shards.
        syndromes: r rows, a byte for each column.
        flags: a byte for each column, not 0 where it is dirty.
    """

    start: int
    syndromes: tuple[bytes, ...]
    flags: bytes

    def columns(self) -> Iterator[int]:
        """The offsets of the dirty columns, ascending."""
        return (self.start + found.start() for found in _NONZERO.finditer(self.flags))

    def sample(self, count: int) -> list[int]:
        """Some dirty columns, at most `count` and the last, spread over the block; the first and the last are
        among them."""
        step = max(1, -(-len(self.flags) // count))
        offsets = [len(self.flags.rstrip(b"\x00")) - 1]
        position = 0
        while found := _NONZERO.search(self.flags, position, offsets[0]):
            offsets.append(found.start())
            position = found.start() // step * step + step  # the next step, so that the block is passed once
        return [self.start + offset for offset in sorted(offsets)]

    def part(self, start: int, stop: int) -> "DirtyBlock | None":
        """The columns at offsets from start to stop; None if they are all clean."""
        inside = slice(start - self.start, stop - self.start)
        flags = self.flags[inside]
        if flags.count(0) == len(flags):
            return None
        return DirtyBlock(start, tuple(row[inside] for row in self.syndromes), flags)

    def syndrome(self, column: int) -> Vector:
        """The r bytes that should be 0 at an offset."""
        return bytes(row[column - self.start] for row in self.syndromes)


def scan(
    code: ReedSolomon, kernel: Kernel, shards: Mapping[int, Buffer], *, block_bytes: int = BLOCK_BYTES
) -> Iterator[DirtyBlock]:
    """Finds the dirty columns; a stripe without any yields nothing.

    Args:
        code: k and m.
        kernel: does the work.
        shards: k + 1 or more by index, uint8[length] each; only read.
        block_bytes: columns in a block. A block takes r times that much memory.

    Raises:
        TooManyErasures: fewer than k shards.
        ErasureCodeError: exactly k shards, in which nothing can be found, or buffers that do not fit.
    """
    check = code.check(shards)
    views = [view_bytes(shards[shard], f"shard {shard}") for shard in check.shards]
    lengths = {len(view) for view in views}
    if len(lengths) > 1:
        raise ErasureCodeError(
            f"shards of unequal length: found {sorted(lengths)} bytes, expected one length"
        )
    return _scan(check, kernel, views, block_bytes)


def _scan(check: Check, kernel: Kernel, views: list[memoryview], block_bytes: int) -> Iterator[DirtyBlock]:
    length = len(views[0])
    zeros, scratch = b"", list[bytearray]()
    for start in range(0, length, block_bytes):
        size = min(block_bytes, length - start)
        if size != len(zeros):  # at the first block, and at a shorter last one
            zeros = bytes(size)
            scratch = [bytearray(size) for _ in check.matrix]
        kernel.apply(check.matrix, [view[start : start + size] for view in views], scratch)
        if any(row != zeros for row in scratch):
            merged = functools.reduce(int.__or__, (int.from_bytes(row) for row in scratch))
            yield DirtyBlock(start, tuple(bytes(row) for row in scratch), merged.to_bytes(size))
