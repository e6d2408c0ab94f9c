"""Boxes of array indices, which shards, slices and reads of a leaf cover."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

MAX_ROW_BYTES: Final = 256 * 2**10
"""A box may be cut between rows of up to this size; larger rows would make the parts of hosts too unequal."""
MIN_COARSE_BYTES: Final = 64 * 2**10
"""A part of a box that is written to storage is not smaller: each costs a chunk."""
COARSE_UNITS: Final = 32
"""Such a part has at least so many units of rows, at whose multiples it ends."""


class IndexBox(NamedTuple):
    """All indices from `start` up to `stop`, exclusive, in each dim. Without dims: the one element of a scalar."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of the box in each dim."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    def index_within(self, outer: "IndexBox") -> tuple[slice, ...]:
        """Return the index of this box in an array that has the elements of `outer`."""
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.start, self.stop, outer.start, strict=True)
        )

    def narrow(self, dim: int, start: int, stop: int) -> "IndexBox":
        """Return the rows from `start` to `stop` of the box along a dim, both as indices of the leaf."""
        return IndexBox(_put(self.start, dim, start), _put(self.stop, dim, stop))


def whole_box(shape: Sequence[int]) -> IndexBox:
    """Return the box of a complete array."""
    return IndexBox((0,) * len(shape), tuple(shape))


def box_from_index(index: Sequence[slice], shape: Sequence[int]) -> IndexBox:
    """Return the box that JAX represents as a tuple of slices."""
    bounds = [piece.indices(length)[:2] for piece, length in zip(index, shape, strict=True)]
    return IndexBox(tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))


def intersect_boxes(one: IndexBox, other: IndexBox) -> IndexBox | None:
    """Return the intersection of two boxes, or None if it is empty."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    if any(end <= begin for begin, end in zip(start, stop, strict=True)):
        return None
    return IndexBox(start, stop)


def subtract_box(box: IndexBox, inner: IndexBox) -> Iterator[IndexBox]:
    """Yield boxes that make up what of a box is outside of another one, which is inside of the first.

    >>> [rest.shape for rest in subtract_box(whole_box((4, 10)), IndexBox((1, 0), (2, 7)))]
    [(1, 10), (2, 10), (1, 3)]
    """
    for dim, (start, stop) in enumerate(zip(inner.start, inner.stop, strict=True)):
        for first, end in ((box.start[dim], start), (stop, box.stop[dim])):
            if first < end:
                yield box.narrow(dim, first, end)
        box = box.narrow(dim, start, stop)


def cover_range(shape: Sequence[int], start: int, stop: int) -> Iterator[IndexBox]:
    """Yield the boxes of an array that its elements from `start` up to `stop` fill, in C order; few large ones.

    >>> [box.shape for box in cover_range((4, 10), 5, 33)]
    [(1, 5), (2, 10), (1, 3)]
    """
    if start >= stop:
        return
    if not shape:
        yield IndexBox((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        yield from _cover_in_row(shape, last, start, stop)
        return
    yield from _cover_in_row(shape, first - 1, start, first * row)
    if last > first:
        yield whole_box(shape).narrow(0, first, last)
    yield from _cover_in_row(shape, last, last * row, stop)


def _cover_in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[IndexBox]:
    """Yield the boxes of a range of elements that is inside of one row."""
    before = index * math.prod(shape[1:])
    for box in cover_range(shape[1:], start - before, stop - before):
        yield IndexBox((index, *box.start), (index + 1, *box.stop))


def split_box(box: IndexBox, num_parts: int, itemsize: int, *, is_coarse: bool = False) -> list[IndexBox]:
    """Split a box into up to `num_parts` boxes whose sizes differ by at most one row; the larger ones come first.

    The box is cut along the first dim that has a row for each part and small rows, so that copies run over long
    stretches of memory; if there is no such dim, along the longest.

    Args:
        is_coarse: True: into fewer boxes, if they were small, and at multiples of as many rows as a thirty-second of a
            part allows, so that few chunks of these rows have all boxes.
    """
    if is_coarse:
        num_parts = max(1, min(num_parts, box.size * itemsize // MIN_COARSE_BYTES))
    shape = box.shape
    if num_parts == 1 or not shape:
        return [box]
    dim = next(
        (
            dim
            for dim, length in enumerate(shape)
            if length >= num_parts and box.size // length * itemsize <= MAX_ROW_BYTES
        ),
        max(range(len(shape)), key=lambda dim: shape[dim]),
    )
    num_parts = min(num_parts, shape[dim])
    each, more = divmod(shape[dim], num_parts)
    # The first `more` of the parts get a row more than the others.
    edges = [box.start[dim] + way * each + min(way, more) for way in range(num_parts + 1)]
    if is_coarse:
        # The largest power of two that `each // COARSE_UNITS` has, and that divides where the box begins.
        rows = 1 << max(0, (each // COARSE_UNITS).bit_length() - 1)
        rows = math.gcd(rows, box.start[dim])
        edges[1:-1] = [round(edge / rows) * rows for edge in edges[1:-1]]
    return [box.narrow(dim, start, stop) for start, stop in pairwise(edges)]


def contiguous_runs(box: IndexBox, itemsize: int, limit_bytes: int) -> Iterator[IndexBox]:
    """Yield a box as boxes of at most `limit_bytes` (or one element), in C order, each contiguous in its memory."""
    if box.size <= max(1, limit_bytes // itemsize):
        if box.size:
            yield box
        return
    # All dims before it have one row, so rows along this one follow each other in memory without a gap.
    dim = next(dim for dim, length in enumerate(box.shape) if length > 1)
    row_bytes = box.size // box.shape[dim] * itemsize
    rows = max(1, limit_bytes // row_bytes)
    for start in range(box.start[dim], box.stop[dim], rows):
        part = box.narrow(dim, start, min(start + rows, box.stop[dim]))
        if row_bytes > limit_bytes:
            yield from contiguous_runs(part, itemsize, limit_bytes)
        else:
            yield part


def _put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
