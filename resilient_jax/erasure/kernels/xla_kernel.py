"""The kernel of devices: XLA, on a GPU or on the CPU where jax runs anyway.

By the bits of the matrix, as the numpy kernel. The matrix is an argument, as masks of 0 and 255, not a
constant: decoding meets a new matrix with each set of lost shards, and compiling takes longer than the
recovery. A program computes one
row: with several rows in one it takes longer to compile and is no faster on the CPU. So there is one program
for each number of sources and of bytes, and the bytes come in a few sizes.
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
"""Columns in one call on the CPU; its results stay in cache until they are copied out."""
GPU_CHUNK_BYTES = 16 * 2**20
"""Columns in one call on a GPU: a launch and a transfer have a price of their own."""
MIN_CHUNK_BYTES = 4096
"""A shorter rest is padded to this, a longer one to the next power of two: at most nine sizes up to 1 MiB."""
MAX_SOURCES = 16
"""Sources of one program, which has 16 operations for each; more are done 16 at a time."""
BITS = 8
REDUCTION = PRIMITIVE_POLYNOMIAL & 0xFF


Device: TypeAlias = Any
"""`jax.Device`, which jax does not show to type checkers as a type."""


@final
class XlaKernel(Kernel):
    """jax on one device.

    Making one starts jax's backends, so not before `jax.distributed.initialize`.

    Args:
        device: where to compute; the CPU unless said.

    Raises:
        KernelUnavailable: jax has no CPU device.
    """

    name = KernelName.XLA

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or _cpu()
        self._chunk_bytes = CHUNK_BYTES if self._device.platform == "cpu" else GPU_CHUNK_BYTES
        self.description = f"jax {jax.__version__} on {self._device.device_kind}"

    def _multiply(self, matrix: Matrix, operands: Operands, *, accumulate: bool) -> None:
        sources = [np.frombuffer(view, np.uint8) for view in operands.sources]
        destinations = [np.frombuffer(view, np.uint8) for view in operands.destinations]
        for start in range(0, operands.length, self._chunk_bytes):
            block = slice(start, min(start + self._chunk_bytes, operands.length))
            size = block.stop - start
            arrays = [self._put(source[block]) for source in sources]
            for destination, result in zip(destinations, multiply_arrays(matrix, arrays), strict=True):
                computed = np.asarray(result)[:size]
                if accumulate:
                    destination[block] ^= computed
                else:
                    destination[block] = computed

    def _put(self, part: npt.NDArray[np.uint8]) -> jax.Array:
        """On the device, padded to one of a few sizes. May alias `part`: the caller reads the result before it
        returns."""
        padded_size = min(self._chunk_bytes, max(MIN_CHUNK_BYTES, 1 << (len(part) - 1).bit_length()))
        if len(part) < padded_size:
            part = np.concatenate([part, np.zeros(padded_size - len(part), np.uint8)])
        return jax.device_put(part, self._device, may_alias=True)


def _cpu() -> Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:  # JAX_PLATFORMS leaves the CPU out
        raise KernelUnavailable(f"jax has no CPU device here ({error}); add cpu to JAX_PLATFORMS") from error


def multiply_arrays(matrix: Matrix, sources: Sequence[jax.Array]) -> list[jax.Array]:
    """results[i] = sum_j matrix[i][j] * sources[j], for arrays that are on a device and stay there.

    Args:
        matrix: a row for each result, in each a byte for each source. At least one row and one column.
        sources: uint8[length] each, all on one device. Another type is to be viewed as bytes before, outside of
            jit: inside it halves the speed.

    Returns:
        uint8[length] for each row, on the same device; not waited for.
    """
    return [_multiply_row(row, sources) for row in matrix]


def _multiply_row(row: bytes, sources: Sequence[jax.Array]) -> jax.Array:
    total: jax.Array | None = None
    for left in range(0, len(sources), MAX_SOURCES):
        tile = slice(left, left + MAX_SOURCES)
        total = _multiply_tile(_make_bit_masks(row[tile]), tuple(sources[tile]), total)
    assert total is not None, "an empty row"
    return total


@functools.lru_cache(maxsize=256)
def _make_bit_masks(row: bytes) -> npt.NDArray[np.uint8]:
    """uint8[8, columns]: 255 where the bit of the coefficient is set, highest bit first."""
    bits = np.arange(BITS, dtype=np.uint8)[::-1, None]
    return np.where(np.frombuffer(row, np.uint8) >> bits & 1, np.uint8(0xFF), np.uint8(0))


@jax.jit
def _multiply_tile(masks: jax.Array, sources: tuple[jax.Array, ...], total: jax.Array | None) -> jax.Array:
    """total + row sources; masks uint8[8, columns], the others uint8[length] each, to uint8[length]."""
    result = jnp.zeros_like(sources[0])
    for bit in range(BITS):
        result = _double(result)
        for column, source in enumerate(sources):
            result ^= source & masks[bit, column]
    return result if total is None else result ^ total


def _double(values: jax.Array) -> jax.Array:
    """2 * values in the field. uint8[length] to uint8[length]."""
    return (values + values) ^ jnp.where(values >= 0x80, jnp.uint8(REDUCTION), jnp.uint8(0))
