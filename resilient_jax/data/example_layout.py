"""The layout of an example: its tree, shapes and dtypes, which must be the same for all examples.

A program is compiled for one layout. A second layout would compile again on one host while the others wait, or, worse,
train on something else; so it is refused here, where the error can still name the item that has it.
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import numpy as np

from resilient_jax.errors import DataError

Tree = Any
"""A pytree of numpy arrays; the user chooses its structure."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExampleLayout:
    """The tree structure of an example, and the shape and dtype of each of its leaves, in the tree's order."""

    structure: Any  # a PyTreeDef, which type checkers take for a variable, not for a type
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]


class LayoutChecker:
    """Remembers the first layout, and refuses all others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _first: several threads read ahead
        self._first: tuple[str, ExampleLayout] | None = None

    def check(self, tree: Tree, name: str) -> list[np.ndarray]:
        """Return the leaves of `tree` as arrays, in the order that `rebuild` takes them.

        Args:
            name: name of the example in the error: "item 7 of list".

        Raises:
            DataError: a leaf is no array of numbers, there is no leaf, or the layout is not the first one's.
        """
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_list_of_numbers)
        arrays = [_to_array(leaf, tree, position, name) for position, leaf in enumerate(leaves)]
        if not arrays:
            raise DataError(f"{name}: found {tree!r}, which holds no arrays; expected arrays or numbers")
        layout = ExampleLayout(
            structure=structure, leaves=tuple((array.shape, array.dtype) for array in arrays)
        )
        with self._lock:
            if self._first is None:
                self._first = (name, layout)
            first_name, first = self._first
        if layout != first:
            raise DataError(
                f"{name}: {_describe_difference(tree, layout, first)} as in {first_name}, which was read first. "
                "Bring all of them to one tree, shape and dtype: pad, crop or convert"
            )
        return arrays

    def rebuild(self, leaves: Sequence[np.ndarray]) -> Tree:
        """Return the tree that has these leaves. `check` must have been called before."""
        assert self._first is not None
        return jax.tree.unflatten(self._first[1].structure, leaves)


def _to_array(leaf: object, tree: Tree, position: int, name: str) -> np.ndarray:
    if _is_list_of_numbers(leaf):
        # As a tree of scalars it would be batched to a list of columns: [length, rows] instead of [rows, length].
        raise DataError(
            f"{name}{list_paths(tree)[position]}: found a list of {len(leaf)} numbers, expected an array. Convert it: "
            "np.asarray(...)"
        )
    if isinstance(leaf, bool | int | float | complex) or hasattr(leaf, "__array__"):
        array = np.asarray(leaf)
        if holds_numbers(array.dtype):
            return array
        found = f"an array of dtype {array.dtype}"
    else:
        found = type(leaf).__name__
    raise DataError(
        f"{name}{list_paths(tree)[position]}: found {found}, expected an array of numbers, or a number. Convert it in "
        "the source, or leave it out"
    )


def _is_list_of_numbers(value: object) -> TypeGuard[list[float]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, bool | int | float) for item in value)
    )


def holds_numbers(dtype: np.dtype) -> bool:
    """Return whether arrays of this dtype hold numbers or booleans."""
    # bfloat16 and the other types of ml_dtypes are of kind V, as structured arrays and raw bytes are.
    return dtype.kind in "biufc" or (dtype.kind == "V" and dtype.type is not np.void)


def _describe_difference(tree: Tree, found: ExampleLayout, expected: ExampleLayout) -> str:
    if found.structure != expected.structure:
        return f"found the tree {found.structure}, expected {expected.structure}"
    for path, ours, theirs in zip(list_paths(tree), found.leaves, expected.leaves, strict=True):
        if ours != theirs:
            where = f"leaf {path}: " if path else ""
            return f"{where}found {describe_array(*ours)}, expected {describe_array(*theirs)}"
    raise AssertionError("equal layouts")


def describe_array(shape: tuple[int, ...], dtype: np.dtype) -> str:
    """Return dtype and shape as in an error: float32[60000,28,28]."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def list_paths(tree: Tree) -> list[str]:
    """Return the path of each leaf: `['image']`, `[0]`; empty for a tree that is one leaf."""
    return [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_list_of_numbers)
    ]
