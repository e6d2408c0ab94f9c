"""The kernel that every installation has: numpy, one block at a time, by the bits of the matrix.

Let c_b be bit b of a coefficient c. As c = sum_b c_b 2^b, a row of the product is, by Horner's rule,
    sum_j c[j] s[j] = 2 (2 (... 2 X_7 + X_6 ...) + X_1) + X_0,  with  X_b = XOR of all s[j] where c[j]_b = 1.
XOR and doubling are vector instructions. The alternative, a table of products, costs a load for each byte.
Anvin, "The mathematics of RAID-6" (2004), doubles bytes in the same way.
"""

from typing import final

import numpy as np
import numpy.typing as npt

from resilient_jax.erasure.buffers import Operands
from resilient_jax.erasure.galois_field import PRIMITIVE_POLYNOMIAL
from resilient_jax.erasure.kernel import Kernel, KernelName
from resilient_jax.erasure.matrix import Matrix

BLOCK_BYTES = 64 * 2**10
"""Columns of one block: long enough to hide the cost of numpy's calls, short enough for the second-level cache."""
REDUCTION = np.int8(PRIMITIVE_POLYNOMIAL & 0xFF)
"""x^8 modulo the polynomial of the field."""

ByteArray = npt.NDArray[np.uint8]


@final
class NumpyKernel(Kernel):
    """numpy on one core: five to ten times slower than ISA-L, with nothing to install."""

    name = KernelName.NUMPY

    def __init__(self) -> None:
        self.description = f"numpy {np.__version__}"

    def _multiply(self, matrix: Matrix, operands: Operands) -> None:
        sources = [np.frombuffer(view, np.uint8) for view in operands.sources]
        destinations = [np.frombuffer(view, np.uint8) for view in operands.destinations]
        mask = np.empty(min(BLOCK_BYTES, operands.length), np.int8)
        for start in range(0, operands.length, BLOCK_BYTES):
            block = slice(start, min(start + BLOCK_BYTES, operands.length))
            blocks = [source[block] for source in sources]
            for row, destination in zip(matrix, destinations, strict=True):
                _multiply_row(row, blocks, destination[block], mask[: block.stop - start])


def _multiply_row(
    row: bytes, sources: list[ByteArray], result: ByteArray, mask: npt.NDArray[np.int8]
) -> None:
    """Write sum_j row[j] * sources[j] to `result`; `mask` is scratch. All are uint8[size] or int8[size]."""
    # Horner's rule over the bits b, highest first: result = 2 result + XOR of all s[j] with c[j]_b = 1.
    result[:] = 0
    for bit in reversed(range(max(row).bit_length())):
        _double(result, mask)
        for coefficient, source in zip(row, sources, strict=True):
            if coefficient >> bit & 1:
                np.bitwise_xor(result, source, out=result)


def _double(values: ByteArray, mask: npt.NDArray[np.int8]) -> None:
    """Double each value in the field, in place: 2 v = (v << 1) XOR (REDUCTION if bit 7 of v is set)."""
    # The arithmetic shift of int8 copies the sign: all ones where bit 7 is set, else zero.
    np.right_shift(values.view(np.int8), 7, out=mask)
    np.bitwise_and(mask, REDUCTION, out=mask)
    np.add(values, values, out=values)
    np.bitwise_xor(values, mask.view(np.uint8), out=values)
