"""Encoding: the parity shards of data shards."""

from collections.abc import Sequence

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
