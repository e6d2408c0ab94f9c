"""The kernel of devices: XLA, on a GPU, or on the CPU of a process that runs jax anyway.

It computes by the bits of the matrix, with the formula of `numpy_kernel`. The matrix is an argument (masks of 0 and
255) and not a constant: every set of lost shards has another decoding matrix, and compiling takes longer than the
recovery. A program computes one row, because a program of several rows takes longer to compile and is no faster on
the CPU. So there is one program for each number of sources and each length, and lengths are rounded to few sizes.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from resilient_jax.erasure.buffers import Operands
from resilient_jax.erasure.errors import KernelUnavailable
from resilient_jax.erasure.galois_field import PRIMITIVE_POLYNOMIAL
from resilient_jax.erasure.kernel import Kernel, KernelName
from resilient_jax.erasure.matrix import Matrix

CHUNK_BYTES = 2**20
"""Columns of one call on the CPU: its results stay in cache until they are copied out."""
GPU_CHUNK_BYTES = 16 * 2**20
"""Columns of one call on a GPU: each launch and each transfer has a fixed cost."""
MIN_CHUNK_BYTES = 4096
"""A shorter remainder is padded to this, a longer one to the next power of two: at most nine sizes up to 1 MiB."""
MAX_SOURCES = 16
"""Sources of one program, which has 16 operations for each; more sources are added 16 at a time."""
BITS = 8
REDUCTION = PRIMITIVE_POLYNOMIAL & 0xFF
"""x^8 modulo the polynomial of the field."""

Device: TypeAlias = Any
"""`jax.Device`, which jax does not declare as a type for type checkers."""


@final
class XlaKernel(Kernel):
    """jax on one device.

    Construct it only after `jax.distributed.initialize`: the constructor starts jax's backends.

    Args:
        device: None: the first CPU device.

    Raises:
        KernelUnavailable: jax has no CPU device.
    """

    name = KernelName.XLA

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or _cpu()
        self._chunk_bytes = CHUNK_BYTES if self._device.platform == "cpu" else GPU_CHUNK_BYTES
        self.description = f"jax {jax.__version__} on {self._device.device_kind}"

    def _multiply(self, matrix: Matrix, operands: Operands) -> None:
        sources = [np.frombuffer(view, np.uint8) for view in operands.sources]
        destinations = [np.frombuffer(view, np.uint8) for view in operands.destinations]
        for start in range(0, operands.length, self._chunk_bytes):
            block = slice(start, min(start + self._chunk_bytes, operands.length))
            size = block.stop - start
            arrays = [self._put(source[block]) for source in sources]
            for destination, result in zip(destinations, multiply_arrays(matrix, arrays), strict=True):
                destination[block] = np.asarray(result)[:size]

    def _put(self, part: npt.NDArray[np.uint8]) -> jax.Array:
        """Return `part` on the device, padded to one of few sizes.

        The array may alias `part`: the caller reads the result before it returns.
        """
        padded_size = min(self._chunk_bytes, max(MIN_CHUNK_BYTES, 1 << (len(part) - 1).bit_length()))
        if len(part) < padded_size:
            part = np.concatenate([part, np.zeros(padded_size - len(part), np.uint8)])
        return jax.device_put(part, self._device, may_alias=True)


def _cpu() -> Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    # JAX_PLATFORMS leaves the CPU out.
    except RuntimeError as error:
        raise KernelUnavailable(f"jax has no CPU device here ({error}); add cpu to JAX_PLATFORMS") from error


def multiply_arrays(matrix: Matrix, sources: Sequence[jax.Array]) -> list[jax.Array]:
    """Return results[i] = sum_j matrix[i][j] * sources[j], for arrays that are on a device and stay there.

    Args:
        matrix: a row for each result, in each a byte for each source. At least one row and one column.
        sources: uint8[length] each, all on one device. View another type as bytes outside of jit: inside, the view
            halves the speed.

    Returns:
        uint8[length] for each row, on the same device, dispatched asynchronously.
    """
    return [_multiply_row(row, sources) for row in matrix]


def _multiply_row(row: bytes, sources: Sequence[jax.Array]) -> jax.Array:
    # The sum over j is a sum over tiles of 16 sources, since XOR is associative; each tile adds to `total`.
    total: jax.Array | None = None
    for left in range(0, len(sources), MAX_SOURCES):
        tile = slice(left, left + MAX_SOURCES)
        total = _multiply_tile(_make_bit_masks(row[tile]), tuple(sources[tile]), total)
    assert total is not None, "an empty row"
    return total


@functools.lru_cache(maxsize=256)
def _make_bit_masks(row: bytes) -> npt.NDArray[np.uint8]:
    """Return uint8[8, columns]: 255 where a bit of a coefficient is set, else 0, highest bit first."""
    # masks[7 - b, j] = 255 c[j]_b: an AND with the mask multiplies a source by bit b.
    bits = np.arange(BITS, dtype=np.uint8)[::-1, None]
    return np.where(np.frombuffer(row, np.uint8) >> bits & 1, np.uint8(0xFF), np.uint8(0))


@jax.jit
def _multiply_tile(masks: jax.Array, sources: tuple[jax.Array, ...], total: jax.Array | None) -> jax.Array:
    """Return total + row sources, uint8[length]; masks are uint8[8, columns], the others uint8[length] each."""
    # Horner's rule over the bits, highest first: result = 2 result + sum_j bit(coefficient j) source j.
    result = jnp.zeros_like(sources[0])
    for bit in range(BITS):
        result = _double(result)
        for column, source in enumerate(sources):
            result ^= source & masks[bit, column]
    return result if total is None else result ^ total


def _double(values: jax.Array) -> jax.Array:
    """Return 2 * values in the field: (v << 1) XOR (REDUCTION if bit 7 of v is set). uint8[length]."""
    return (values + values) ^ jnp.where(values >= 0x80, jnp.uint8(REDUCTION), jnp.uint8(0))
