"""Gathers boxes of leaves from the parts of all hosts, in few reads.

A read covers a contiguous range of one host's part. A short gap between two requested ranges is read, too, since its
block must be fetched and verified anyway.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from resilient_jax.errors import MessageError
from resilient_jax.ids import HostName
from resilient_jax.snapshot.manifest import LeafSlice, PartManifest
from resilient_jax.snapshot.snapshot_reader import PartRead
from resilient_jax.snapshot.stripes import MAX_BLOCK_BYTES
from resilient_jax.state.index_box import IndexBox, intersect_boxes
from resilient_jax.state.interfaces import PartReader

MAX_READ_BYTES: Final = 32 * 2**20
"""Of one read."""
SCRATCH_BYTES: Final = 2 * MAX_READ_BYTES
"""Memory beside the state, reused for all reads: enough for a reader to have several in flight."""
EXACT_READ_BYTES: Final = 16 * MAX_BLOCK_BYTES
"""From this size on a read is not extended to complete blocks: the partial blocks at its ends no longer matter."""
MAX_GAP_BYTES: Final = MAX_BLOCK_BYTES
"""A longer stretch between two requested ranges is not read."""


class ReadTarget(NamedTuple):
    """An array to be filled with a box of a leaf."""

    leaf: int
    box: IndexBox
    data: np.ndarray


class _Want(NamedTuple):
    """A box of a slice that goes into a target, and the range of the part from its first to its last element."""

    start: int
    stop: int
    box: IndexBox
    strides: tuple[int, ...]
    target: ReadTarget


class BoxGatherer:
    """Reads boxes from the parts of a snapshot."""

    def __init__(self, reader: PartReader, manifests: Mapping[HostName, PartManifest]) -> None:
        self._reader = reader
        self._manifests = manifests
        self._scratch = np.empty(0, np.uint8)
        self._leaves = next(iter(manifests.values())).contents.leaves
        self._pieces: list[list[tuple[HostName, LeafSlice]]] = [[] for _ in self._leaves]
        for host, manifest in sorted(manifests.items()):
            for piece in manifest.contents.slices:
                self._pieces[piece.leaf].append((host, piece))

    def gather(self, targets: Sequence[ReadTarget]) -> None:
        """Fill all targets.

        Raises:
            MessageError: the manifests do not list every element of a target exactly once.
        """
        wants: dict[HostName, list[_Want]] = {}
        for target in targets:
            found = 0
            for host, piece in self._pieces[target.leaf]:
                box = intersect_boxes(IndexBox(piece.start, piece.stop), target.box)
                if box is not None and target.data.size:
                    found += box.size
                    wants.setdefault(host, []).extend(_split(box, piece, target))
            if found != target.data.size:
                raise MessageError(
                    f"the snapshot's manifests have {found} of the {target.data.size} elements of leaf "
                    f"{self._leaves[target.leaf].path} from {list(target.box.start)} to {list(target.box.stop)}, "
                    "expected each once; its hosts did not agree on a layout"
                )
        for batch in _batches(self._stretches(wants)):
            self._read(batch)

    def _stretches(self, wants: Mapping[HostName, list[_Want]]) -> Iterator["_Stretch"]:
        for host in sorted(wants):
            ordered = sorted(wants[host], key=_extent)
            if host == self._reader.local_host:  # there a request costs nothing, but every copied byte does
                yield from (_Stretch(host, [want]) for want in ordered)
            else:
                manifest = self._manifests[host]
                for some in _merge(ordered):
                    stretch = _Stretch(host, some)
                    stretch.take_whole_blocks(manifest.block_bytes, manifest.part_bytes)
                    yield stretch

    def _read(self, batch: Sequence["_Stretch"]) -> None:
        """Read into contiguous targets directly, into the others through the scratch memory."""
        reads, used = [], 0
        scattered: list[tuple[_Stretch, np.ndarray]] = []
        for stretch in batch:
            memory = stretch.find_place()
            if memory is None:
                if self._scratch.size < used + stretch.nbytes:
                    assert not used, "batches fit"
                    self._scratch = np.empty(max(SCRATCH_BYTES, stretch.nbytes), np.uint8)
                memory = self._scratch[used : used + stretch.nbytes]
                used += stretch.nbytes
                scattered.append((stretch, memory))
            reads.append(PartRead(stretch.host, stretch.start, memory.data))
        self._reader.read_all(reads)
        for stretch, memory in scattered:
            stretch.hand_out(memory)


class _Stretch:
    """A contiguous range of a part that is read by one request, for one or more boxes."""

    def __init__(self, host: HostName, wants: Sequence[_Want]) -> None:
        self.host = host
        self.start = wants[0].start
        self.nbytes = max(want.stop for want in wants) - self.start
        self._wants = wants
        self._is_exact = True

    def take_whole_blocks(self, block_bytes: int, part_bytes: int) -> None:
        """Extend a short stretch to complete blocks.

        A block must be fetched and verified completely anyway; partial ones would be another request at either end.
        """
        if self.nbytes < EXACT_READ_BYTES:
            stop = min(-(-(self.start + self.nbytes) // block_bytes) * block_bytes, part_bytes)
            self._is_exact = self.start % block_bytes == 0 and stop == self.start + self.nbytes
            self.start -= self.start % block_bytes
            self.nbytes = stop - self.start

    def find_place(self) -> np.ndarray | None:
        """Return the target's memory if the stretch can be read into it directly, else None."""
        if len(self._wants) > 1 or not self._is_exact:
            return None
        place = _place_of(self._wants[0])
        if not place.flags.c_contiguous or place.nbytes != self.nbytes:
            return None
        return place.reshape(-1).view(np.uint8)

    def hand_out(self, memory: np.ndarray) -> None:
        """Copy the boxes from the stretch's bytes into their targets."""
        for want in self._wants:
            dtype = want.target.data.dtype
            # With the strides of the slice: in the stretch, elements that were
            # not asked for stand between those of the box.
            found = np.ndarray(want.box.shape, dtype, memory.data, want.start - self.start, want.strides)
            np.copyto(_place_of(want), found)


