"""Where chunks and parity lie in a group: index arithmetic, nothing else.

A group has n members and m parity, so k = n - m. Stripe r, of the n there are, has its parity shard p on member
(r + p) mod n and its data shard j on member (r + m + j) mod n, whose chunk j that is. So every member has each of
its k chunks in a stripe of its own, keeps parity of m further stripes, and no stripe has two shards on one member.
The docstring of `protocol/snapshots` says the same from the member's side.
"""

from collections.abc import Sequence

from resilient_jax.protocol.snapshots import CHUNK_ALIGNMENT


def chunk_bytes(group_part_bytes: Sequence[int], k: int) -> int:
    """How long every chunk of a group is: the longest part's k-th, rounded up to `CHUNK_ALIGNMENT`; 0 if all are empty.

    >>> chunk_bytes([3 * 4096 + 1, 5], 3)
    8192
    """
    assert k > 0, f"a group has data on k = {k} members"
    each = -(-max(group_part_bytes, default=0) // k)
    return -(-each // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT


def stripe_of_chunk(member: int, chunk: int, n: int, m: int) -> int:
    """The stripe that has chunk `chunk` < n - m of a member as its data shard `chunk`."""
    return (member - m - chunk) % n


def stripe_of_row(member: int, row: int, n: int, m: int) -> int:
    """The stripe whose parity shard `row` < m a member keeps."""
    assert 0 <= row < m, f"a member keeps m = {m} parity chunks, none numbered {row}"
    return (member - row) % n


def data_members(stripe: int, n: int, m: int) -> tuple[int, ...]:
    """The members whose chunks are a stripe's data shards 0 .. n - m - 1, in this order."""
    return tuple((stripe + m + shard) % n for shard in range(n - m))


def parity_members(stripe: int, n: int, m: int) -> tuple[int, ...]:
    """The members that keep a stripe's parity shards 0 .. m - 1, in this order; the first one encodes it."""
    return tuple((stripe + row) % n for row in range(m))
