"""The copy of a state that is written while training goes on."""

import itertools
import mmap
import os
from typing import Any

import jax
import numpy as np

from resilient_jax.checkpoint.stored_tree import (
    StoredLeaf,
    Tree,
    allocate_memory,
    assign_offsets,
    flatten_tree,
    view_array,
)
from resilient_jax.errors import StateError
from resilient_jax.state.flat_state import is_random_key


class HostCopy:
    """Memory of ours with the numbers of a state in it; whoever has its descriptor can map it.

    It is kept from copy to copy: the first touch of fresh memory costs more than the copy itself.
    """

    def __init__(self) -> None:
        self._memory: tuple[int, mmap.mmap] | None = None

    def copy(self, state: Tree) -> tuple[list[StoredLeaf], int]:
        """Copies a state over the last one; gives where its leaves lie, and the descriptor, which stays ours.

        Args:
            state: arrays of which this process's devices have all; numbers.

        Raises:
            StateError: there is only a part of an array here.
        """
        flat = [(path, _raw(leaf)) for path, leaf in flatten_tree(state)]
        pieces = [_pieces(array) for _, array in flat]
        for _, piece in itertools.chain(*pieces):
            if isinstance(piece, jax.Array):
                piece.copy_to_host_async()
        leaves, nbytes = assign_offsets(flat)
        descriptor, memory = self._provide(nbytes)
        for leaf, of_leaf in zip(leaves, pieces, strict=True):
            if not leaf.empty_container:
                for index, piece in of_leaf:
                    view_array(leaf, memory)[index] = np.asarray(piece)
        return leaves, descriptor

    def free(self) -> None:
        """Gives the memory back, as soon as the other process has, too."""
        if self._memory is not None:
            os.close(self._memory[0])
            self._memory = None  # unmapped with the last array on it

    def _provide(self, nbytes: int) -> tuple[int, mmap.mmap]:
        if self._memory is not None and len(self._memory[1]) < nbytes:
            self.free()
        if self._memory is None:
            descriptor = allocate_memory(nbytes)
            self._memory = descriptor, mmap.mmap(descriptor, 0)
        return self._memory


def _raw(leaf: Any) -> Any:  # noqa: ANN401 - an array, a number, or an empty container
    """As it is written: a random key as its numbers."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf) if isinstance(leaf, int | float | complex) else leaf
    return jax.random.key_data(leaf) if is_random_key(leaf) else leaf


def _pieces(array: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401 - an array, or an empty container
    """What it consists of, each with its place in it; nothing twice."""
    if not isinstance(array, jax.Array):
        return [(..., array)]
    if array.is_fully_replicated:
        return [(..., array.addressable_shards[0].data)]
    if not array.is_fully_addressable:
        raise StateError(
            f"a checkpoint was asked for of a state with a part of an array here ({array.sharding}), expected all of "
            "it; gather it first"
        )
    return [(shard.index, shard.data) for shard in array.addressable_shards if shard.replica_id == 0]