def _batches(stretches: Iterable[_Stretch]) -> Iterator[list[_Stretch]]:
    """Group the stretches so that each batch fits into the scratch memory even if none is read in place."""
    batch: list[_Stretch] = []
    used = 0
    for stretch in stretches:
        if batch and used + stretch.nbytes > SCRATCH_BYTES:
            yield batch
            batch, used = [], 0
        batch.append(stretch)
        used += stretch.nbytes
    if batch:
        yield batch


def _extent(want: _Want) -> tuple[int, int]:
    return want[:2]


def _place_of(want: _Want) -> np.ndarray:
    return want.target.data[(*want.box.index_within(want.target.box), ...)]


def _merge(wants: Iterable[_Want]) -> Iterator[list[_Want]]:
    """Group boxes, which are sorted by their starts, so that one read covers each group."""
    some: list[_Want] = []
    stop = 0
    for want in wants:
        if some and (want.start - stop > MAX_GAP_BYTES or want.stop - some[0].start > MAX_READ_BYTES):
            yield some
            some, stop = [], 0
        some.append(want)
        stop = max(stop, want.stop)
    if some:
        yield some


def _split(box: IndexBox, piece: LeafSlice, target: ReadTarget) -> Iterator[_Want]:
    itemsize = target.data.dtype.itemsize
    outer = IndexBox(piece.start, piece.stop)
    strides = _strides(outer.shape, itemsize)
    for part in _split_box(box, strides, itemsize):
        # Offset of the first element in the slice, which is in C order: sum
        # of (index - first index of the slice) x stride.
        first = sum(
            (start - origin) * stride
            for start, origin, stride in zip(part.start, outer.start, strides, strict=True)
        )
        start = piece.offset + first
        yield _Want(start, start + _span(part.shape, strides, itemsize), part, strides, target)


def _split_box(box: IndexBox, strides: Sequence[int], itemsize: int) -> Iterator[IndexBox]:
    """Split a box so that each part covers a short stretch of the slice, without long gaps."""
    shape = box.shape
    dim = next((dim for dim, length in enumerate(shape) if length > 1), None)
    if dim is None:
        yield box
        return
    # Of all gaps between wanted elements, those between rows of the first dim are the longest.
    row = _span((*shape[:dim], 1, *shape[dim + 1 :]), strides, itemsize)
    has_gaps = strides[dim] - row > MAX_GAP_BYTES
    rows = 1 if has_gaps else max(1, MAX_READ_BYTES // strides[dim])
    for start in range(box.start[dim], box.stop[dim], rows):
        part = box.narrow(dim, start, min(start + rows, box.stop[dim]))
        if has_gaps or row > MAX_READ_BYTES:
            yield from _split_box(part, strides, itemsize)
        else:
            yield part


def _strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = []
    for length in reversed(shape):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))


def _span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the number of bytes from the first element to the end of the last one."""
    return sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + itemsize
