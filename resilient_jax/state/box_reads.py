"""Gathers boxes of leaves from whoever holds them, in few reads: the only way that a state gets into arrays.

A read covers a contiguous range of one host's part. Of a part in blocks a short gap between two requested ranges is
read, too, since its block must be fetched and verified anyway. If a host fails that others have copies of, they are
read for what is missing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from resilient_jax.errors import MessageError, PeerUnreachable
from resilient_jax.ids import HostName
from resilient_jax.snapshot.manifest import HeldPart, LeafSlice
from resilient_jax.snapshot.snapshot_reader import PartRead
from resilient_jax.snapshot.stripes import MAX_BLOCK_BYTES
from resilient_jax.state.index_box import IndexBox, contiguous_runs, intersect_boxes, subtract_box
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


def choose_source(
    holders: Sequence[HostName], own: HostName | None, loads: Mapping[HostName, int]
) -> HostName:
    """Return the host that something is read from: the reader itself if it is a holder, else the least loaded.

    Args:
        holders: the hosts that have it; of those with equal loads the first is chosen.
        own: the host that reads.
        loads: what each holder is to send already, in any unit; those without one have none.

    >>> choose_source(["a", "b", "c"], "d", {"a": 7, "b": 2, "c": 2})
    'b'
    """
    if own is not None and own in holders:
        return own
    return min(holders, key=lambda host: loads.get(host, 0))


class _Found(NamedTuple):
    """A box that is to be read from a slice of a host's part."""

    host: HostName
    piece: LeafSlice
    box: IndexBox


class BoxGatherer:
    """Reads boxes of a state.

    Attributes:
        example: one of the parts; steps, leaves and strings are the same in all.
    """

    def __init__(self, reader: PartReader) -> None:
        """Learn who holds what.

        Raises:
            MessageError: the parts of the hosts do not belong together.
            PeerUnreachable, SnapshotLost: no host has said what it holds.
        """
        self._reader = reader
        self._scratch = np.empty(0, np.uint8)
        self._loads: dict[HostName, int] = {}
        self._find_parts()

    def _find_parts(self) -> None:
        self._parts = self._reader.read_manifests()
        self.example = _check_agree(self._parts)
        self._pieces: list[list[tuple[HostName, LeafSlice]]] = [[] for _ in self.example.contents.leaves]
        for host, part in self._parts.items():
            for piece in part.contents.slices:
                self._pieces[piece.leaf].append((host, piece))

    def gather(self, targets: Sequence[ReadTarget]) -> None:
        """Fill all targets.

        Raises:
            MessageError: the parts of a snapshot do not list every element of a target exactly once.
            PeerUnreachable: an element is on none of the hosts that are left.
        """
        missing = list(targets)
        while missing:
            stretches = self._stretches(self._plan(missing))
            missing = [target for batch in _batches(stretches) for target in self._read(batch)]
            if missing:
                self._find_parts()

    def _plan(self, targets: Sequence[ReadTarget]) -> Mapping[HostName, list[_Want]]:
        wants: dict[HostName, list[_Want]] = {}
        for target in targets:
            if target.data.size:
                for found in self._choose(target) if self._reader.has_copies else self._find_all(target):
                    wants.setdefault(found.host, []).extend(_split(found.box, found.piece, target))
        return wants

    def _find(self, leaf: int, wanted: IndexBox) -> list[_Found]:
        return [
            _Found(host, piece, box)
            for host, piece in self._pieces[leaf]
            if (box := intersect_boxes(IndexBox(piece.start, piece.stop), wanted)) is not None
        ]

    def _find_all(self, target: ReadTarget) -> list[_Found]:
        """Return where a target's elements are in parts without copies."""
        found = self._find(target.leaf, target.box)
        num_found = sum(one.box.size for one in found)
        if num_found != target.data.size:
            raise MessageError(
                f"the snapshot's manifests have {num_found} of the {target.data.size} elements of "
                f"{self._name(target.leaf, target.box)}, expected each once; its hosts did not agree on a layout"
            )
        return found

    def _choose(self, target: ReadTarget) -> Iterator[_Found]:
        """Yield from where to read each box of a target, of which several hosts may have copies."""
        itemsize = target.data.dtype.itemsize
        # Cut where reads are cut, so that a large leaf comes from several hosts at once.
        missing = list(contiguous_runs(target.box, itemsize, MAX_READ_BYTES))
        while missing:
            wanted = missing.pop()
            found = self._find(target.leaf, wanted)
            if not found:
                raise PeerUnreachable(
                    f"{self._name(target.leaf, wanted)}: none of {', '.join(self._parts) or 'no host'} has it; a "
                    "snapshot may"
                )
            # Hosts may be sharded in different ways: the fewest reads are those of the largest boxes.
            largest = max(one.box.size for one in found)
            by_host = {one.host: one for one in found if one.box.size == largest}
            chosen = by_host[choose_source(list(by_host), self._reader.local_host, self._loads)]
            self._loads[chosen.host] = self._loads.get(chosen.host, 0) + largest * itemsize
            yield chosen
            missing += subtract_box(wanted, chosen.box)

    def _name(self, leaf: int, box: IndexBox) -> str:
        path = self.example.contents.leaves[leaf].path
        return f"leaf {path} from {list(box.start)} to {list(box.stop)}"

    def _stretches(self, wants: Mapping[HostName, list[_Want]]) -> Iterator["_Stretch"]:
        for host in sorted(wants):
            ordered = sorted(wants[host], key=_extent)
            part = self._parts[host]
            # Where a request costs little, and every copied byte something.
            if host == self._reader.local_host or not part.block_bytes:
                yield from (_Stretch(host, [want]) for want in ordered)
            else:
                for some in _merge(ordered):
                    stretch = _Stretch(host, some)
                    stretch.take_whole_blocks(part.block_bytes, part.part_bytes)
                    yield stretch

    def _read(self, batch: Sequence["_Stretch"]) -> list[ReadTarget]:
        """Read into contiguous targets directly, into the others through the scratch memory; return what failed."""
        reads, used = [], 0
        scattered: dict[int, np.ndarray] = {}
        for number, stretch in enumerate(batch):
            memory = stretch.find_place()
            if memory is None:
                if self._scratch.size < used + stretch.nbytes:
                    assert not used, "batches fit"
                    self._scratch = np.empty(max(SCRATCH_BYTES, stretch.nbytes), np.uint8)
                memory = self._scratch[used : used + stretch.nbytes]
                used += stretch.nbytes
                scattered[number] = memory
            reads.append(PartRead(stretch.host, stretch.start, memory.data))
        failed = set(self._reader.read_all(reads))
        for number, memory in scattered.items():
            if number not in failed:
                batch[number].hand_out(memory)
        return [target for number in failed for target in batch[number].list_targets()]


