"""The training state between two generations: a flat list of named leaves.

A flat state has no tree type and no sharding of a mesh that no longer exists. The user's own `init_fn` determines the
structure of the tree when the state is restored.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from resilient_jax.errors import StateError
from resilient_jax.protocol.leaf_spec import LeafKind, LeafSpec
from resilient_jax.sharding.raveled_array import RaveledArray, is_raveled
from resilient_jax.state.leaf_kinds import keep_leaf, make_abstract_leaf

Tree = TypeVar("Tree")
ShardingRule = Sharding | Callable[[str, Any], Sharding]
"""One sharding for all leaves, or a function of a leaf's path and abstract value (`jax.ShapeDtypeStruct`, or a
`RaveledArray` of one: then it is the sharding of the vector)."""


CONCRETIZATION_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What JAX raises where a traced function needs concrete values."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatLeaf:
    """One array of a state.

    Attributes:
        path: path of the leaf in the state's tree, as `jax.tree_util.keystr` formats it.
        value: array on devices, or in host memory. A random key is represented by its raw data.
        kind: what the leaf is for the user, who gets back a leaf of this kind. A JAX array keeps its kind in host
            memory.
        key_impl: the implementation of a random key; None for other arrays.
        raveled_shape: shape that a raveled array represents: then `value` is its vector, with padding, on devices. In
            host memory no array is raveled.
    """

    path: str
    value: jax.Array | np.ndarray
    kind: LeafKind = LeafKind.ARRAY
    key_impl: str | None = None
    raveled_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The leaf's shape, whether it is raveled or not."""
        return tuple(self.value.shape) if self.raveled_shape is None else self.raveled_shape

    @property
    def nbytes(self) -> int:
        """Size in bytes of the leaf, without padding."""
        return math.prod(self.shape) * self.value.dtype.itemsize

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that boxes of the leaf are cut from: that of `value`, without padding."""
        return self.shape if self.raveled_shape is None else (math.prod(self.raveled_shape),)

    @property
    def spec(self) -> LeafSpec:
        """The leaf's path, dtype, shape, key implementation and kind: the same on any mesh, raveled or not."""
        return LeafSpec(self.path, self.value.dtype.name, self.shape, self.key_impl, self.kind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """The state after `step` committed steps.

    Attributes:
        strings: leaves that are strings, by path; the same on every host.
    """

    step: int
    leaves: tuple[FlatLeaf, ...]
    strings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the global arrays."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def is_complete(self) -> bool:
        """Whether this host has every element, so that it can serve the state to others alone."""
        return all(_is_complete(leaf.value) for leaf in self.leaves)


def _is_complete(value: jax.Array | np.ndarray) -> bool:
    if isinstance(value, np.ndarray) or value.is_fully_addressable:
        return True
    if value.is_fully_replicated:
        return bool(value.addressable_shards)  # else other hosts hold it
    # Sharded over the devices of each host, with a copy on every host.
    boxes = {tuple((cut.start, cut.stop) for cut in shard.index) for shard in value.addressable_shards}
    # (distinct shards here) x (elements of a shard) = (elements of the array), as all shards have one shape.
    return len(boxes) * math.prod(value.sharding.shard_shape(value.shape)) == value.size


def flatten_state(step: int, tree: Any) -> FlatState:  # noqa: ANN401 - any pytree
    """Return a pytree of arrays, numbers and strings as a flat state. The caller must not donate its arrays.

    NumPy arrays are copied: a script may write to them in its next step, which may fail.

    Raises:
        StateError: a leaf is of no kind that comes back as it is, or was deleted (donated); the message names the leaf.
    """
    paths_and_values, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_raveled)
    named = [(jax.tree_util.keystr(path), value) for path, value in paths_and_values]
    return FlatState(
        step=step,
        leaves=tuple(_flatten_leaf(path, value) for path, value in named if not isinstance(value, str)),
        strings=flatten_strings(tree),
    )


def flatten_strings(tree: Any) -> dict[str, str]:  # noqa: ANN401 - any pytree
    """Return the leaves of a tree that are strings, by path."""
    named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_raveled)
    return {jax.tree_util.keystr(path): str(value) for path, value in named if isinstance(value, str)}


