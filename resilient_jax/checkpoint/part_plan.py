"""Which boxes of which stored array each host writes, and the copy that is written while training continues.

The partition is that of snapshots (`state.state_partition`), of coarser boxes. Storage has the arrays of the whole
model, in their own shapes: of a raveled leaf a range of elements is some boxes, and a unit of a pipeline has layers of
arrays. The boxes of all hosts are known to each, so they agree on the grid of an array's chunks.
"""

import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from resilient_jax.checkpoint.stored_tree import (
    HeldBox,
    OrbaxPath,
    StoredLeaf,
    Tree,
    allocate_memory,
    flatten_tree,
    join_path,
    name_empty_container,
)
from resilient_jax.ids import HostName
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.sharding.raveled_array import is_raveled
from resilient_jax.snapshot.manifest import LeafSlice
from resilient_jax.state.copy_sources import CopyTask, is_on_accelerator, plan_copies, start_host_transfer
from resilient_jax.state.flat_state import FlatLeaf, flatten_state
from resilient_jax.state.index_box import IndexBox, cover_range
from resilient_jax.state.leaf_kinds import keep_leaf
from resilient_jax.state.part_copy import copy_into_part
from resilient_jax.state.state_partition import HostOf, partition_state


class LeafPlace(NamedTuple):
    """Where the elements of a leaf of a state are in the arrays of a checkpoint.

    Attributes:
        name: path of the array, as `keystr` writes it.
        rows: rows of the array that the leaf has; None: all.
        is_row: the leaf is one row, whose dim it lacks.
    """

    name: str
    rows: tuple[int, ...] | None = None
    is_row: bool = False

    def list_boxes(self, leaf: FlatLeaf, start: tuple[int, ...], stop: tuple[int, ...]) -> Iterator[IndexBox]:
        """Yield the boxes of the array that a box of the leaf is, in C order."""
        if leaf.raveled_shape is not None:
            yield from cover_range(leaf.raveled_shape, start[0], stop[0])
        elif self.rows is None:
            yield IndexBox(start, stop)
        elif self.is_row:
            yield IndexBox((self.rows[0], *start), (self.rows[0] + 1, *stop))
        else:
            for first, last in _list_runs(self.rows[start[0] : stop[0]]):
                yield IndexBox((first, *start[1:]), (last + 1, *stop[1:]))


class StoredState(NamedTuple):
    """A state as checkpoints have it.

    Attributes:
        tree: the tree of the arrays, or of their shapes.
        leaves: leaves that hosts have, in the same order on each.
        places: where each leaf is in the arrays.
    """

    tree: Tree
    leaves: Sequence[FlatLeaf]
    places: Sequence[LeafPlace]


class HostPart(NamedTuple):
    """What this host writes of one state.

    Attributes:
        leaves: arrays of which it has boxes; on the first host all arrays and containers.
        tasks: the copies into memory of `nbytes`.
    """

    leaves: list[StoredLeaf]
    tasks: list[CopyTask]
    nbytes: int


class PartPlan:
    """The parts of all states of one structure.

    Args:
        hosts: hosts of the generation, in the same order on each.
    """

    def __init__(
        self, state: StoredState, host: HostName, host_of: HostOf, hosts: Sequence[HostName]
    ) -> None:
        partition = partition_state(state.leaves, host_of, hosts, is_coarse=True)
        self._slices = partition.slices[host]
        self._nbytes = partition.part_bytes[host]
        boxes: dict[str, list[IndexBox]] = {place.name: [] for place in state.places}
        for piece in (piece for slices in partition.slices.values() for piece in slices):
            place = state.places[piece.leaf]
            boxes[place.name] += place.list_boxes(state.leaves[piece.leaf], piece.start, piece.stop)
        held = _list_held(state, self._slices)
        first = {
            place.name: leaf
            for leaf, place in zip(reversed(state.leaves), reversed(state.places), strict=True)
        }
        stored = (
            _describe(name, path, node, first.get(name), boxes.get(name, ()), held.get(name, ()))
            for name, path, node in flatten_tree(state.tree)
        )
        self._leaves = [leaf for leaf in stored if leaf.boxes or host == hosts[0]]

    def make_part(self, leaves: Sequence[FlatLeaf]) -> HostPart:
        """Return this host's part of a state. Off an accelerator its transfer has begun."""
        tasks = plan_copies(leaves, self._slices)
        if is_on_accelerator(leaves):
            tasks = start_host_transfer(tasks)
        return HostPart(self._leaves, tasks, self._nbytes)


