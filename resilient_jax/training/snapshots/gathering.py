"""Boxes of leaves out of the parts of all hosts: which bytes to read, in few reads, and where they go.

A read covers a stretch of one host's part. What lies between two wanted stretches is read along where it is short: the
block that it is in must be fetched and verified anyway.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from resilient_jax.errors import MessageError
from resilient_jax.ids import HostName
from resilient_jax.snapshot.manifest import BLOCK_BYTES, Manifest, Piece
from resilient_jax.training.snapshots.boxes import Box, intersect
from resilient_jax.training.snapshots.interfaces import PartReader

READ_BYTES: Final = 32 * 2**20
"""At most, for one read: enough for a reader to share it among survivors, little enough to have beside the state."""
GAP_BYTES: Final = BLOCK_BYTES
"""A longer stretch that nobody wants is left out."""


class Target(NamedTuple):
    """An array to be filled with a box of a leaf."""

    leaf: int
    box: Box
    data: np.ndarray


class _Want(NamedTuple):
    """A box of a piece that goes into a target, and the bytes of the part from its first to its last number."""

    start: int
    stop: int
    box: Box
    strides: tuple[int, ...]
    target: Target


class Gatherer:
    """Reads boxes from the parts of a snapshot. Holds one read in memory beside the targets."""

    def __init__(self, reader: PartReader, manifests: Mapping[HostName, Manifest]) -> None:
        self._reader = reader
        self._leaves = next(iter(manifests.values())).contents.leaves
        self._pieces: list[list[tuple[HostName, Piece]]] = [[] for _ in self._leaves]
        for host, manifest in sorted(manifests.items()):
            for piece in manifest.contents.pieces:
                self._pieces[piece.leaf].append((host, piece))

    def gather(self, targets: Sequence[Target]) -> None:
        """Fills all targets.

        Raises:
            MessageError: the manifests do not hold every number of a target exactly once.
        """
        wants: dict[HostName, list[_Want]] = {}
        for target in targets:
            found = 0
            for host, piece in self._pieces[target.leaf]:
                box = intersect(Box(piece.start, piece.stop), target.box)
                if box is not None and target.data.size:
                    found += box.size
                    wants.setdefault(host, []).extend(_split(box, piece, target))
            if found != target.data.size:
                raise MessageError(
                    f"the snapshot's manifests hold {found} of the {target.data.size} numbers of leaf "
                    f"{self._leaves[target.leaf].path} from {list(target.box.start)} to {list(target.box.stop)}, "
                    "expected each once; it was not taken by hosts that agreed"
                )
        for host in sorted(wants):
            for some in _merge(sorted(wants[host], key=lambda want: want[:2])):
                self._read(host, some)

    def _read(self, host: HostName, wants: Sequence[_Want]) -> None:
        start, stop = wants[0].start, max(want.stop for want in wants)
        if len(wants) == 1:
            place = _place_of(wants[0])
            if place.flags.c_contiguous and place.nbytes == stop - start:
                self._reader.read_into(host, start, place.reshape(-1).view(np.uint8).data)
                return
        taken = np.empty(stop - start, np.uint8)
        self._reader.read_into(host, start, taken.data)
        for want in wants:
            dtype = want.target.data.dtype
            found = np.ndarray(want.box.shape, dtype, taken.data, want.start - start, want.strides)
            np.copyto(_place_of(want), found)


def _place_of(want: _Want) -> np.ndarray:
    return want.target.data[(*want.box.within(want.target.box), ...)]


def _merge(wants: Iterable[_Want]) -> Iterator[list[_Want]]:
    """What one read gives at a time; takes them in order of their starts."""
    some: list[_Want] = []
    stop = 0
    for want in wants:
        if some and (want.start - stop > GAP_BYTES or want.stop - some[0].start > READ_BYTES):
            yield some
            some, stop = [], 0
        some.append(want)
        stop = max(stop, want.stop)
    if some:
        yield some


def _split(box: Box, piece: Piece, target: Target) -> Iterator[_Want]:
    itemsize = target.data.dtype.itemsize
    outer = Box(piece.start, piece.stop)
    strides = _strides(outer.shape, itemsize)
    for part in _split_box(box, strides, itemsize):
        first = sum(
            (start - origin) * stride
            for start, origin, stride in zip(part.start, outer.start, strides, strict=True)
        )
        start = piece.offset + first
        yield _Want(start, start + _span(part.shape, strides, itemsize), part, strides, target)


def _split_box(box: Box, strides: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Boxes that lie in a short stretch of the piece each, without long gaps."""
    shape = box.shape
    dim = next((dim for dim, length in enumerate(shape) if length > 1), None)
    if dim is None:
        yield box
        return
    # Of all gaps between wanted numbers, those between rows of the first dim are the longest.
    row = _span((*shape[:dim], 1, *shape[dim + 1 :]), strides, itemsize)
    has_gaps = strides[dim] - row > GAP_BYTES
    rows = 1 if has_gaps else max(1, READ_BYTES // strides[dim])
    for start in range(box.start[dim], box.stop[dim], rows):
        part = box.part(dim, start, min(start + rows, box.stop[dim]))
        if has_gaps or row > READ_BYTES:
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
    """Bytes from the first to the last number."""
    return sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + itemsize
