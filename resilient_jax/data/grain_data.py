"""Microbatches from a Grain `MapDataset`, in Grain's own order. Does not import Grain.

A `MapDataset` is infinite: element i of a dataset of n is element i % n of epoch i // n. Every transformation keeps to
that: `shuffle` draws a new order for each epoch, `random_map` new random numbers for each i, `batch` restarts in each
epoch. So an element is a pure function of i, and i is all that is chosen here. (Checked with grain 0.2.18.)

Where a filter removed an element, Grain has a hole, None. To skip holes, all of those before would have to be counted:
an element would no longer be a function of its index. So a hole is an error.
"""

import numpy as np

from resilient_jax.data.example_layout import LayoutChecker, Tree
from resilient_jax.data.function_data import FunctionData
from resilient_jax.data.microbatch_rows import ALL_ROWS, RowPart, check_positive_integers, list_positions
from resilient_jax.data.random_access import (
    RandomAccessSource,
    check_nonempty,
    read_examples,
    read_item,
)


def is_grain_map_dataset(source: object) -> bool:
    """Return whether the source is a Grain `MapDataset`, without importing Grain: the class names its module."""
    return any(
        cls.__name__ == "MapDataset" and cls.__module__.partition(".")[0] == "grain"
        for cls in type(source).__mro__
    )


class GrainData:
    """Microbatches of elements: row k is element `(step * num_microbatches + index) * microbatch_size + k`."""

    def __init__(self, dataset: RandomAccessSource, *, num_microbatches: int, microbatch_size: int) -> None:
        """Take the dataset's length; read nothing yet.

        Raises:
            DataError: the dataset is empty, or a number is below 1.
        """
        check_positive_integers(num_microbatches=num_microbatches, microbatch_size=microbatch_size)
        self._dataset = dataset
        self._length = check_nonempty(dataset)
        self._microbatches = num_microbatches
        self._size = microbatch_size
        self._layout = LayoutChecker()

    def batch(self, step: int, index: int, part: RowPart = ALL_ROWS) -> Tree:
        """Return each leaf of the elements, stacked: [rows, ...].

        Raises:
            DataError: there is no such microbatch or part, or an element is missing, no tree of arrays, or has another
                layout.
        """
        positions = list_positions(
            step, index, part, num_microbatches=self._microbatches, microbatch_size=self._size
        )
        return read_examples(self._dataset, list(positions), self._length, self._layout)

    def lengths(self, step: int, index: int) -> np.ndarray | None:
        """Return None: Grain has no document lengths."""
        return None


def make_batched_grain_data(dataset: RandomAccessSource, *, num_microbatches: int) -> FunctionData:
    """Return microbatches from a batched dataset: element `step * num_microbatches + index` is one.

    Batch the dataset with `drop_remainder=True`, or after `repeat()`: else the last microbatch of each epoch is shorter
    than the first one, and refused.

    Raises:
        DataError: the dataset is empty, or `num_microbatches` is below 1.
    """
    check_positive_integers(num_microbatches=num_microbatches)
    length = check_nonempty(dataset)

    def read_microbatch(step: int, index: int) -> Tree:
        (number,) = list_positions(
            step, index, ALL_ROWS, num_microbatches=num_microbatches, microbatch_size=1
        )
        return read_item(dataset, number, length)

    return FunctionData(read_microbatch)
