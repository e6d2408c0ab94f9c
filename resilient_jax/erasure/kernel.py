"""What does the work: a matrix over GF(2^8) times a vector of byte buffers.

Everything that the code computes (parity, lost shards, changes of parity, syndromes) is one such product, so
this is all that a kernel has to be able to do. `testing/erasure_conformance` is its contract; `erasure.kernels`
has the kernels.
"""

import abc
import enum
from collections.abc import Sequence
from typing import final

from resilient_jax.erasure.buffers import Buffer, Operands, check_operands
from resilient_jax.erasure.errors import ErasureCodeError
from resilient_jax.erasure.matrix import Matrix


class KernelName(enum.StrEnum):
    """The kernels there are, fastest first."""

    ISAL = "isal"
    XLA = "xla"
    NUMPY = "numpy"


class Kernel(abc.ABC):
    """A way to multiply. Has no state that can be seen, so threads may share one, on destinations of their own.

    Attributes:
        name: which of the kernels.
        description: what it runs on, for people: library, version, device.
    """

    name: KernelName
    description: str

    @final
    def apply(
        self,
        matrix: Matrix,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        *,
        accumulate: bool = False,
    ) -> None:
        """destinations[i] = sum_j matrix[i][j] * sources[j], on each column.

        The result is the same bytes whatever the kernel. A process that is killed midway leaves the destinations in
        any state.

        Args:
            matrix: a row for each destination, in each a byte for each source.
            sources: buffers of bytes, uint8[length] each; only read. At least one.
            destinations: writable buffers, uint8[length] each, apart from each other and from the sources.
            accumulate: add the result to what the destinations hold. That is how parity is built of shards that
                arrive one by one, and how it follows a change.

        Raises:
            ErasureCodeError: matrix and buffers do not fit, see `check_operands`. Nothing was written.
        """
        shape = [len(row) for row in matrix]
        if shape != [len(sources)] * len(destinations):
            raise ErasureCodeError(
                f"matrix: found {len(matrix)} rows of lengths {sorted(set(shape))}, expected {len(destinations)} rows "
                f"(one for each destination) of length {len(sources)} (one for each source)"
            )
        operands = check_operands(sources, destinations)
        if operands.length and matrix:
            self._multiply(tuple(matrix), operands, accumulate=accumulate)

    @abc.abstractmethod
    def _multiply(self, matrix: Matrix, operands: Operands, *, accumulate: bool) -> None:
        """`apply` on operands that are checked, of length 1 or more, with 1 row or more."""
