"""Encoding and decoding: parity shards of data shards, and lost shards, computed from those that are left."""

from collections.abc import Mapping, Sequence

from resilient_jax.erasure.buffers import Buffer
from resilient_jax.erasure.errors import ErasureCodeError
from resilient_jax.erasure.kernel import Kernel
from resilient_jax.erasure.reed_solomon import ReedSolomon


def encode(code: ReedSolomon, kernel: Kernel, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
    """Write the parity of the data.

    Args:
        data: k buffers, uint8[length] each. The caller pads shards of unequal size with zeros.
        parity: m writable buffers, uint8[length] each.

    Raises:
        ErasureCodeError: there are not k and m buffers, or buffers do not fit (see `check_operands`).
    """
    for name, buffers, expected in (("data", data, code.k), ("parity", parity, code.m)):
        if len(buffers) != expected:
            raise ErasureCodeError(
                f"{name}: found {len(buffers)} buffers, expected {expected}, one for each {name} shard"
            )
    # parity_i = sum_j parity_matrix[i][j] data_j over GF(2^8), uint8[length] each.
    kernel.apply(code.parity_matrix, data, parity)


def decode(
    code: ReedSolomon, kernel: Kernel, present: Mapping[int, Buffer], wanted: Mapping[int, Buffer]
) -> tuple[int, ...]:
    """Write the wanted shards, data or parity, from any k that are present.

    Bytes at an offset depend only on bytes at the same offset: for a part of a shard, give that part of each.
    `decode` trusts what is present; leave a shard with a bad checksum out.

    Args:
        present: at least k shards by index, uint8[length] each.
        wanted: where to write which shard, by index, uint8[length] each; none of them is present.

    Returns:
        The shards that were read: k of those present, data shards first. Empty if nothing is wanted.

    Raises:
        TooManyErasures: fewer than k shards are present; the message names the lost ones.
        ErasureCodeError: the code has no such shard, a shard is both present and wanted, or buffers do not fit.
    """
    both = sorted(present.keys() & wanted.keys())
    if both:
        raise ErasureCodeError(f"shards {both}: found both present and wanted, expected one or the other")
    decoding = code.make_decoding(present, wanted)
    if not wanted:
        return ()
    # wanted = matrix sources over GF(2^8), column by column: the first k of the present shards determine all others.
    sources = [present[shard] for shard in decoding.sources]
    kernel.apply(decoding.matrix, sources, [wanted[shard] for shard in decoding.wanted])
    return decoding.sources
