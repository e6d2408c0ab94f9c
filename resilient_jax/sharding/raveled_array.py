"""An array as one vector, padded so that any number of devices shards it evenly.

JAX shards a dim only where the number of devices divides it. What is computed element by element needs no shape: of n
elements in C order each of D devices has ceil(n / D), whatever n and D are, and the padding is at the vector's end.

    array[i, j, ..]  =  vector[index of (i, j, ..) in C order],    padding: vector[n:]
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final, TypeGuard, TypeVar

import jax

Tree = TypeVar("Tree")

MIN_RAVELED_SIZE: Final = 64
"""Elements of an array that is worth raveling: below it, the padding on many devices is as large as the array."""

MAX_RAVELED_SIZE: Final = 2**31 - 2**20
"""Elements of the largest array that may be raveled: with the padding for a million devices an index fits an int32."""


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


def compute_padded_size(size: int, num_devices: int) -> int:
    """Return the length of a vector of `size` elements that is padded to a multiple of the devices.

    >>> compute_padded_size(10, 4)
    12
    """
    return size + -size % num_devices
