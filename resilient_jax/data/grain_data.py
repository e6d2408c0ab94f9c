"""Microbatches from a Grain `MapDataset`, in Grain's own order. Does not import Grain.

Grain has no end: element i of a dataset of n is element i % n of epoch i // n. Every transformation keeps to that:
`shuffle` draws a new order for each epoch, `random_map` new numbers for each i, `batch` starts anew in each epoch.
So an element is a pure function of i, and i is all that we choose. (Checked with grain 0.2.18.)

Where a filter took an element out, Grain leaves a hole, None. Skipping holes would need a count of all before: an
element would be no function of its number any more. So a hole is an error.
"""

import numpy as np

from resilient_jax.data.example_layout import LayoutChecker, Tree
from resilient_jax.data.function_data import FunctionData
from resilient_jax.data.microbatch_rows import ALL_ROWS, RowPart, check_positive_integers, list_positions
from resilient_jax.data.random_access import (
    RandomAccessSource,
    count_at_least_one_item,
    read_examples,
    read_item,
)


def is_grain_map_dataset(source: object) -> bool:
    """Whether it is one, told without importing Grain: who has one has imported it."""
    return any(
        cls.__name__ == "MapDataset" and cls.__module__.partition(".")[0] == "grain"
        for cls in type(source).__mro__
    )


class GrainData:
    """Microbatches of `size` elements: row k of a microbatch is element `(step * microbatches + index) * size + k`."""

    def __init__(self, dataset: RandomAccessSource, *, num_microbatches: int, microbatch_size: int) -> None:
        """Reads nothing yet.

        Raises:
            DataError: the dataset is empty, or a number is below 1.
        """
        check_positive_integers(num_microbatches=num_microbatches, microbatch_size=microbatch_size)
        self._dataset = dataset
        self._length = count_at_least_one_item(dataset)
        self._microbatches = num_microbatches
        self._size = microbatch_size
        self._layout = LayoutChecker()

    def batch(self, step: int, index: int, part: RowPart = ALL_ROWS) -> Tree:
        """Each leaf of the elements, stacked: [rows, ...].

        Raises:
            DataError: no such microbatch or part, or an element is filtered out, no tree of arrays, or different.
        """
        positions = list_positions(
            step, index, part, num_microbatches=self._microbatches, microbatch_size=self._size
        )
        return read_examples(self._dataset, list(positions), self._length, self._layout)

    def lengths(self, step: int, index: int) -> np.ndarray | None:
        """None: Grain tells no lengths."""
        return None


def make_batched_grain_data(dataset: RandomAccessSource, *, num_microbatches: int) -> FunctionData:
    """Microbatches from a dataset that is batched already: element `step * microbatches + index` is one.

    Batch it with `drop_remainder=True`, or after `repeat()`: else the last microbatch of each epoch is shorter than the
    first one was, and refused.

    Raises:
        DataError: the dataset is empty, or `microbatches` is below 1.
    """
    check_positive_integers(num_microbatches=num_microbatches)
    length = count_at_least_one_item(dataset)

    def read_microbatch(step: int, index: int) -> Tree:
        (number,) = list_positions(
            step, index, ALL_ROWS, num_microbatches=num_microbatches, microbatch_size=1
        )
        return read_item(dataset, number, length)

    return FunctionData(read_microbatch)
