"""The arrays of this host that contain a slice of a leaf, and their transfer off an accelerator."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from resilient_jax.errors import StateError
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.snapshot.manifest import LeafSlice
from resilient_jax.state.flat_state import FlatLeaf
from resilient_jax.state.index_box import IndexBox, box_from_index, intersect_boxes, whole_box


class CopySource(NamedTuple):
    """An array on one device, or in host memory, that contains a box of a leaf.

    Attributes:
        box: the box of the leaf that the array contains.
        wanted: the part of `box` that the task copies.
    """

    box: IndexBox
    wanted: IndexBox
    data: jax.Array | np.ndarray


class CopyTask(NamedTuple):
    """A slice of a leaf that is to be copied into the part.

    Attributes:
        box: the slice's box of the leaf.
        offset: bytes from the start of the part.
        sources: arrays whose disjoint `wanted` boxes cover `box`.
    """

    path: str
    box: IndexBox
    itemsize: int
    offset: int
    sources: tuple[CopySource, ...]

    @property
    def stop(self) -> int:
        """The offset after the slice's last byte."""
        return self.offset + self.box.size * self.itemsize


def plan_copies(leaves: Sequence[FlatLeaf], slices: Sequence[LeafSlice]) -> list[CopyTask]:
    """Return the copies that this host has to make, one for each slice.

    Raises:
        StateError: this host's arrays do not cover a slice, or an array was donated.
    """
    known: SourceCache = {}
    return [_plan(leaves[piece.leaf], piece, turn, known) for turn, piece in enumerate(slices)]


SourceCache = dict[
    tuple[Sharding, tuple[int, ...], IndexBox], list[tuple[IndexBox, IndexBox, tuple[int, ...]]]
]
"""(sharding, shape, slice) -> (shard's box, its wanted part, shards that have it); equal for the layers of a model."""


def _plan(leaf: FlatLeaf, piece: LeafSlice, turn: int, known: SourceCache) -> CopyTask:
    box = IndexBox(piece.start, piece.stop)
    sources = tuple(_find_sources(leaf, box, turn, known))
    # Distinct shards do not overlap, so equal numbers of elements mean that the slice is covered.
    covered = sum(source.wanted.size for source in sources)
    if covered != box.size:
        raise StateError(
            f"the state's leaf {leaf.path}: this host has {covered} of the {box.size} elements from {list(box.start)} "
            f"to {list(box.stop)} that it should copy; its sharding is not that of the snapshot layout. Keep "
            "each leaf's sharding from step to step"
        )
    return CopyTask(leaf.path, box, leaf.value.dtype.itemsize, piece.offset, sources)


def _find_sources(leaf: FlatLeaf, box: IndexBox, turn: int, known: SourceCache) -> list[CopySource]:
    """Return the arrays that cover a box. Equal shards are used in rotation, to balance the load of device links."""
    value = leaf.value
    if isinstance(value, np.ndarray):
        return [CopySource(whole_box(value.shape), box, value)]
    if value.is_deleted():
        raise StateError(
            f"the state's leaf {leaf.path} was donated before its snapshot was copied: wait for the copy first"
        )
    shards = value.addressable_shards
    key = (value.sharding, value.shape, box)
    if key not in known:
        holders: dict[tuple[IndexBox, IndexBox], tuple[int, ...]] = {}
        for number, shard in enumerate(shards):
            held = box_from_index(shard.index, value.shape)
            wanted = intersect_boxes(held, box)
            if wanted is not None:
                # Shards with the same box are copies of each other: any one will do.
                holders[held, wanted] = (*holders.get((held, wanted), ()), number)
        known[key] = [(*boxes, numbers) for boxes, numbers in holders.items()]
    return [
        CopySource(held, wanted, shards[numbers[turn % len(numbers)]].data)
        for held, wanted, numbers in known[key]
    ]


def is_on_accelerator(leaves: Sequence[FlatLeaf]) -> bool:
    """Return whether any leaf is in memory that the CPU cannot read."""
    return any(
        isinstance(leaf.value, jax.Array) and next(iter(leaf.value.sharding.device_set)).platform != "cpu"
        for leaf in leaves
    )


def start_host_transfer(tasks: Sequence[CopyTask]) -> list[CopyTask]:
    """Start the transfer to host memory; return the tasks with the arrays on the way, which are cut to the slices.

    Returns at once. The slicing programs are in the devices' queues, before everything that is dispatched later.
    """
    sent: list[list[CopySource]] = [[] for _ in tasks]
    to_cut: dict[Device, list[tuple[int, CopySource]]] = {}
    for number, task in enumerate(tasks):
        for source in task.sources:
            # This may change the order of a task's sources, which does not matter: their boxes are disjoint.
            if isinstance(source.data, np.ndarray) or source.wanted == source.box:
                sent[number].append(source)
            else:
                to_cut.setdefault(next(iter(source.data.devices())), []).append((number, source))
    for cuts in to_cut.values():
        arrays = [source.data for _, source in cuts]
        indices = tuple(_bounds(source.wanted, source.box) for _, source in cuts)
        for (number, source), data in zip(cuts, _cut_out(arrays, indices), strict=True):
            sent[number].append(CopySource(source.wanted, source.wanted, data))
    for sources in sent:
        for source in sources:
            if isinstance(source.data, jax.Array):
                source.data.copy_to_host_async()
    return [task._replace(sources=tuple(sources)) for task, sources in zip(tasks, sent, strict=True)]


def _bounds(box: IndexBox, outer: IndexBox) -> tuple[tuple[int, int], ...]:
    return tuple((piece.start, piece.stop) for piece in box.index_within(outer))


@functools.partial(jax.jit, static_argnums=1)
def _cut_out(arrays: list[jax.Array], indices: tuple[tuple[tuple[int, int], ...], ...]) -> list[jax.Array]:
    """Slice all arrays of a device by one program, which is compiled once for each state and partition."""
    return [
        jax.lax.slice(array, [start for start, _ in index], [stop for _, stop in index])
        for array, index in zip(arrays, indices, strict=True)
    ]
