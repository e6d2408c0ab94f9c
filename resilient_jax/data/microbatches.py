"""The data as the trainer reads it, and how it is made from the user's source."""

from typing import Any, Protocol

import numpy as np

from resilient_jax.argument_checks import find_refused_call
from resilient_jax.data.array_rows import view_as_rows
from resilient_jax.data.example_layout import Tree
from resilient_jax.data.function_data import FunctionData
from resilient_jax.data.grain_data import GrainData, is_grain_map_dataset, make_batched_grain_data
from resilient_jax.data.microbatch_rows import ALL_ROWS, RowPart, check_positive_integers
from resilient_jax.data.random_access import RandomAccessData
from resilient_jax.errors import DataError

EXPECTED_SOURCES = (
    "expected (1) arrays whose first dimension is the number of examples: one, or a tuple or a dict of them, (2) a "
    "list of examples, or another source of examples with __len__ and __getitem__, such as a map-style dataset, (3) a "
    "function batch(step, index) that returns a microbatch, (4) a Grain MapDataset, or (5) an object with the methods "
    "batch(step, index, part) and lengths(step, index)"
)
"""What `make_microbatch_data` takes, in its errors."""


class MicrobatchData(Protocol):
    """The data of a training run: any microbatch of any step, in any order, from any thread.

    Pure: the same arguments return the same arrays, on every host and after every restart.
    """

    def batch(self, step: int, index: int, part: RowPart = ALL_ROWS) -> Tree:
        """Return a pytree of numpy arrays whose first dimension counts the examples.

        Args:
            step: number of the step, from 0.
            index: index of the microbatch in its step, from 0.
            part: (k, n): the k-th of n equal parts of the rows. A replica on n hosts reads only its own part on each.
        """
        ...

    def lengths(self, step: int, index: int) -> np.ndarray | None:
        """Return int32: document lengths of a packed microbatch, 1 for each token of padding; None: unknown.

        They predict the time of the microbatch.
        """
        ...


def make_microbatch_data(
    source: Any,  # noqa: ANN401 - five kinds of sources, distinguished here
    *,
    num_microbatches: int,
    microbatch_size: int | None,
    seed: int = 0,
    shuffle: bool | None = None,
) -> MicrobatchData:
    """Return microbatches from arrays, a source of examples, a function, or a Grain dataset.

    Args:
        source: arrays whose first dimension is the number of examples: one array of NumPy or JAX, or a tuple or a dict
            of them, nested or not, such as `(images, labels)`; a list of examples, or another source of examples with
            `__len__` and `__getitem__`; a function `batch(step, index)`; a Grain `MapDataset`; or `MicrobatchData`,
            which is returned as it is.
        num_microbatches: microbatches of a step.
        microbatch_size: examples in a microbatch. None: the source decides, because its elements (Grain) or results
            (function) are microbatches.
        seed: the seed of the shuffle of a random-access source; other sources have their own order.
        shuffle: whether to shuffle a random-access source, newly in each epoch; None: yes. For other sources: None.

    Raises:
        DataError: the source is none of these, could be examples or columns, is empty, or does not fit the other
            arguments.

    >>> data = make_microbatch_data([10, 11, 12, 13, 14], num_microbatches=2, microbatch_size=2, shuffle=False)
    >>> data.batch(step=1, index=0), data.batch(step=1, index=0, part=(1, 2))
    (array([14, 10]), array([10]))
    >>> columns = {"x": np.array([[1.0], [2.0], [3.0]]), "y": np.array([1, 2, 3])}
    >>> make_microbatch_data(columns, num_microbatches=1, microbatch_size=2, shuffle=False).batch(step=0, index=0)
    {'x': array([[1.],
           [2.]]), 'y': array([1, 2])}
    """
    check_positive_integers(
        num_microbatches=num_microbatches, microbatch_size=1 if microbatch_size is None else microbatch_size
    )
    if is_grain_map_dataset(source):
        _refuse_shuffle(shuffle, source, "Call shuffle on the dataset before it is batched")
        if microbatch_size is None:
            return make_batched_grain_data(source, num_microbatches=num_microbatches)
        return GrainData(source, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    if isinstance(source, type):
        raise DataError(_describe_refusal(source))
    if callable(getattr(source, "batch", None)) and callable(getattr(source, "lengths", None)):
        _refuse_shuffle(shuffle, source, "Shuffle inside of it")
        return source
    source = view_as_rows(source)
    if hasattr(type(source), "__len__") and hasattr(type(source), "__getitem__"):
        if microbatch_size is None:
            raise DataError(
                f"microbatch_size: found None for a source of examples ({type(source).__name__}), "
                f"expected how many examples a "
                "microbatch has"
            )
        return RandomAccessData(
            source,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
            seed=seed,
            shuffle=shuffle is not False,
        )
    if callable(source):
        _refuse_shuffle(shuffle, source, "Shuffle inside of it")
        if (parameters := find_refused_call(source, 2)) is not None:
            raise DataError(
                f"data: found a function of {parameters}, expected batch(step, index), which returns one "
                "microbatch of a step. It is called for each with two integers, in any order and more than once"
            )
        return FunctionData(source, microbatch_size=microbatch_size)
    raise DataError(_describe_refusal(source))


def _refuse_shuffle(shuffle: bool | None, source: object, remedy: str) -> None:
    if shuffle is not None:
        raise DataError(
            f"shuffle: found {shuffle} for a source that has its own order ({type(source).__name__}), expected None. "
            f"{remedy}, and leave `shuffle` out"
        )


def _describe_refusal(source: object) -> str:
    if isinstance(source, type):
        return (
            f"data: found the class {source.__name__} itself, {EXPECTED_SOURCES}. Give an object of the class"
        )
    return (
        f"data: found a {type(source).__name__}, {EXPECTED_SOURCES}. An iterator cannot return again a microbatch that "
        "a dead host has read: give what it iterates over, such as the dataset of a DataLoader; in Grain, give "
        "the MapDataset that the IterDataset was made from"
    )
