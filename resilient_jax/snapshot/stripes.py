"""The placement of data chunks and parity chunks in a parity group: index arithmetic only.

A group has n members and m parity, so k = n - m. Stripe r, of the n there are, has its parity shard p on member
(r + p) mod n and its data shard j on member (r + m + j) mod n, whose chunk j that is. So every member has each of
its k chunks in a stripe of its own, keeps parity of m further stripes, and no stripe has two shards on one member.
The docstring of `protocol/snapshots` has the same formulas from the member's side.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

MIN_BLOCK_BYTES: Final = 4096
"""A page, so that chunks of shared memory can be mapped, and copied in one piece."""
MAX_BLOCK_BYTES: Final = 256 * 2**10
"""Smaller blocks only add checksums to a large part."""
MIN_BLOCKS_PER_CHUNK: Final = 8
"""In a chunk, unless blocks have the minimal size, so that rounding wastes an eighth at most."""


class Grid(NamedTuple):
    """The sizes of blocks and chunks of a group. Chunks are multiples of blocks, so no block spans two chunks.

    Attributes:
        block_bytes: bytes of a block, which has one checksum: a power of two, at least a page.
        chunk_bytes: bytes of each of a part's k chunks; 0 if all parts are empty.
    """

    block_bytes: int
    chunk_bytes: int


def cut_grid(group_part_bytes: Sequence[int], k: int) -> Grid:
    """Return the grid of a group, with chunks that hold the longest part and blocks so small that little is wasted.

    >>> cut_grid([3 * 4096 + 1, 5], 3)
    Grid(block_bytes=4096, chunk_bytes=8192)
    >>> cut_grid([10**9], 8).block_bytes
    262144
    """
    assert k > 0, f"a group has data on k = {k} members"
    each = -(-max(group_part_bytes, default=0) // k)
    block = MIN_BLOCK_BYTES
    while block < MAX_BLOCK_BYTES and block * 2 * MIN_BLOCKS_PER_CHUNK <= each:
        block *= 2
    return Grid(block, -(-each // block) * block)


def stripe_of_chunk(member: int, chunk: int, n: int, m: int) -> int:
    """Return the stripe that has chunk `chunk` < n - m of a member as its data shard `chunk`."""
    return (member - m - chunk) % n


def stripe_of_row(member: int, row: int, n: int, m: int) -> int:
    """Return the stripe whose parity shard `row` < m a member keeps."""
    assert 0 <= row < m, f"a member keeps m = {m} parity chunks, none numbered {row}"
    return (member - row) % n


def data_members(stripe: int, n: int, m: int) -> tuple[int, ...]:
    """Return the members whose chunks are a stripe's data shards 0 .. n - m - 1, in this order."""
    return tuple((stripe + m + shard) % n for shard in range(n - m))


def parity_members(stripe: int, n: int, m: int) -> tuple[int, ...]:
    """Return the members that keep a stripe's parity shards 0 .. m - 1, in this order; the first one encodes it."""
    return tuple((stripe + row) % n for row in range(m))
