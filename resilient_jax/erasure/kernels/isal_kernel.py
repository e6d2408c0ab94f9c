"""The kernel of choice: ISA-L's `ec_encode_data`, as fast as memory is read, and no byte of scratch."""

import array
import ctypes
import functools
from typing import final

from resilient_jax.erasure.buffers import Operands
from resilient_jax.erasure.isal_library import MAX_CALL_BYTES, TABLE_BYTES, load_isal
from resilient_jax.erasure.kernel import Kernel, KernelName
from resilient_jax.erasure.matrix import Matrix

ACCUMULATE_BLOCK_BYTES = 128 * 2**10
"""Range of an accumulation: ISA-L reads and writes the destinations once for each source, so they should stay
in cache."""


POINTER = "Q"
"""In the words of `array`: 64 bits, as the processors that ISA-L is built for have."""


@final
class IsalKernel(Kernel):
    """ISA-L, called through ctypes, which lets go of the GIL: threads may each do a range of the bytes.

    Raises:
        KernelUnavailable: the library is not on this machine.
    """

    name = KernelName.ISAL

    def __init__(self) -> None:
        self._library = load_isal()
        self.description = f"ISA-L from {self._library.path}"
        # The matrices in use are few: the parity of a code, and what a recovery needs.
        self._tables = functools.lru_cache(maxsize=64)(self._make_tables)

    def _multiply(self, matrix: Matrix, operands: Operands, *, accumulate: bool) -> None:
        step = ACCUMULATE_BLOCK_BYTES if accumulate else MAX_CALL_BYTES
        tables, rows, columns = self._tables(matrix), len(matrix), len(matrix[0])
        for start in range(0, operands.length, step):
            size = min(step, operands.length - start)
            sources = _make_pointers(operands.source_addresses, start)
            destinations = _make_pointers(operands.destination_addresses, start)
            where = destinations.buffer_info()[0]
            if accumulate:
                for j, source in enumerate(sources):
                    self._library.encode_data_update(size, columns, rows, j, tables, source, where)
            else:
                self._library.encode_data(size, columns, rows, tables, sources.buffer_info()[0], where)

    def _make_tables(self, matrix: Matrix) -> ctypes.Array[ctypes.c_char]:
        rows, columns = len(matrix), len(matrix[0])
        tables = ctypes.create_string_buffer(TABLE_BYTES * rows * columns)
        self._library.init_tables(columns, rows, b"".join(matrix), tables)
        return tables


def _make_pointers(addresses: tuple[int, ...], start: int) -> "array.array[int]":
    """An array of C pointers. Made three times as fast as one of ctypes."""
    return array.array(POINTER, [address + start for address in addresses] if start else addresses)