def _check_agree(parts: Mapping[HostName, HeldPart]) -> HeldPart:
    """Return the part of the host whose name sorts first, after checking that all are of one state."""
    names = sorted(parts)
    if not names:
        raise MessageError("the snapshot has no manifest, expected one for each host")
    first = parts[names[0]]
    for name in names[1:]:
        other = parts[name]
        if (other.id, other.contents.leaves, other.contents.strings) != (
            first.id,
            first.contents.leaves,
            first.contents.strings,
        ):
            raise MessageError(
                f"{name} has a part of snapshot {other.id} with {len(other.contents.leaves)} leaves, {names[0]} of "
                f"{first.id} with {len(first.contents.leaves)}; expected parts of one state"
            )
    return first


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

    def list_targets(self) -> list[ReadTarget]:
        """Return what the stretch was to fill."""
        return [ReadTarget(want.target.leaf, want.box, _place_of(want)) for want in self._wants]

    def hand_out(self, memory: np.ndarray) -> None:
        """Copy the boxes from the stretch's bytes into their targets."""
        for want in self._wants:
            dtype = want.target.data.dtype
            # With the strides of the slice: in the stretch, elements that were
            # not asked for stand between those of the box.
            found = np.ndarray(want.box.shape, dtype, memory.data, want.start - self.start, want.strides)
            np.copyto(_place_of(want), found)


def _batches(stretches: Iterable[_Stretch]) -> Iterator[list[_Stretch]]:
    """Group the stretches so that what is not read in place fits into the scratch memory."""
    batch: list[_Stretch] = []
    used = 0
    for stretch in stretches:
        scratch = 0 if stretch.find_place() is not None else stretch.nbytes
        if batch and used + scratch > SCRATCH_BYTES:
            yield batch
            batch, used = [], 0
        batch.append(stretch)
        used += scratch
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
