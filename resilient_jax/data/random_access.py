"""Microbatches from a source that has a length and returns an item by its index."""

from typing import Protocol

import numpy as np

from resilient_jax.data.array_rows import ArrayRows
from resilient_jax.data.example_layout import LayoutChecker, Tree
from resilient_jax.data.microbatch_rows import (
    ALL_ROWS,
    RowPart,
    check_integers,
    check_positive_integers,
    list_positions,
)
from resilient_jax.data.shuffle import permute
from resilient_jax.errors import DataError


class RandomAccessSource(Protocol):
    """A list, an array, a memory map, a dataset of another library."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Tree: ...


class RandomAccessData:
    """Microbatches of examples from a random-access source, shuffled anew in each epoch.

    Row `p = (step * num_microbatches + index) * microbatch_size + k` is item `permutation(seed, p // n)(p % n)` of the
    n items: epochs follow each other without a gap, so a microbatch may contain the end of one and the beginning of the
    next.
    """

    def __init__(
        self,
        source: RandomAccessSource,
        *,
        num_microbatches: int,
        microbatch_size: int,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Take the source's present length.

        Args:
            source: items are arrays, scalars or trees of these, all of one layout.
            seed: seed of the shuffle, from 0 to 2**64 - 1.
            shuffle: False: items come in the source's own order in every epoch.

        Raises:
            DataError: the source is empty, or has no length; a number is below 1, or not an integer.
        """
        check_positive_integers(num_microbatches=num_microbatches, microbatch_size=microbatch_size)
        check_integers(seed=seed)
        self._source = source
        self._length = check_nonempty(source)
        self._microbatches = num_microbatches
        self._size = microbatch_size
        self._seed = seed
        self._shuffle = shuffle
        self._layout = LayoutChecker()

    def batch(self, step: int, index: int, part: RowPart = ALL_ROWS) -> Tree:
        """Return each leaf of the examples, stacked: [rows, ...].

        Raises:
            DataError: there is no such microbatch or part, or the source lacks an item or changes its layout.
        """
        numbers = self._item_indices(step, index, part)
        if isinstance(self._source, ArrayRows):
            return self._source.take(numbers)  # the same rows at once, and of one layout by construction
        return read_examples(self._source, numbers, self._length, self._layout)

    def lengths(self, step: int, index: int) -> np.ndarray | None:
        """Return int32: document lengths in all rows, if the source has a method `lengths` (see `PackedDocuments`)."""
        lengths_of = getattr(self._source, "lengths", None)
        if not callable(lengths_of):
            return None
        numbers = self._item_indices(step, index, ALL_ROWS)
        return np.concatenate([np.asarray(lengths_of(number), np.int32) for number in numbers])

    def _item_indices(self, step: int, index: int, part: RowPart) -> list[int]:
        """Return the source's indices of the items, row by row."""
        positions = list_positions(
            step, index, part, num_microbatches=self._microbatches, microbatch_size=self._size
        )
        numbers: list[int] = []
        while positions:
            epoch, first = divmod(positions.start, self._length)
            run = np.arange(first, min(first + len(positions), self._length))
            if self._shuffle:
                run = permute(run, self._length, seed=self._seed, epoch=epoch)
            numbers.extend(run.tolist())
            positions = positions[len(run) :]
        return numbers


def count_items(source: RandomAccessSource) -> int:
    """Return the length of a source, which may be 0.

    Raises:
        DataError: the source has no length, such as an array without dimensions.
    """
    try:
        return len(source)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"the source ({type(source).__name__}): found no length ({error}), expected the number of its items. "
            "Define __len__; an array needs a first dimension, over its items"
        ) from error


def check_nonempty(source: RandomAccessSource) -> int:
    """Return the length of a source, which must have items.

    Raises:
        DataError: the source is empty, or has no length.
    """
    length = count_items(source)
    if length < 1:
        raise DataError(
            f"the source ({type(source).__name__}): found no items, expected at least one. Is its path right, or "
            "has a filter taken all of them?"
        )
    return length


def read_item(source: RandomAccessSource, number: int, length: int) -> Tree:
    """Return item `number` of a source.

    Raises:
        DataError: the source, which has `length` items, does not have this one.
    """
    try:
        item = source[number]
    except (IndexError, KeyError) as error:
        raise DataError(
            f"{describe_item(source, number)}: found {error!r}, expected an item. Either the "
            f"source is shorter than promised "
            f"(its length was {length}): its __len__ must be the number of items, with indexes 0, 1, 2, ...; or "
            "its own code fails: see the error above"
        ) from error
    if item is None:
        raise DataError(
            f"{describe_item(source, number)}: found None, expected an example. If a filter took it out: filter before "
            "training, and give a source of what is left"
        )
    return item


def read_examples(source: RandomAccessSource, numbers: list[int], length: int, layout: LayoutChecker) -> Tree:
    """Return the items at these indices, at least one, stacked leaf by leaf.

    Raises:
        DataError: an item is missing, is no tree of arrays, or has another layout than the first.
    """
    rows = [
        layout.check(read_item(source, number, length), describe_item(source, number)) for number in numbers
    ]
    return layout.rebuild([np.stack(leaves) for leaves in zip(*rows, strict=True)])


def describe_item(source: object, number: int) -> str:
    """Return the name of an item, for an error."""
    return f"item {number} of {type(source).__name__}"
