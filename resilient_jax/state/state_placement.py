"""A flat state, or one that was just initialized, as the user's tree on the devices of the present mesh."""

from typing import Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from resilient_jax.errors import StateError
from resilient_jax.sharding.raveled_array import compute_padded_size
from resilient_jax.state.flat_state import (
    FlatLeaf,
    FlatState,
    ShardingRule,
    copy_leaf,
    copy_whole_to_host,
    flatten_state,
    flatten_strings,
    make_abstract_state,
)
from resilient_jax.state.leaf_kinds import HOST_KINDS, place_value
from resilient_jax.state.tree_match import MatchedLeaf, MatchedTree, list_leaf_specs, match_tree

Tree = TypeVar("Tree")
EXPECTED_STATE: Final = "the state that the init function makes. Commit the same tree that init makes"
"""For errors."""
PLACEHOLDER: Final = 2.0**-6
"""Of a placeholder's floats: neither zero nor negative, so that variances, norms and quotients of them are numbers."""


def restore_state(abstract: Tree, state: FlatState, sharding: ShardingRule | None) -> Tree:
    """Return the state in the tree of `abstract`, placed on the present mesh; each leaf is of the kind it was.

    Args:
        abstract: abstract tree as `make_abstract_state` returns it.
        state: the committed state; leaves that already have the right sharding are used without a copy.
        sharding: sharding of each JAX array; None keeps a leaf's devices, or takes this process's first device.

    Raises:
        StateError: structure, shape or dtype differ; the message names the first leaves.
    """
    return _restore(abstract, state, sharding, is_initial=False)


def is_here(abstract: object, state: FlatState, sharding: ShardingRule | None) -> bool:
    """Return whether this host has all that it needs of a state in shards to place it, where it needs it.

    Raises:
        StateError: as `restore_state`.
    """
    return all(_is_here(leaf.value, wanted) for leaf, wanted in _match(abstract, state, sharding)[0])


def _is_here(value: jax.Array | np.ndarray, wanted: MatchedLeaf) -> bool:
    if isinstance(value, np.ndarray) or wanted.sharding is None:
        return True
    # Also on no device of this host, which needs nothing of it then.
    is_whole = value.is_fully_replicated and bool(value.addressable_shards)
    is_same_shape = value.shape == _find_shape(wanted, wanted.sharding)
    return value.is_fully_addressable or is_whole or (is_same_shape and _has_shards(value, wanted.sharding))


def _restore(abstract: Tree, state: FlatState, sharding: ShardingRule | None, *, is_initial: bool) -> Tree:
    pairs, matched = _match(abstract, state, sharding, is_initial=is_initial)
    return matched.build([_place(leaf, wanted) for leaf, wanted in pairs])


def _match(
    abstract: Tree, state: FlatState, sharding: ShardingRule | None, *, is_initial: bool = False
) -> tuple[list[tuple[FlatLeaf, MatchedLeaf]], MatchedTree[Tree]]:
    """Return the leaves of a state beside those of the wanted tree, and that tree."""
    leaves = {leaf.path: leaf for leaf in state.leaves}
    matched = match_tree(
        abstract,
        [leaf.spec for leaf in state.leaves],
        state.strings,
        sharding,
        source="the committed state",
        expected=EXPECTED_STATE,
        is_initial=is_initial,
    )
    return [(leaves[wanted.spec.path], wanted) for wanted in matched.leaves], matched


def place_initial_state(tree: Tree, sharding: ShardingRule | None) -> Tree:
    """Return a state that the init function just made, placed like a restored one.

    With a sharding NumPy's arrays and numbers become JAX arrays, as `leaf_kinds` says. JAX arrays are also committed to
    their devices like restored ones: a program that was compiled for uncommitted arrays is compiled again for committed
    ones, and that would be part of the stall after the first failure.
    """
    abstract = make_abstract_state(lambda: tree)
    return _restore(abstract, copy_whole_to_host(flatten_state(0, tree)), sharding, is_initial=True)


