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

from resilient_jax.checkpoint.stored_tree import Key, Piece, align, view
from resilient_jax.state.host_shards import HostShards
from resilient_jax.state.index_box import whole_box

BATCH_BYTES: Final = 64 * 2**20
"""Of boxes that are read together: many small arrays take few orders. An array of which this host needs more comes
alone, as a whole share."""


class Arriving:
    """One array of a state.

    Attributes:
        pieces: what is to be read of it, once their place in memory is known.
    """

    def __init__(
        self,
        path: tuple[Key, ...],
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
        self.pieces: list[Piece] = []

    @property
    def nbytes(self) -> int:
        """That this host needs."""
        return sum(box.size for box in self._boxes) * self._dtype.itemsize

    def lay_out(self, offset: int) -> int:
        """Gives its boxes their places in memory from `offset` on; gives where they end."""
        self.pieces = []
        for box in self._boxes if self._is_stored else ():
            offset = align(offset)
            self.pieces.append(Piece(path=self._path, dtype=str(self._dtype), box=box, offset=offset))
            offset += self.pieces[-1].nbytes
        return offset

    def place(self, memory: mmap.mmap) -> np.ndarray | jax.Array:
        """The array, of copies: the memory may be used again."""
        copies = {piece.box: np.array(view(piece, memory)) for piece in self.pieces}
        if not self._is_stored:
            copies = {box: np.zeros(box.shape, self._dtype) for box in self._boxes}
        return copies[whole_box(self._shape)] if self._share is None else self._share.assemble(copies)


def batches(arrays: Sequence[Arriving]) -> Iterator[list[Arriving]]:
    """Arrays in their order, in batches whose boxes have their places in memory."""
    batch: list[Arriving] = []
    end = 0
    for array in arrays:
        if batch and align(end) + array.nbytes > BATCH_BYTES:
            yield batch
            batch, end = [], 0
        end = array.lay_out(end)
        batch.append(array)
    if batch:
        yield batch


def size_of(batch: Sequence[Arriving]) -> int:
    """Bytes of memory that a batch takes."""
    return max((piece.offset + piece.nbytes for array in batch for piece in array.pieces), default=0)


def is_empty(leaf: Any) -> bool:  # noqa: ANN401 - anything with a shape
    """Whether it has no numbers: then Orbax stores none."""
    return math.prod(leaf.shape) == 0
