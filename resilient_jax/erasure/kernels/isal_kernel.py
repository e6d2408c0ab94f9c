"""The default kernel: ISA-L's `ec_encode_data`, as fast as memory can be read, without scratch memory."""

import array
import ctypes
import functools
from typing import final

from resilient_jax.erasure.buffers import Operands
from resilient_jax.erasure.isal_library import MAX_CALL_BYTES, TABLE_BYTES, load_isal
from resilient_jax.erasure.kernel import Kernel, KernelName
from resilient_jax.erasure.matrix import Matrix

POINTER = "Q"
"""The type code of `array` for a pointer: 64 bits on every processor that ISA-L is built for."""


@final
class IsalKernel(Kernel):
    """ISA-L, called through ctypes, which releases the GIL: each of several threads may do a range of the bytes.

    Raises:
        KernelUnavailable: the library is not on this machine.
    """

    name = KernelName.ISAL

    def __init__(self) -> None:
        self._library = load_isal()
        self.description = f"ISA-L from {self._library.path}"
        # Few matrices are in use: the parity of a code, and those of a recovery.
        self._tables = functools.lru_cache(maxsize=64)(self._make_tables)

    def _multiply(self, matrix: Matrix, operands: Operands) -> None:
        tables, rows, columns = self._tables(matrix), len(matrix), len(matrix[0])
        for start in range(0, operands.length, MAX_CALL_BYTES):
            size = min(MAX_CALL_BYTES, operands.length - start)
            sources = _make_pointers(operands.source_addresses, start)
            destinations = _make_pointers(operands.destination_addresses, start)
            self._library.encode_data(
                size, columns, rows, tables, sources.buffer_info()[0], destinations.buffer_info()[0]
            )

    def _make_tables(self, matrix: Matrix) -> ctypes.Array[ctypes.c_char]:
        rows, columns = len(matrix), len(matrix[0])
        # 32 bytes of tables for each of the rows x columns coefficients; ISA-L reads the matrix row by row.
        tables = ctypes.create_string_buffer(TABLE_BYTES * rows * columns)
        self._library.init_tables(columns, rows, b"".join(matrix), tables)
        return tables


def _make_pointers(addresses: tuple[int, ...], start: int) -> "array.array[int]":
    """Return an array of C pointers. `array` makes one three times as fast as ctypes."""
    return array.array(POINTER, [address + start for address in addresses] if start else addresses)
