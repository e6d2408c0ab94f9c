"""Arrays as a data set: the rows of equal first dimensions are its examples.

`(images, labels)` and `{"image": images, "label": labels}` are the usual ways to hold a data set in memory. Each is
also a sequence or a mapping of two items, which could be taken for two examples, and training would go on with
nonsense. The rules that keep these apart:

- An array, and a tuple or a mapping of arrays, nested or not, is columns: example i is row i of every array.
- A list is examples. A list of a few arrays that all have the same number of rows could be either, and is refused.
- Columns that do not fit each other are refused: unequal first dimensions, scalars, strings, lists; so is a tuple of
  more items than a batch has unnamed columns.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.data.example_layout import Tree, describe_array, holds_numbers, list_paths
from resilient_jax.errors import DataError

MAX_UNNAMED_COLUMNS: Final = 16
"""A tuple of more items is rather examples than columns; a list of more arrays is examples and not columns."""

REMEDIES: Final = (
    "Columns: give a tuple or a dict of arrays whose first dimension is the number of examples. Examples: give a list "
    "of dicts or tuples, or one array, np.stack(examples)"
)


class ArrayRows:
    """A random-access source: item i is row i of every array of a tree.

    NumPy's arrays are used as they are, memory maps too; JAX's are copied to NumPy's once, because an array on a device
    does not outlive a change of membership. A batch has the tuples of the source, and a dict for each mapping.
    """

    def __init__(self, columns: Tree) -> None:
        """Check the columns.

        Args:
            columns: an array, or tuples and mappings of arrays, nested or not; each [rows, ...].

        Raises:
            DataError: a leaf is no array of numbers, or the arrays do not all have the same number of rows.
        """
        tree = _convert(columns, "data")
        self._leaves, self._structure = jax.tree.flatten(tree)
        if not self._leaves:
            raise DataError(f"data: found {columns!r}, which holds no arrays. {REMEDIES}")
        if len({len(leaf) for leaf in self._leaves}) > 1:
            found = ", ".join(
                f"data{path} {describe_array(leaf.shape, leaf.dtype)}"
                for path, leaf in zip(list_paths(tree), self._leaves, strict=True)
            )
            raise DataError(
                f"data: found columns of different lengths, {found}; expected the same first dimension of all, the "
                f"number of examples. {REMEDIES}"
            )

    def __len__(self) -> int:
        return len(self._leaves[0])

    def __getitem__(self, number: int) -> Tree:
        return jax.tree.unflatten(self._structure, [leaf[number] for leaf in self._leaves])

    def take(self, numbers: Sequence[int]) -> Tree:
        """Return a copy of these rows of every array: [numbers, ...]."""
        indices = np.asarray(numbers, np.int64)
        return jax.tree.unflatten(self._structure, [leaf[indices] for leaf in self._leaves])


def view_as_rows(source: Any) -> Any:  # noqa: ANN401 - any source of data
    """Return `ArrayRows` of what is columns, and everything else unchanged.

    Raises:
        DataError: the source is a string or a path, could be columns or examples, or is columns that do not fit each
            other.
    """
    if isinstance(source, str | Path):
        raise DataError(f"data: found {str(source)!r}, expected the data. Load what is there. {REMEDIES}")
    if isinstance(source, np.ndarray) and not holds_numbers(source.dtype):
        return source  # an array of objects: its items may be examples
    if isinstance(source, tuple) and len(source) > MAX_UNNAMED_COLUMNS:
        raise DataError(
            f"data: found a tuple of {len(source)} items, expected the columns of a data set, at most "
            f"{MAX_UNNAMED_COLUMNS} in a tuple. {REMEDIES}"
        )
    if isinstance(source, np.ndarray | jax.Array | tuple | Mapping):
        return ArrayRows(source)
    if type(source) is list and _could_be_columns(source):
        shapes = ", ".join(describe_array(item.shape, item.dtype) for item in source)
        raise DataError(
            f"data: found a list of {len(source)} arrays, {shapes}: they could be {len(source)} examples, or the "
            f"columns of {len(source[0])}. {REMEDIES}"
        )
    return source


def _could_be_columns(items: list[Any]) -> bool:
    return (
        2 <= len(items) <= MAX_UNNAMED_COLUMNS
        and all(isinstance(item, np.ndarray | jax.Array) and item.ndim for item in items)
        and len({len(item) for item in items}) == 1
    )


def _convert(tree: Tree, path: str) -> Tree:
    """Return the tree with dicts for mappings and NumPy's arrays for leaves, each checked."""
    if isinstance(tree, Mapping):
        if unnamed := [name for name in tree if not isinstance(name, str)]:
            raise DataError(
                f"{path}: found a {type(tree).__name__} with the key {unnamed[0]!r}, expected names of columns. "
                f"{REMEDIES}"
            )
        return {name: _convert(tree[name], f"{path}[{name!r}]") for name in tree}
    if isinstance(tree, tuple):
        items = [_convert(item, f"{path}[{number}]") for number, item in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, jax.Array) and jnp.issubdtype(tree.dtype, jax.dtypes.prng_key):
        raise DataError(f"{path}: found random keys, expected an array of numbers. {REMEDIES}")
    if not isinstance(tree, np.ndarray | jax.Array):
        raise DataError(f"{path}: found a {type(tree).__name__}, expected an array of numbers. {REMEDIES}")
    array = np.asarray(tree)
    if not array.ndim or not holds_numbers(array.dtype):
        raise DataError(
            f"{path}: found {describe_array(array.shape, array.dtype)}, expected an array of numbers whose first "
            f"dimension is the number of examples. {REMEDIES}"
        )
    return array
