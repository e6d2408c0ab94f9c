"""A pytree as a list of leaves in one piece of memory, for a process without the tree's classes.

The paths are those of Orbax: containers are dicts, by name, or lists, by index.
"""

import mmap
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import jax
import msgspec
import numpy as np

from resilient_jax.errors import StateError
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.state.index_box import IndexBox
from resilient_jax.state.leaf_kinds import DTYPES_OUTSIDE_STORAGE

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


class HeldBox(NamedTuple):
    """A box of an array, and the offset in memory of its elements, in C order."""

    box: IndexBox
    offset: int


class StoredLeaf(msgspec.Struct, frozen=True, kw_only=True):
    """An array, or boxes of it, in memory; or an empty container.

    Attributes:
        path: keys from the tree's root, with the kinds of their containers.
        spec: shape and dtype of the array; None for an empty container.
        boxes: boxes that are in memory: the whole array, unless other processes have the rest.
        grid: lengths in each dim, at whose multiples alone the boxes of all processes begin and end, or where the array
            ends; so that each of its chunks is written by one process alone.
        empty_container: name of the container, without an array. An array without elements is stored as "none": Orbax
            refuses such an array.
    """

    path: OrbaxPath
    spec: LeafSpec | None = None
    boxes: tuple[HeldBox, ...] = ()
    grid: tuple[int, ...] = ()
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
    return join_path(make_orbax_path(path))


def flatten_tree(tree: Tree) -> list[tuple[str, OrbaxPath, Any]]:
    """Return the arrays and the empty containers of a tree, with their paths as `keystr` writes them, and Orbax.

    Raises:
        StateError: as `check_storable`.
    """
    check_storable(tree)
    return [
        (jax.tree_util.keystr(path), make_orbax_path(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty_container)
    ]


def check_storable(tree: Tree) -> None:
    """Return if each leaf of a tree, abstract or not, can be on storage.

    It needs a dtype that Orbax can write, and a name of its own, for which Orbax joins the keys of its path by dots.

    Raises:
        StateError: storage has no such dtype, or two leaves would be stored as one; says which.
    """
    known: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty_container):
        stored, name = ".".join(key.name for key in make_orbax_path(path)), jax.tree_util.keystr(path)
        if stored in known:
            raise StateError(
                f"a checkpoint of the state: found the leaves {known[stored]} and {name}, which storage has as one, "
                f"named {stored!r}, expected different names. Rename a key with a dot in it"
            )
        known[stored] = name
        if str(dtype := getattr(leaf, "dtype", None)) in DTYPES_OUTSIDE_STORAGE:
            raise StateError(
                f"a checkpoint of the state: found {dtype} at {name}, expected a dtype that Orbax can write. Keep it "
                "as uint8, or of a float as float8_e4m3fn"
            )


def align_offset(offset: int) -> int:
    """Return the first offset from here at which an array may begin."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def view_box(stored: StoredBox, memory: mmap.mmap) -> np.ndarray:
    """Return the elements of a box as an array over this memory."""
    return np.ndarray(stored.shape, np.dtype(stored.spec.dtype), buffer=memory, offset=stored.offset)


def view_boxes(leaf: StoredLeaf, memory: mmap.mmap) -> list[np.ndarray]:
    """Return the elements of each box of an array, as arrays over this memory."""
    dtype = np.dtype(leaf.spec.dtype if leaf.spec is not None else None)
    return [np.ndarray(held.box.shape, dtype, buffer=memory, offset=held.offset) for held in leaf.boxes]


def make_stand_in(leaf: StoredLeaf) -> Any:  # noqa: ANN401 - an array, or an empty container
    """Return the empty container, or an array of the leaf's shape and dtype, without memory of its own."""
    if leaf.spec is None:
        return _EMPTY_CONTAINERS[leaf.empty_container]
    return np.broadcast_to(np.zeros((), np.dtype(leaf.spec.dtype)), leaf.spec.shape)


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


def join_path(path: OrbaxPath) -> str:
    """Return the path of a `LeafSpec`; "/" in a name is escaped."""
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


def name_empty_container(leaf: Any) -> str:  # noqa: ANN401 - an empty container
    """Return what a container without leaves is stored as."""
    if isinstance(leaf, Mapping):
        return "dict"
    if isinstance(leaf, list):
        return "list"
    return "tuple" if type(leaf) is tuple else "none"  # Orbax writes an empty NamedTuple as None
