"""Microbatches from a Grain `MapDataset`, in Grain's own order. Does not import Grain.

Grain has no end: element i of a dataset of n is element i % n of epoch i // n. Every transformation keeps to that:
`shuffle` draws a new order for each epoch, `random_map` new numbers for each i, `batch` starts anew in each epoch.
So an element is a pure function of i, and i is all that we choose. (Checked with grain 0.2.18.)

Where a filter took an element out, Grain leaves a hole, None. Skipping holes would need a count of all before: an
element would be no function of its number any more. So a hole is an error.
"""

import numpy as np

from resilient_jax.data.example_layout import FirstLayout, Tree
from resilient_jax.data.function_data import FunctionData
from resilient_jax.data.microbatch_rows import WHOLE, Part, check_at_least_one, positions_of
from resilient_jax.data.random_access import RandomAccess, measure, read_examples, read_item


def is_grain_map_dataset(source: object) -> bool:
    """Whether it is one, told without importing Grain: who has one has imported it."""
    return any(
        cls.__name__ == "MapDataset" and cls.__module__.partition(".")[0] == "grain"
        for cls in type(source).__mro__
    )


class GrainData:
    """Microbatches of `size` elements: row k of a microbatch is element `(step * microbatches + index) * size + k`."""

    def __init__(self, dataset: RandomAccess, *, microbatches: int, size: int) -> None:
        """Reads nothing yet.

        Raises:
            DataError: the dataset is empty, or a number is below 1.
        """
        check_at_least_one(microbatches=microbatches, size=size)
        self._dataset = dataset
        self._length = measure(dataset)
        self._microbatches = microbatches
        self._size = size
        self._layout = FirstLayout()

    def batch(self, step: int, index: int, part: Part = WHOLE) -> Tree:
        """Each leaf of the elements, stacked: [rows, ...].

        Raises:
            DataError: no such microbatch or part, or an element is filtered out, no tree of arrays, or different.
        """
        positions = positions_of(step, index, part, microbatches=self._microbatches, size=self._size)
        return read_examples(self._dataset, list(positions), self._length, self._layout)

    def lengths(self, step: int, index: int) -> np.ndarray | None:
        """None: Grain tells no lengths."""
        return None


def batched_grain_data(dataset: RandomAccess, *, microbatches: int) -> FunctionData:
    """Microbatches from a dataset that is batched already: element `step * microbatches + index` is one.

    Batch it with `drop_remainder=True`, or after `repeat()`: else the last microbatch of each epoch is shorter than the
    first one was, and refused.

    Raises:
        DataError: the dataset is empty, or `microbatches` is below 1.
    """
    check_at_least_one(microbatches=microbatches)
    length = measure(dataset)

    def read_microbatch(step: int, index: int) -> Tree:
        (number,) = positions_of(step, index, WHOLE, microbatches=microbatches, size=1)
        return read_item(dataset, number, length)

    return FunctionData(read_microbatch)
