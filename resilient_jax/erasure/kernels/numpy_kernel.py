"""The kernel that is always there: numpy, a block at a time, by the bits of the matrix.

A product with a constant is a sum of doublings, so by Horner over the bits, highest first:
    result = 2 (2 (... bit 7 of the row) + bit 6 of the row) ... + bit 0 of the row
where "bit b of the row" is the XOR of the sources whose coefficient has that bit. XOR and doubling are vector
instructions; a look-up in a table, the other way, costs a load for each byte.
"""

from typing import final

import numpy as np
import numpy.typing as npt

from resilient_jax.erasure.buffers import Operands
from resilient_jax.erasure.galois_field import PRIMITIVE_POLYNOMIAL
from resilient_jax.erasure.kernel import Kernel, KernelName
from resilient_jax.erasure.matrix import Matrix

BLOCK_BYTES = 64 * 2**10
"""Columns at once: long enough that numpy's calls do not count, short enough that all stays in the second-level
cache."""
REDUCTION = np.int8(PRIMITIVE_POLYNOMIAL & 0xFF)
"""What x^8 is modulo the field's polynomial."""

ByteArray = npt.NDArray[np.uint8]


@final
class NumpyKernel(Kernel):
    """numpy on one core: five to ten times slower than ISA-L, and without anything to install."""

    name = KernelName.NUMPY

    def __init__(self) -> None:
        self.description = f"numpy {np.__version__}"

    def _multiply(self, matrix: Matrix, operands: Operands, *, accumulate: bool) -> None:
        sources = [np.frombuffer(view, np.uint8) for view in operands.sources]
        destinations = [np.frombuffer(view, np.uint8) for view in operands.destinations]
        mask = np.empty(min(BLOCK_BYTES, operands.length), np.int8)
        result = np.empty(len(mask), np.uint8)
        for start in range(0, operands.length, BLOCK_BYTES):
            block = slice(start, min(start + BLOCK_BYTES, operands.length))
            size = block.stop - start
            parts = [source[block] for source in sources]
            for row, destination in zip(matrix, destinations, strict=True):
                if accumulate:
                    _multiply_row(row, parts, result[:size], mask[:size])
                    destination[block] ^= result[:size]
                else:
                    _multiply_row(row, parts, destination[block], mask[:size])


def _multiply_row(
    row: bytes, sources: list[ByteArray], result: ByteArray, mask: npt.NDArray[np.int8]
) -> None:
    """result = sum_j row[j] * sources[j]; the mask is scratch. All uint8[size] or int8[size]."""
    result[:] = 0
    for bit in reversed(range(max(row).bit_length())):
        _double(result, mask)
        for coefficient, source in zip(row, sources, strict=True):
            if coefficient >> bit & 1:
                np.bitwise_xor(result, source, out=result)


def _double(values: ByteArray, mask: npt.NDArray[np.int8]) -> None:
    """values = 2 * values in the field."""
    np.right_shift(values.view(np.int8), 7, out=mask)  # keeps the sign: all ones where the top bit falls out
    np.bitwise_and(mask, REDUCTION, out=mask)
    np.add(values, values, out=values)
    np.bitwise_xor(values, mask.view(np.uint8), out=values)
