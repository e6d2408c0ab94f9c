"""The copy of a state that is written while training continues."""

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
    view_leaf,
)
from resilient_jax.errors import StateError
from resilient_jax.state.flat_state import is_random_key


class HostCopy:
    """Memory with a copy of a state, which another process can map by its descriptor.

    The memory is kept from copy to copy: the first touch of fresh memory costs more than the copy itself.
    """

    def __init__(self) -> None:
        self._memory: tuple[int, mmap.mmap] | None = None

    def copy(self, state: Tree) -> tuple[list[StoredLeaf], int]:
        """Copy a state over the last one; return its leaves and the descriptor, which this object keeps.

        Args:
            state: arrays of which this process's devices have all shards; scalars.

        Raises:
            StateError: this process has only some shards of an array.
        """
        flat = [(path, _unwrap(leaf)) for path, leaf in flatten_tree(state)]
        shards = [_list_shards(array) for _, array in flat]
        for _, shard in itertools.chain(*shards):
            if isinstance(shard, jax.Array):
                # All transfers are under way before the first is waited for below.
                shard.copy_to_host_async()
        leaves, nbytes = assign_offsets(flat)
        descriptor, memory = self._provide(nbytes)
        for leaf, shards_of_leaf in zip(leaves, shards, strict=True):
            if leaf.spec is not None:
                for index, shard in shards_of_leaf:
                    view_leaf(leaf, memory)[index] = np.asarray(shard)
        return leaves, descriptor

    def free(self) -> None:
        """Release the memory. The kernel frees it when the other process has released it, too."""
        if self._memory is not None:
            os.close(self._memory[0])
            self._memory = None  # unmapped with the last array over it

    def _provide(self, nbytes: int) -> tuple[int, mmap.mmap]:
        if self._memory is not None and len(self._memory[1]) < nbytes:
            self.free()
        if self._memory is None:
            descriptor = allocate_memory(nbytes)
            self._memory = descriptor, mmap.mmap(descriptor, 0)
        return self._memory


def _unwrap(leaf: Any) -> Any:  # noqa: ANN401 - an array, a number, or an empty container
    """Return what is written for a leaf: of a random key its raw data."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf) if isinstance(leaf, int | float | complex) else leaf
    return jax.random.key_data(leaf) if is_random_key(leaf) else leaf


def _list_shards(array: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401 - an array, or an empty container
    """Return the distinct shards of an array, each with its index."""
    if not isinstance(array, jax.Array):
        return [(..., array)]
    if array.is_fully_replicated:
        return [(..., array.addressable_shards[0].data)]
    if not array.is_fully_addressable:
        raise StateError(
            f"a checkpoint was asked for of a state with some shards of an array here ({array.sharding}), expected all "
            "of them; gather it first"
        )
    return [(shard.index, shard.data) for shard in array.addressable_shards if shard.replica_id == 0]
