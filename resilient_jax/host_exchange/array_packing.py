"""Arrays as one buffer of bytes for a mail, and back as views of what has arrived."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from resilient_jax.errors import MessageError

ALIGNMENT_BYTES: Final = 64
"""Where each array begins: JAX on a CPU takes memory that is so aligned without a copy."""


def pack_arrays(arrays: Sequence[Any]) -> memoryview:
    """Return the bytes of some arrays, one after the other; of a single one without a copy."""
    views = [_view_bytes(np.asarray(array)) for array in arrays]
    if len(views) == 1:
        return views[0].data
    offsets, total = _compute_offsets([view.nbytes for view in views])
    packed = np.zeros(total, np.uint8)
    for view, offset in zip(views, offsets, strict=True):
        packed[offset : offset + view.nbytes] = view
    return packed.data


def unpack_arrays(data: memoryview, shapes: Sequence[Any], source: str) -> tuple[np.ndarray, ...]:
    """Return the arrays in a buffer, which they keep alive.

    Args:
        shapes: arrays, or their shapes and dtypes.
        source: says where the buffer came from.

    Raises:
        MessageError: the buffer has another size than these shapes need.
    """
    sizes = [math.prod(shape.shape) * np.dtype(shape.dtype).itemsize for shape in shapes]
    offsets, total = _compute_offsets(sizes)
    if data.nbytes != total:
        raise MessageError(
            f"{source}: found {data.nbytes} bytes, expected {total} for {len(shapes)} arrays. Run the same model on "
            "every host"
        )
    return tuple(
        np.frombuffer(data[offset : offset + size], np.dtype(shape.dtype)).reshape(shape.shape)
        for shape, offset, size in zip(shapes, offsets, sizes, strict=True)
    )


def _compute_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each array begins, and how long all are."""
    offsets, total = [], 0
    for size in sizes:
        total = -(-total // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(total)
        total += size
    return offsets, total


def _view_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
