"""Parity of data shards: all at once, shard by shard, or after a change."""

from collections.abc import Sequence

from resilient_jax.erasure.buffers import Buffer
from resilient_jax.erasure.errors import ErasureCodeError
from resilient_jax.erasure.kernel import Kernel
from resilient_jax.erasure.reed_solomon import ReedSolomon


def encode(code: ReedSolomon, kernel: Kernel, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
    """Writes the parity of the data.

    Args:
        code: k and m.
        kernel: does the work.
        data: k buffers, uint8[length] each. Shards of unequal size are padded with zeros by the caller.
        parity: m writable buffers, uint8[length] each.

    Raises:
        ErasureCodeError: not k and m buffers, or buffers that do not fit (see `check_operands`).
    """
    _check_count("data", data, code.k)
    _check_count("parity", parity, code.m)
    kernel.apply(code.parity_matrix, data, parity)


def add_shard(code: ReedSolomon, kernel: Kernel, index: int, data: Buffer, parity: Sequence[Buffer]) -> None:
    """Adds the part of one data shard to parity: after all k, on parity that began as zeros, it is the data's parity.

    For shards that come one after the other over a network: only one of them has to be in memory.

    Args:
        code: k and m.
        kernel: does the work.
        index: of the data shard, in range(k).
        data: uint8[length].
        parity: m writable buffers, uint8[length] each.

    Raises:
        ErasureCodeError: no such data shard, not m buffers, or buffers that do not fit.
    """
    _apply_columns(code, kernel, index, [data], parity)


def update_parity(
    code: ReedSolomon, kernel: Kernel, index: int, old: Buffer, new: Buffer, parity: Sequence[Buffer]
) -> None:
    """Changes parity that was right for `old` into parity that is right for `new`, without the other shards.

    parity + A_index (old + new). Faster than encoding anew when under a third of the bytes changed; the caller gives
    only the byte range that did, of the parity too. Not to be repeated: a second call undoes the first.

    Args:
        code: k and m.
        kernel: does the work.
        index: of the data shard that changed, in range(k).
        old: what the shard held, uint8[length].
        new: what it holds, uint8[length].
        parity: m writable buffers, uint8[length] each.

    Raises:
        ErasureCodeError: no such data shard, not m buffers, or buffers that do not fit.
    """
    _apply_columns(code, kernel, index, [old, new], parity)


def _apply_columns(
    code: ReedSolomon, kernel: Kernel, index: int, sources: Sequence[Buffer], parity: Sequence[Buffer]
) -> None:
    _check_count("parity", parity, code.m)
    if not 0 <= index < code.k:
        raise ErasureCodeError(f"data shard: found {index}, expected one from 0 to {code.k - 1}")
    matrix = tuple(bytes([row[index]]) * len(sources) for row in code.parity_matrix)
    kernel.apply(matrix, sources, parity, accumulate=True)


def _check_count(name: str, buffers: Sequence[Buffer], expected: int) -> None:
    if len(buffers) != expected:
        raise ErasureCodeError(
            f"{name}: found {len(buffers)} buffers, expected {expected}, one for each {name} shard"
        )
