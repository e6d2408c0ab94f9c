"""An array as one vector, padded so that any number of devices shards it evenly.

JAX shards a dim only where the number of devices divides it. What is computed element by element needs no shape: of n
elements in C order each of D devices has about n / D, whatever n and D are, and the padding is at the vector's end.

    array[i, j, ..]  =  vector[index of (i, j, ..) in C order],    padding: vector[n:]

Storage has the array in chunks, each of which one host writes. So a large array is cut between rows of one of its dims.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final, TypeGuard, TypeVar

import jax

Tree = TypeVar("Tree")

MIN_RAVELED_SIZE: Final = 64
"""Elements of an array that is worth raveling: below it, the padding on many devices is as large as the array."""

MAX_UNITS: Final = 2**14
"""Of an array that is cut between units. Each may be a chunk on storage, which costs some 20 us."""
MAX_PADDING: Final = 1 / 128
"""Padding that larger units are worth, as a part of the array."""

MAX_RAVELED_SIZE: Final = 2**30
"""Elements of the largest array that may be raveled: with its padding an index still fits an int32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class RaveledArray:
    """An array whose elements are kept in a padded vector; a node of a pytree, and what comes after n is unspecified.

    Attributes:
        vector: [n], or longer with padding.
        shape: shape of the represented array, of n elements.
    """

    vector: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:  # noqa: ANN401 - a dtype of numpy or ml_dtypes
        """The dtype of the elements."""
        return self.vector.dtype

    @property
    def ndim(self) -> int:
        """The number of dims of the represented array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements, without padding."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements, without padding."""
        return self.size * self.dtype.itemsize


def is_raveled(node: object) -> TypeGuard[RaveledArray]:
    """Return whether a node of a pytree is a raveled array; for `is_leaf`."""
    return isinstance(node, RaveledArray)


def ravel_array(array: Any) -> RaveledArray:  # noqa: ANN401 - an array, or an abstract one
    """Return an array, or an abstract one, raveled and without padding."""
    shape = tuple(array.shape)
    if isinstance(array, jax.ShapeDtypeStruct):
        return RaveledArray(jax.ShapeDtypeStruct((math.prod(shape),), array.dtype), shape)
    return RaveledArray(array.reshape(-1), shape)


def ravel_leaves(tree: Tree, raveled: Sequence[bool]) -> Tree:
    """Return the tree with some of its leaves raveled; `raveled` has a value for each leaf, in the tree's order."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        [ravel_array(leaf) if chosen else leaf for leaf, chosen in zip(leaves, raveled, strict=True)]
    )


@functools.cache
def compute_padded_size(shape: tuple[int, ...], num_devices: int) -> int:
    """Return the length of the vector of an array of this shape, padded to a multiple of devices and units.

    The unit is the largest with little padding. An array with too many units of that size, because the lengths of its
    dims have no divisors, is cut between rows of dim 0, whatever the padding.

    >>> compute_padded_size((10,), 4), compute_padded_size((1000, 100), 3)
    (12, 100200)
    """
    size = math.prod(shape)
    by_unit = {unit: size + -size % (num_devices * unit) for unit in _list_units(shape)}
    limit = max(by_unit[1], size + int(size * MAX_PADDING))
    unit = max(unit for unit, padded in by_unit.items() if padded <= limit)
    return by_unit[unit if size <= unit * MAX_UNITS else max(by_unit)]


def _list_units(shape: tuple[int, ...]) -> set[int]:
    """Return the elements of rows of one dim, as many as divide its length; and of a row of dim 0.

    An array that is cut between units is cut where each dim's index is a multiple of the unit's length in it.
    """
    units, row = {1}, 1
    for length in reversed(shape[1:]):
        units.update(row * count for count in range(1, length + 1) if length % count == 0)
        row *= length
    return units