def place_placeholder_state(abstract: Tree, sharding: ShardingRule | None) -> Tree:
    """Return a state of the right shapes, placed like a restored one, that cost no program to make.

    Floats are all equal; integers, booleans and the data of random keys are zero; strings are those of `abstract`.
    """
    leaves = []
    for spec in list_leaf_specs(abstract):
        dtype = jnp.dtype(spec.dtype)
        value = np.full(spec.shape, PLACEHOLDER if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)
        leaves.append(FlatLeaf(path=spec.path, value=value, kind=spec.kind, key_impl=spec.key_impl))
    state = FlatState(step=0, leaves=tuple(leaves), strings=flatten_strings(abstract))
    return _restore(abstract, state, sharding, is_initial=True)


def _place(leaf: FlatLeaf, wanted: MatchedLeaf) -> jax.Array | np.ndarray:
    if wanted.spec.kind in HOST_KINDS:
        return copy_leaf(leaf)
    value, sharding = place_value(leaf.path, leaf.value, wanted.spec), wanted.sharding
    if isinstance(value, np.ndarray):
        return _place_array(value, wanted)
    if sharding is None:
        if value.is_fully_addressable and (leaf.raveled_shape is not None) == wanted.is_raveled:
            return value
        raise StateError(
            f"the state's leaf {leaf.path} is on a mesh of several hosts ({value.sharding}) that has changed, expected "
            "a sharding for the present one: restore_or_init(init, sharding=NamedSharding(world.mesh(...), ...))"
        )
    shape = _find_shape(wanted, sharding)
    if value.shape == shape:
        if value.sharding == sharding:
            return value
        if (moved := _move_shards(value, sharding)) is not None:
            return moved
    # Other shards, or other padding: a copy through host memory.
    return _place_array(copy_leaf(leaf), wanted)


def _place_array(array: np.ndarray, wanted: MatchedLeaf) -> jax.Array:
    """Return an array in host memory with the wanted sharding, or as a vector with it, padded with zeros."""
    sharding = wanted.sharding or SingleDeviceSharding(jax.local_devices()[0])
    shape = _find_shape(wanted, sharding)
    if not wanted.is_raveled:
        return jax.make_array_from_callback(shape, sharding, lambda index: array[index], dtype=array.dtype)
    elements, length = array.reshape(-1), sharding.shard_shape(shape)[0]

    def read_range(index: tuple[slice, ...] | None) -> np.ndarray:
        found = elements[index or ...]
        return np.concatenate([found, np.zeros(length - found.size, found.dtype)])

    return jax.make_array_from_callback(shape, sharding, read_range, dtype=array.dtype)


def _find_shape(wanted: MatchedLeaf, sharding: Sharding) -> tuple[int, ...]:
    """Return the shape of the array on devices: of a raveled array, that of its padded vector."""
    if not wanted.is_raveled:
        return wanted.spec.shape
    return (compute_padded_size(wanted.spec.shape, len(sharding.device_set)),)


def _move_shards(value: jax.Array, sharding: Sharding) -> jax.Array | None:
    """Return the array with another sharding, made of the same shards; None: they do not fit."""
    if not _has_shards(value, sharding):
        return None
    shards = {shard.device: shard.data for shard in value.addressable_shards}
    wanted = sharding.addressable_devices_indices_map(value.shape)
    return jax.make_array_from_single_device_arrays(
        value.shape, sharding, [shards[device] for device in wanted], dtype=value.dtype
    )


def _has_shards(value: jax.Array, sharding: Sharding) -> bool:
    """Return whether each of this host's devices has the shard of an array that it has with another sharding."""
    indexes = {shard.device: shard.index for shard in value.addressable_shards}
    return all(
        device in indexes and _is_same_index(indexes[device], index, value.shape)
        for device, index in sharding.addressable_devices_indices_map(value.shape).items()
    )


def _is_same_index(one: tuple[slice, ...], other: tuple[slice, ...] | None, shape: tuple[int, ...]) -> bool:
    if other is None:
        return False
    return all(a.indices(n) == b.indices(n) for a, b, n in zip(one, other, shape, strict=True))
