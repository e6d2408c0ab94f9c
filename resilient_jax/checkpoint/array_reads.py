"""What this host reads of a checkpoint: of each array the boxes that its devices need.

Boxes are read in batches into one piece of memory that is reused. Besides its shards of the state a host has one
batch in memory, and never all of an array of which its devices need a part.
"""

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import jax
import msgspec
import numpy as np

from resilient_jax.checkpoint.stored_tree import StoredBox, Tree, align_offset, format_orbax_path, view_box
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.state.flat_state import ShardingRule
from resilient_jax.state.host_shards import HostShards
from resilient_jax.state.index_box import IndexBox, cover_range, whole_box
from resilient_jax.state.tree_match import MatchedLeaf, MatchedTree, list_leaf_specs, match_tree

BATCH_BYTES: Final = 64 * 2**20
"""Bytes of boxes that are read together, so that many small arrays take few requests. An array of which this host needs
more is read alone, in one request."""
EXPECTED_CHECKPOINT: Final = (
    "the state of this model and optimizer. Train with the recipe that saved it, or use another directory"
)
"""What a `StateError` expects and advises."""


class ArrayRead:
    """One array of a state that is being read.

    Attributes:
        boxes: boxes to read, once their offsets in memory are assigned.
    """

    def __init__(self, leaf: MatchedLeaf) -> None:
        """Place the array by its sharding; None: all of it in host memory. One without elements is not stored."""
        spec, self._dtype = leaf.spec, np.dtype(leaf.spec.dtype)
        self._spec, self._is_raveled = spec, leaf.is_raveled and leaf.sharding is not None
        size = math.prod(spec.shape)
        self._shards: HostShards | None = None
        if leaf.sharding is not None:
            self._shards = (
                HostShards.of_vector(spec.shape, self._dtype, leaf.sharding)
                if leaf.is_raveled
                else HostShards(spec.shape, self._dtype, leaf.sharding)
            )
        wanted = self._shards.boxes if self._shards is not None else [whole_box(spec.shape)]
        self._parts: dict[IndexBox, list[IndexBox]] = {
            # Of a raveled array a device needs a range, which is several boxes of the stored array.
            box: list(cover_range(spec.shape, box.start[0], min(box.stop[0], size)))
            if self._is_raveled
            else [box]
            for box in wanted
        }
        self.boxes: list[StoredBox] = []

    @property
    def nbytes(self) -> int:
        """Bytes that this host needs."""
        return sum(box.size for box in self._list_boxes()) * self._dtype.itemsize

    def assign_offsets(self, offset: int) -> int:
        """Assign the boxes their offsets in memory, from `offset` on; return the end of the last."""
        self.boxes = []
        for box in () if _is_empty(self._spec) else self._list_boxes():
            self.boxes.append(StoredBox(spec=self._spec, box=box, offset=align_offset(offset)))
            offset = self.boxes[-1].offset + self.boxes[-1].nbytes
        return offset

    def build_array(self, memory: mmap.mmap) -> np.ndarray | jax.Array:
        """Return the array, or the vector of a raveled one, of copies: the memory may be reused."""
        found = {stored.box: view_box(stored, memory) for stored in self.boxes}
        copies = {box: self._copy_part(box, parts, found) for box, parts in self._parts.items()}
        return copies[whole_box(self._spec.shape)] if self._shards is None else self._shards.assemble(copies)

    def _list_boxes(self) -> list[IndexBox]:
        return [box for parts in self._parts.values() for box in parts]

    def _copy_part(
        self, box: IndexBox, parts: Sequence[IndexBox], found: Mapping[IndexBox, np.ndarray]
    ) -> np.ndarray:
        if _is_empty(self._spec):
            return np.zeros(box.shape, self._dtype)
        if not self._is_raveled:
            return np.array(found[box])
        vector = np.zeros(box.shape, self._dtype)  # padding stays zero
        end = 0
        for part in parts:
            vector[end : end + part.size] = found[part].reshape(-1)
            end += part.size
        return vector


def plan_reads(
    stored: Sequence[LeafSpec], abstract: Tree, sharding: ShardingRule | None, folder: Path
) -> tuple[MatchedTree[Tree], list[ArrayRead]]:
    """Return the wanted tree, and what to read for each of its leaves.

    Args:
        abstract: tree of the state's shapes.
        sharding: sharding of each leaf; None: leaves in host memory.

    Raises:
        StateError: the checkpoint is of another state; names leaves.
    """
    wanted = {spec.path: spec for spec in list_leaf_specs(abstract, format_orbax_path)}
    # A checkpoint stores neither arrays without elements, nor that uint32[2] is the data of a random key, nor that a
    # leaf is a Python number or weakly typed.
    found = [spec for spec in wanted.values() if _is_empty(spec)]
    for spec in stored:
        like = wanted.get(spec.path, spec)
        found.append(msgspec.structs.replace(spec, key_impl=like.key_impl, kind=like.kind))
    matched = match_tree(
        abstract,
        found,
        {},
        sharding,
        source=f"the checkpoint {folder}",
        expected=EXPECTED_CHECKPOINT,
        format_path=format_orbax_path,
        is_initial=True,
    )
    return matched, [ArrayRead(leaf) for leaf in matched.leaves]


def split_into_batches(arrays: Sequence[ArrayRead]) -> Iterator[list[ArrayRead]]:
    """Yield the arrays in their order, in batches whose boxes have their offsets in memory."""
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
    """Return how many bytes of memory a batch takes."""
    return max((box.offset + box.nbytes for array in batch for box in array.boxes), default=0)


def _is_empty(spec: LeafSpec) -> bool:
    return math.prod(spec.shape) == 0
