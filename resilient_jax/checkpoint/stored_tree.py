"""A pytree as a list of leaves in one piece of memory, for a process without the tree's classes.

The paths are those of Orbax: containers are dicts, by name, or lists, by index.
"""

import math
import mmap
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import jax
import msgspec
import numpy as np

from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.state.index_box import IndexBox

Tree = Any
"""A pytree of arrays."""
ALIGNMENT_BYTES: Final = 64
MEMORY_NAME: Final = "rj-checkpoint"


class PathKey(NamedTuple):
    """One step down a tree: a name in a dict, or an index in a list."""

    name: str
    is_index: bool


OrbaxPath = tuple[PathKey, ...]


class StoredBox(msgspec.Struct, frozen=True, kw_only=True):
    """A box of an array, and the offset in memory of its elements, in C order."""

    spec: LeafSpec
    box: IndexBox
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return self.box.shape

    @property
    def nbytes(self) -> int:
        """The bytes of the box, whose elements follow each other without a gap."""
        return np.dtype(self.spec.dtype).itemsize * self.box.size


class StoredLeaf(msgspec.Struct, frozen=True, kw_only=True):
    """An array, and the offset in memory of its elements, in C order; or an empty container.

    Attributes:
        path: from the tree's root, with the kinds of its containers.
        spec: of the array; None for an empty container.
        offset: of the array, in bytes.
        empty_container: its name, without an array. An array without elements is stored as "none": Orbax refuses it.
    """

    path: OrbaxPath
    spec: LeafSpec | None = None
    offset: int = 0
    empty_container: str = ""


_EMPTY_CONTAINERS: Final[Mapping[str, Any]] = {"none": None, "dict": {}, "list": [], "tuple": ()}


def make_orbax_path(path: Iterable[Any]) -> OrbaxPath:
    """Return a path of `jax.tree_util` as Orbax writes it."""
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


def format_orbax_path(path: Iterable[Any]) -> str:
    """Return a path of `jax.tree_util` as the path of a `LeafSpec`; "/" in a name is escaped."""
    return _join_path(make_orbax_path(path))


def flatten_tree(tree: Tree) -> list[tuple[OrbaxPath, Any]]:
    """Return the arrays and the empty containers of a tree, with their paths."""
    return [
        (make_orbax_path(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty_container)
    ]


def assign_offsets(flat: Iterable[tuple[OrbaxPath, Any]]) -> tuple[list[StoredLeaf], int]:
    """Return the leaves with their offsets in memory, and how many bytes they take in all."""
    leaves: list[StoredLeaf] = []
    end = 0
    for path, leaf in flat:
        if container := _name_empty_container(leaf):
            leaves.append(StoredLeaf(path=path, empty_container=container))
            continue
        spec = LeafSpec(_join_path(path), str(leaf.dtype), tuple(leaf.shape))
        offset = align_offset(end)
        leaves.append(StoredLeaf(path=path, spec=spec, offset=offset))
        end = offset + np.dtype(spec.dtype).itemsize * math.prod(spec.shape)
    return leaves, end


def align_offset(offset: int) -> int:
    """Return the first offset from here at which an array may begin."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def view_box(stored: StoredBox, memory: mmap.mmap) -> np.ndarray:
    """Return the elements of a box as an array over this memory."""
    return np.ndarray(stored.shape, np.dtype(stored.spec.dtype), buffer=memory, offset=stored.offset)


def view_leaf(leaf: StoredLeaf, memory: mmap.mmap) -> Any:  # noqa: ANN401 - an array, or an empty container
    """Return the leaf: an array over this memory, or an empty container."""
    if leaf.spec is None:
        return _EMPTY_CONTAINERS[leaf.empty_container]
    return np.ndarray(leaf.spec.shape, np.dtype(leaf.spec.dtype), buffer=memory, offset=leaf.offset)


def build_tree(flat: Iterable[tuple[OrbaxPath, Any]]) -> Tree:
    """Return the tree of dicts and lists that has these leaves."""
    root: dict[PathKey, Any] = {}
    for path, leaf in flat:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
        node[path[-1]] = leaf
    return _build_container(root)


def allocate_memory(size: int) -> int:
    """Return a descriptor of anonymous memory: no other user can open it, and its last descriptor frees it."""
    descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
    # An empty file cannot be mapped.
    os.truncate(descriptor, max(size, 1))
    return descriptor


class _Node(dict[PathKey, Any]):
    """A container that is being filled; other dicts are leaves."""


def _join_path(path: OrbaxPath) -> str:
    return "/".join(key.name.replace("/", "\\/") for key in path)


def _build_container(node: dict[PathKey, Any]) -> Tree:
    built = {
        key: _build_container(child) if isinstance(child, _Node) else child for key, child in node.items()
    }
    if any(key.is_index for key in built):
        return [built[key] for key in sorted(built, key=lambda key: int(key.name))]
    return {key.name: child for key, child in built.items()}


def _is_empty_container(node: object) -> bool:
    return node is None or (not jax.tree_util.all_leaves([node]) and jax.tree.structure(node).num_nodes == 1)


def _name_empty_container(leaf: Any) -> str:  # noqa: ANN401 - an array, or an empty container
    if hasattr(leaf, "dtype"):
        return "none" if math.prod(leaf.shape) == 0 else ""
    if isinstance(leaf, Mapping):
        return "dict"
    if isinstance(leaf, list):
        return "list"
    return "tuple" if type(leaf) is tuple else "none"  # Orbax writes an empty NamedTuple as None