def make_abstract_state(init: Callable[[], Tree]) -> Tree:
    """Return the tree that `init` makes, without values; strings are kept.

    Returns:
        `jax.ShapeDtypeStruct` in place of JAX arrays, `AbstractHostLeaf` in place of NumPy's and of numbers.

    Raises:
        StateError: `init` needs concrete values of arrays, which a trace does not have; or a leaf is of no kind that
            comes back as it is.
    """
    made: list[Any] = []

    def make_arrays() -> list[Any]:
        # Taken out of the trace beside its results: eval_shape returns no strings, and JAX arrays for all numbers.
        made[:] = jax.tree_util.tree_flatten_with_path(init())
        return [leaf if isinstance(leaf, jax.Array) else None for _, leaf in made[0]]

    try:
        abstract = jax.eval_shape(make_arrays)
    except CONCRETIZATION_ERRORS as error:
        raise StateError(
            f"the function that makes the initial state cannot be traced ({str(error).splitlines()[0]}): expected "
            "jax.numpy where it works on JAX's arrays, and no decision that depends on their values. After a failure "
            "it is traced, for the shapes. What must be computed or loaded in another way, such as pretrained weights, "
            "do before rj.run with numpy, and return jnp.asarray of it"
        ) from error
    named, structure = made
    return structure.unflatten(
        [_make_abstract(path, leaf, array) for (path, leaf), array in zip(named, abstract, strict=True)]
    )


def _make_abstract(path: Any, leaf: object, array: jax.ShapeDtypeStruct | None) -> object:  # noqa: ANN401 - a path
    if array is not None or isinstance(leaf, str):
        return leaf if array is None else array
    return make_abstract_leaf(jax.tree_util.keystr(path), leaf)


def _flatten_leaf(path: str, value: object) -> FlatLeaf:
    if isinstance(value, RaveledArray):
        # A vector is on devices, or about to be placed there.
        return dataclasses.replace(_flatten_leaf(path, value.vector), raveled_shape=value.shape)
    if isinstance(value, jax.Array) and value.is_deleted():
        raise StateError(
            f"the state's leaf {path} was deleted: the array was donated to a program after it was committed. "
            "Commit the state that the program returned"
        )
    kept = keep_leaf(path, value)
    if isinstance(kept.value, jax.Array):
        # JAX makes the list of an array's shards at the first access; of two threads that access it at once, one may
        # see half of the list (jax 0.10.2). From here on the thread that copies a snapshot may access it, too.
        _ = kept.value.addressable_shards
    return FlatLeaf(path=path, value=kept.value, kind=kept.kind, key_impl=kept.key_impl)


def copy_to_host(state: FlatState) -> FlatState:
    """Return the state with its device arrays copied to host memory, where they outlive the devices.

    Raises:
        StateError: a leaf is sharded over several hosts, so that no host can copy all of it.
    """
    return dataclasses.replace(state, leaves=tuple(map(_copy_to_host, state.leaves)))


def copy_whole_to_host(state: FlatState) -> FlatState:
    """Return the state with those leaves copied to host memory of which this host has all."""
    leaves = [
        leaf if isinstance(leaf.value, jax.Array) and not _is_whole_here(leaf.value) else _copy_to_host(leaf)
        for leaf in state.leaves
    ]
    return dataclasses.replace(state, leaves=tuple(leaves))


def is_in_shards(array: jax.Array) -> bool:
    """Return whether an array is sharded over hosts, none of which has all of it."""
    return not array.is_fully_addressable and not array.is_fully_replicated


def _is_whole_here(array: jax.Array) -> bool:
    return array.is_fully_addressable or (array.is_fully_replicated and bool(array.addressable_shards))


def _copy_to_host(leaf: FlatLeaf) -> FlatLeaf:
    return dataclasses.replace(leaf, value=copy_leaf(leaf), raveled_shape=None)


def copy_leaf(leaf: FlatLeaf) -> np.ndarray:
    """Return a leaf in host memory, as `copy_array` does; a raveled one in its own shape.

    Raises:
        StateError: the leaf is sharded over several hosts.
    """
    array = copy_array(leaf.path, leaf.value)
    return array[: math.prod(leaf.shape)].reshape(leaf.shape) if leaf.raveled_shape is not None else array


def copy_array(path: str, value: jax.Array | np.ndarray) -> np.ndarray:
    """Return an array in host memory: a host array itself, of a device array a copy.

    The copy is never a view: on CPU `np.asarray` of a device array shares its memory.

    Raises:
        StateError: the array is sharded over several hosts.
    """
    if isinstance(value, np.ndarray):
        return value
    if value.is_fully_addressable:
        return np.array(value)
    if _is_whole_here(value):
        return np.array(value.addressable_data(0))
    return assemble_array(path, value)


def assemble_array(path: str, value: jax.Array) -> np.ndarray:
    """Return the global array, assembled from the shards on this host's devices.

    Raises:
        StateError: this host does not have all shards.
    """
    array = np.empty(value.shape, value.dtype)
    covered = np.zeros(value.shape, bool)
    for shard in value.addressable_shards:
        array[shard.index] = np.asarray(shard.data)
        covered[shard.index] = True
    if not covered.all():
        raise StateError(
            f"the state's leaf {path} is sharded over several hosts ({value.sharding}), so no single host has "
            "all of it. Replicate the state over hosts: shard it over the devices of one host only"
        )
    return array