class HostCopy:
    """Memory with a copy of this host's part of a state, which another process can map by its descriptor.

    The memory is kept from copy to copy: the first touch of fresh memory costs more than the copy itself.
    """

    def __init__(self) -> None:
        self._memory: tuple[int, mmap.mmap] | None = None

    def copy(self, part: HostPart) -> int:
        """Copy a part over the last copy; return the descriptor, which this object keeps."""
        descriptor, memory = self._provide(part.nbytes)
        copy_into_part(memoryview(memory), part.tasks, lambda: None)
        return descriptor

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


def describe_state(tree: Tree) -> StoredState:
    """Return a state whose leaves are the arrays of its checkpoints, each with the same path.

    Raises:
        StateError: a leaf is of no kind that loads as it was saved, or was deleted (donated).
    """
    leaves = flatten_state(0, tree).leaves
    whole = jax.tree.map(
        lambda node: jax.ShapeDtypeStruct(node.shape, node.dtype) if is_raveled(node) else node,
        tree,
        is_leaf=is_raveled,
    )
    return StoredState(whole, leaves, [LeafPlace(leaf.path) for leaf in leaves])


def _list_held(state: StoredState, slices: Sequence[LeafSlice]) -> Mapping[str, list[HeldBox]]:
    """Return the boxes of each array that this host writes, with their offsets in its memory."""
    held: dict[str, list[HeldBox]] = {}
    for piece in slices:
        leaf, place = state.leaves[piece.leaf], state.places[piece.leaf]
        offset = piece.offset
        for box in place.list_boxes(leaf, piece.start, piece.stop):
            held.setdefault(place.name, []).append(HeldBox(box, offset))
            offset += box.size * leaf.value.dtype.itemsize
    return held


def _describe(
    name: str,
    path: OrbaxPath,
    node: Any,  # noqa: ANN401 - an array, or an empty container
    leaf: FlatLeaf | None,
    boxes: Sequence[IndexBox],
    held: Sequence[HeldBox],
) -> StoredLeaf:
    """Return an array, or an empty container, as it is stored."""
    if leaf is None and jax.tree_util.all_leaves([node]):
        keep_leaf(name, node)  # refuses a string
    if leaf is None:
        return StoredLeaf(path=path, empty_container=name_empty_container(node))
    # Of a random key that of its raw data, of a stack over layers that of the whole.
    shape = node.shape if leaf.key_impl is None and hasattr(node, "shape") else leaf.shape
    if math.prod(shape) == 0:
        return StoredLeaf(path=path, empty_container="none")
    spec = LeafSpec(join_path(path), leaf.value.dtype.name, tuple(shape))
    return StoredLeaf(path=path, spec=spec, boxes=tuple(held), grid=_find_grid(spec.shape, boxes))


def _find_grid(shape: tuple[int, ...], boxes: Sequence[IndexBox]) -> tuple[int, ...]:
    """Return the greatest lengths at whose multiples all boxes begin and end, but for the end of the array."""
    return tuple(
        math.gcd(*{edge for box in boxes for edge in (box.start[dim], box.stop[dim]) if edge < length})
        or length
        for dim, length in enumerate(shape)
    )


def _list_runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last row of each run of consecutive rows."""
    first = 0
    for place, row in enumerate(rows):
        if place + 1 == len(rows) or rows[place + 1] != row + 1:
            yield rows[first], row
            first = place + 1
