"""Restores a state from whoever holds it, such as a snapshot, onto any mesh.

Each box that a device of this host needs is read into an array of its own, never mapped: a JAX array may share the
memory that it is made from, and must not share that of a slot, which the next snapshot overwrites. A host reads the
boxes of its own devices only, a batch of leaves at a time.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from resilient_jax.errors import StateError
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.state.box_reads import BoxGatherer, ReadTarget
from resilient_jax.state.flat_state import FlatLeaf, FlatState, ShardingRule
from resilient_jax.state.host_shards import HostShards
from resilient_jax.state.index_box import IndexBox, intersect_boxes, whole_box
from resilient_jax.state.interfaces import FailPointHook, PartReader, ignore_failpoint
from resilient_jax.state.leaf_kinds import HOST_KINDS
from resilient_jax.state.state_placement import EXPECTED_STATE
from resilient_jax.state.tree_match import MatchedLeaf, match_tree

Tree = TypeVar("Tree")
RESTORE_BATCH_BYTES: Final = 256 * 2**20
"""Of leaves that are read together, so that many small ones take few reads."""
MEMORY_ALIGNMENT: Final = 64
"""Bytes: JAX's CPU client adopts memory that is aligned like this, and copies other memory."""
SLAB_BYTES: Final = 32 * 2**20
"""The kernel backs large allocations with huge pages, which is seven times faster than small ones. A slab is freed with
the last array in it; after one training step all are."""


def restore_snapshot(
    abstract: Tree,
    reader: PartReader,
    sharding: ShardingRule | None,
    *,
    failpoint: FailPointHook = ignore_failpoint,
) -> tuple[int, Tree]:
    """Return the step of a snapshot and its state, in the tree of `abstract` and placed on the present mesh.

    Args:
        abstract: abstract tree as `make_abstract_state` returns it.
        sharding: sharding of each JAX array; None: this process's first device.
        failpoint: passes failpoints, where a test may stop this process.

    Raises:
        StateError: structure, shape or dtype differ; the message names the first leaves.
        MessageError: the parts of the hosts do not belong together.
        SnapshotLost: more is lost than parity covers.
    """
    gatherer = BoxGatherer(reader)
    first = gatherer.example
    for spec in first.contents.leaves:
        _check_dtype(spec)
    matched = match_tree(
        abstract,
        first.contents.leaves,
        first.contents.strings,
        sharding,
        source="the snapshot",
        expected=EXPECTED_STATE,
    )
    numbers = {spec.path: number for number, spec in enumerate(first.contents.leaves)}
    wanted = [_Wanted(numbers[leaf.spec.path], leaf) for leaf in matched.leaves]
    slabs = SlabAllocator()
    arrays: list[jax.Array | np.ndarray] = []
    for batch in _batches(wanted):
        gatherer.gather([target for leaf in batch for target in leaf.allocate(slabs)])
        arrays.extend(leaf.place() for leaf in batch)
        failpoint(FailPoint.DURING_RESTORE, first.id.step)
        jax.block_until_ready(arrays)  # so that host memory contains one batch at a time
    return first.id.step, matched.build(arrays)


def read_whole_state(reader: PartReader) -> FlatState:
    """Return all of a state, in host memory.

    Raises:
        StateError: a dtype is not known here.
        MessageError: the parts of the hosts do not belong together.
        PeerUnreachable: no host that is left has an element.
    """
    gatherer = BoxGatherer(reader)
    contents = gatherer.example.contents
    leaves: list[FlatLeaf] = []
    for spec in contents.leaves:
        _check_dtype(spec)
        array = np.empty(spec.shape, np.dtype(spec.dtype))
        leaves.append(FlatLeaf(path=spec.path, value=array, kind=spec.kind, key_impl=spec.key_impl))
    gatherer.gather(
        [
            ReadTarget(number, whole_box(array.shape), array)
            for number, leaf in enumerate(leaves)
            if isinstance(array := leaf.value, np.ndarray)
        ]
    )
    return FlatState(step=gatherer.example.id.step, leaves=tuple(leaves), strings=contents.strings)


def _check_dtype(spec: LeafSpec) -> None:
    try:
        np.dtype(spec.dtype)
    except TypeError as error:
        raise StateError(
            f"the state's leaf {spec.path} is of dtype {spec.dtype!r}, which this host's numpy and ml_dtypes do not "
            "know; install the versions of the hosts that have it"
        ) from error


class _Wanted:
    """A leaf that is being restored, and the memory that its boxes are read into."""

    def __init__(self, number: int, leaf: MatchedLeaf) -> None:
        self._number = number
        self._dtype = np.dtype(leaf.spec.dtype)
        sharding = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
        self._is_on_host = leaf.spec.kind in HOST_KINDS
        size = math.prod(leaf.spec.shape)
        self._share = (
            HostShards.of_vector(leaf.spec.shape, self._dtype, sharding)
            if leaf.is_raveled
            else HostShards(leaf.spec.shape, self._dtype, sharding)
        )
        self._stored = whole_box((size,) if leaf.is_raveled else leaf.spec.shape)
        self._buffers: dict[IndexBox, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Size of the leaf's boxes in this host's memory."""
        return self._share.num_elements * self._dtype.itemsize

    def allocate(self, slabs: "SlabAllocator") -> list[ReadTarget]:
        """Allocate memory for the leaf's boxes; return the targets to fill. Padding is zero, and in no snapshot."""
        self._buffers = {box: slabs.allocate(box.shape, self._dtype) for box in self._share.boxes}
        targets = []
        for box, buffer in self._buffers.items():
            stored = intersect_boxes(box, self._stored)
            if stored != box:
                buffer.fill(0)
            if stored is not None:
                # The ellipsis makes a view of a scalar, too.
                targets.append(ReadTarget(self._number, stored, buffer[(*stored.index_within(box), ...)]))
        return targets

    def place(self) -> jax.Array | np.ndarray:
        """Return the array made of the filled boxes, which it may share memory with; one in host memory alone."""
        if self._is_on_host:
            (array,) = self._buffers.values()
        else:
            array = self._share.assemble(self._buffers)
        self._buffers.clear()
        return array


class SlabAllocator:
    """Allocates memory that JAX can adopt without a copy; small arrays share a slab."""

    def __init__(self) -> None:
        self._slab = np.empty(0, np.uint8)
        self._used = 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an uninitialized array whose memory begins at a multiple of `MEMORY_ALIGNMENT`."""
        size = whole_box(shape).size * dtype.itemsize
        if size >= SLAB_BYTES:
            return _aligned(size).view(dtype).reshape(shape)
        if self._used + size > len(self._slab):
            self._slab, self._used = _aligned(SLAB_BYTES), 0
        memory = self._slab[self._used : self._used + size]
        self._used += -(-size // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
        return memory.view(dtype).reshape(shape)


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + MEMORY_ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % MEMORY_ALIGNMENT
    return memory[skip : skip + size]


def _batches(leaves: Sequence[_Wanted]) -> list[list[_Wanted]]:
    batches: list[list[_Wanted]] = []
    room = 0
    for leaf in leaves:
        if not batches or leaf.nbytes > room:
            batches.append([])
            room = RESTORE_BATCH_BYTES
        batches[-1].append(leaf)
        room -= leaf.nbytes
    return batches
