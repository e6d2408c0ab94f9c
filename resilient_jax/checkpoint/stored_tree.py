"""A pytree as a list of leaves, in one piece of memory, for a process that does not know the tree's classes.

The paths are what Orbax makes of a tree: containers are dicts, by name, or lists, by index.
"""

import math
import mmap
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import jax
import msgspec
import numpy as np

from resilient_jax.state.index_box import IndexBox

Tree = Any
"""A pytree of arrays."""
ALIGNMENT_BYTES: Final = 64
MEMORY_NAME: Final = "rj-checkpoint"


class PathKey(NamedTuple):
    """One step down a tree."""

    name: str
    is_index: bool


class StoredLeaf(msgspec.Struct, frozen=True, kw_only=True):
    """An array, and where its numbers begin, in C order; or an empty container.

    Attributes:
        path: from the tree's root.
        dtype: name of numpy or ml_dtypes.
        empty: name of an empty container; then there are no numbers. An array without numbers is stored as "none", for
            Orbax refuses it.
    """

    path: tuple[PathKey, ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offset: int = 0
    empty_container: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the array; 0 for an empty container."""
        return 0 if self.empty_container else np.dtype(self.dtype).itemsize * math.prod(self.shape)


class StoredBox(msgspec.Struct, frozen=True, kw_only=True):
    """A box of an array, and where its numbers begin, in C order.

    Attributes:
        path: of the array, from the tree's root.
        dtype: of the array.
    """

    path: tuple[PathKey, ...]
    dtype: str
    box: IndexBox
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return self.box.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return np.dtype(self.dtype).itemsize * self.box.size


_EMPTY: Final[Mapping[str, Any]] = {"none": None, "dict": {}, "list": [], "tuple": ()}


def make_orbax_path(path: Iterable[Any]) -> tuple[PathKey, ...]:
    """A path of JAX's as Orbax writes it."""
    keys: list[PathKey] = []
    for key in path:
        match key:
            case jax.tree_util.SequenceKey():
                keys.append(PathKey(str(key.idx), is_index=True))
            case jax.tree_util.FlattenedIndexKey():
                keys.append(PathKey(str(key.key), is_index=True))
            case jax.tree_util.GetAttrKey():
                keys.append(PathKey(key.name, is_index=False))
            case _:
                keys.append(PathKey(str(key.key), is_index=False))
    return tuple(keys)


def flatten_tree(tree: Tree) -> list[tuple[tuple[PathKey, ...], Any]]:
    """Paths with arrays, and with the empty containers."""
    return [
        (make_orbax_path(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty_container)
    ]


def assign_offsets(flat: Iterable[tuple[tuple[PathKey, ...], Any]]) -> tuple[list[StoredLeaf], int]:
    """Where each leaf goes, and how many bytes there are in all."""
    leaves: list[StoredLeaf] = []
    end = 0
    for path, leaf in flat:
        empty = _name_empty(leaf)
        if empty:
            leaves.append(StoredLeaf(path=path, empty_container=empty))
            continue
        offset = align_offset(end)
        leaves.append(StoredLeaf(path=path, dtype=str(leaf.dtype), shape=tuple(leaf.shape), offset=offset))
        end = offset + leaves[-1].nbytes
    return leaves, end


def align_offset(offset: int) -> int:
    """The first place from here where an array may begin."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def view_array(of: StoredLeaf | StoredBox, memory: mmap.mmap) -> np.ndarray:
    """The numbers of an array, or of a box of one, in this memory."""
    return np.ndarray(of.shape, np.dtype(of.dtype), buffer=memory, offset=of.offset)


def view_leaf(leaf: StoredLeaf, memory: mmap.mmap) -> Any:  # noqa: ANN401 - an array, or an empty container
    """The leaf, in this memory."""
    return _EMPTY[leaf.empty_container] if leaf.empty_container else view_array(leaf, memory)


def build_tree(flat: Iterable[tuple[tuple[PathKey, ...], Any]]) -> Tree:
    """The tree of dicts and lists."""
    root: dict[PathKey, Any] = {}
    for path, leaf in flat:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
        node[path[-1]] = leaf
    return _close(root)


def allocate_memory(size: int) -> int:
    """A descriptor of so many bytes of memory that no other user can open, and that nobody has to clear away."""
    descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
    os.truncate(descriptor, max(size, 1))
    return descriptor


class _Node(dict[PathKey, Any]):
    """A container in the making; other dicts are leaves."""


def _close(node: dict[PathKey, Any]) -> Tree:
    closed = {key: _close(child) if isinstance(child, _Node) else child for key, child in node.items()}
    if any(key.is_index for key in closed):
        return [closed[key] for key in sorted(closed, key=lambda key: int(key.name))]
    return {key.name: child for key, child in closed.items()}


def _is_empty_container(node: object) -> bool:
    return node is None or (not jax.tree_util.all_leaves([node]) and jax.tree.structure(node).num_nodes == 1)


def _name_empty(leaf: Any) -> str:  # noqa: ANN401 - an array, or an empty container
    if hasattr(leaf, "dtype"):
        return "none" if math.prod(leaf.shape) == 0 else ""
    if isinstance(leaf, Mapping):
        return "dict"
    if isinstance(leaf, list):
        return "list"
    return "tuple" if type(leaf) is tuple else "none"  # Orbax writes an empty NamedTuple as None
