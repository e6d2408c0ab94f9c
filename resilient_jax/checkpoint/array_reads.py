"""The arrays of a checkpoint on their way to this host: which boxes its devices need, and what becomes of them.

Boxes come in batches, through one piece of memory that is used again and again: besides its share of the state a host
has a batch of it, and never an array of which it needs a part.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Sharding

from resilient_jax.checkpoint.stored_tree import PathKey, StoredBox, align_offset, view_array
from resilient_jax.state.host_shards import HostShards
from resilient_jax.state.index_box import whole_box

BATCH_BYTES: Final = 64 * 2**20
"""Of boxes that are read together: many small arrays take few orders. An array of which this host needs more comes
alone, as a whole share."""


class ArrayRead:
    """One array of a state.

    Attributes:
        pieces: what is to be read of it, once their place in memory is known.
    """

    def __init__(
        self,
        path: tuple[PathKey, ...],
        wanted: jax.ShapeDtypeStruct,
        sharding: Sharding | None,
        *,
        is_stored: bool,
    ) -> None:
        """`sharding`: where it shall lie; None: whole, in host memory. An array without numbers `is_stored` nowhere."""
        self._path = path
        self._shape, self._dtype = wanted.shape, np.dtype(wanted.dtype)
        self._share = HostShards(self._shape, sharding) if sharding is not None else None
        self._is_stored = is_stored
        self._boxes = self._share.boxes if self._share is not None else [whole_box(self._shape)]
        self.boxes: list[StoredBox] = []

    @property
    def nbytes(self) -> int:
        """That this host needs."""
        return sum(box.size for box in self._boxes) * self._dtype.itemsize

    def assign_offsets(self, offset: int) -> int:
        """Gives its boxes their places in memory from `offset` on; gives where they end."""
        self.boxes = []
        for box in self._boxes if self._is_stored else ():
            offset = align_offset(offset)
            self.boxes.append(StoredBox(path=self._path, dtype=str(self._dtype), box=box, offset=offset))
            offset += self.boxes[-1].nbytes
        return offset

    def build_array(self, memory: mmap.mmap) -> np.ndarray | jax.Array:
        """The array, of copies: the memory may be used again."""
        copies = {piece.box: np.array(view_array(piece, memory)) for piece in self.boxes}
        if not self._is_stored:
            copies = {box: np.zeros(box.shape, self._dtype) for box in self._boxes}
        return copies[whole_box(self._shape)] if self._share is None else self._share.assemble(copies)


def split_into_batches(arrays: Sequence[ArrayRead]) -> Iterator[list[ArrayRead]]:
    """Arrays in their order, in batches whose boxes have their places in memory."""
    batch: list[ArrayRead] = []
    end = 0
    for array in arrays:
        if batch and align_offset(end) + array.nbytes > BATCH_BYTES:
            yield batch
            batch, end = [], 0
        end = array.assign_offsets(end)
        batch.append(array)
    if batch:
        yield batch


def count_bytes(batch: Sequence[ArrayRead]) -> int:
    """Bytes of memory that a batch takes."""
    return max((piece.offset + piece.nbytes for array in batch for piece in array.boxes), default=0)


def is_empty(leaf: Any) -> bool:  # noqa: ANN401 - anything with a shape
    """Whether it has no numbers: then Orbax stores none."""
    return math.prod(leaf.shape) == 0
