"""The interface of a kernel: a matrix over GF(2^8) times a vector of byte buffers.

Parity and lost shards are both such a product, so a kernel needs no other operation.
`testing/erasure_conformance` is the contract; `erasure.kernels` has the implementations.
"""

import abc
import enum
from collections.abc import Sequence
from typing import final

from resilient_jax.erasure.buffers import Buffer, Operands, check_operands
from resilient_jax.erasure.errors import ErasureCodeError
from resilient_jax.erasure.matrix import Matrix


class KernelName(enum.StrEnum):
    """The available kernels, fastest first."""

    ISAL = "isal"
    NUMPY = "numpy"


class Kernel(abc.ABC):
    """A way to multiply. A kernel has no visible state, so threads may share one, on destinations of their own.

    Attributes:
        description: library, version and device, for people.
    """

    name: KernelName
    description: str

    @final
    def apply(self, matrix: Matrix, sources: Sequence[Buffer], destinations: Sequence[Buffer]) -> None:
        """Compute destinations[i] = sum_j matrix[i][j] * sources[j], on each column.

        Every kernel gives the same bytes. A process that is killed midway leaves the destinations in any state.

        Args:
            matrix: a row for each destination, in each a byte for each source.
            sources: at least one buffer, uint8[length] each; only read.
            destinations: writable buffers, uint8[length] each, apart from each other and from the sources.

        Raises:
            ErasureCodeError: matrix and buffers do not fit, see `check_operands`. Nothing was written.
        """
        # A row for each destination, a column for each source.
        shape = [len(row) for row in matrix]
        if shape != [len(sources)] * len(destinations):
            raise ErasureCodeError(
                f"matrix: found {len(matrix)} rows of lengths {sorted(set(shape))}, expected {len(destinations)} rows "
                f"(one for each destination) of length {len(sources)} (one for each source)"
            )
        operands = check_operands(sources, destinations)
        # An empty product writes nothing, and kernels need not handle it.
        if operands.length and matrix:
            self._multiply(tuple(matrix), operands)

    @abc.abstractmethod
    def _multiply(self, matrix: Matrix, operands: Operands) -> None:
        """Compute `apply` on checked operands, of length 1 or more and with 1 row or more."""
