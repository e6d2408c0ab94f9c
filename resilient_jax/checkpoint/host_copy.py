"""The copy of a state that is written while training continues."""

import itertools
import mmap
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from resilient_jax.checkpoint.stored_tree import (
    LeafPart,
    StoredLeaf,
    Tree,
    allocate_memory,
    assign_offsets,
    flatten_tree,
    view_boxes,
)
from resilient_jax.errors import StateError
from resilient_jax.state.index_box import whole_box
from resilient_jax.state.leaf_kinds import keep_leaf


class HostCopy:
    """Memory with a copy of a state, which another process can map by its descriptor.

    The memory is kept from copy to copy: the first touch of fresh memory costs more than the copy itself.
    """

    def __init__(self) -> None:
        self._memory: tuple[int, mmap.mmap] | None = None

    def copy(self, parts: Sequence[LeafPart]) -> tuple[list[StoredLeaf], int]:
        """Copy leaves over the last copy; return them and the descriptor, which this object keeps.

        Args:
            parts: parts of a state, as `list_leaves` returns them.

        Raises:
            StateError: this process has only some shards of an array.
        """
        shards = [[_list_shards(array) for _, array in part.pieces] for part in parts]
        for _, shard in itertools.chain(*itertools.chain(*shards)):
            if isinstance(shard, jax.Array):
                # All transfers are under way before the first is waited for below.
                shard.copy_to_host_async()
        leaves, nbytes = assign_offsets(parts)
        descriptor, memory = self._provide(nbytes)
        for part, leaf, shards_of_leaf in zip(parts, leaves, shards, strict=True):
            for (_, array), view, found in zip(
                part.pieces, view_boxes(leaf, memory), shards_of_leaf, strict=False
            ):
                target = view.reshape(np.shape(array))
                for index, shard in found:
                    target[index] = np.asarray(shard)
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


def list_leaves(state: Tree) -> list[LeafPart]:
    """Return the leaves of a state, of which this process has all.

    Args:
        state: arrays of which this process's devices have all shards; or numbers.

    Raises:
        StateError: a leaf is of no kind that loads as it was saved.
    """
    flat = [(path, _keep(name, leaf)) for name, path, leaf in flatten_tree(state)]
    return [
        LeafPart(path, leaf, [(whole_box(leaf.shape), leaf)] if hasattr(leaf, "dtype") else [])
        for path, leaf in flat
    ]


def _keep(name: str, leaf: Any) -> Any:  # noqa: ANN401 - an array, a number, or an empty container
    """Return the array that is written for a leaf, or the empty container."""
    return keep_leaf(name, leaf).value if jax.tree_util.all_leaves([leaf]) else leaf


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
