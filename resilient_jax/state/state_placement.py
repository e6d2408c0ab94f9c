"""A flat state, or one that was just initialized, as the user's tree on the devices of the present mesh."""

from typing import Final, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from resilient_jax.errors import StateError
from resilient_jax.state.flat_state import (
    FlatState,
    ShardingRule,
    copy_array,
    copy_to_host,
    flatten_state,
    make_abstract_state,
)
from resilient_jax.state.tree_match import match_tree

Tree = TypeVar("Tree")
EXPECTED_STATE: Final = "the state that the init function makes. Commit the same tree that init makes"
"""For errors."""


def restore_state(abstract: Tree, state: FlatState, sharding: ShardingRule | None) -> Tree:
    """Return the state in the tree of `abstract`, placed on the present mesh.

    Args:
        abstract: as `make_abstract_state` returns it.
        state: the committed state; leaves that already have the right sharding are used without a copy.
        sharding: of each leaf; None keeps a leaf's devices, or takes this process's first device.

    Raises:
        StateError: structure, shape or dtype differ; names the first leaves that do.
    """
    values = {leaf.path: leaf.value for leaf in state.leaves}
    matched = match_tree(
        abstract,
        [leaf.spec for leaf in state.leaves],
        state.strings,
        sharding,
        source="the committed state",
        expected=EXPECTED_STATE,
    )
    return matched.build([_place(spec.path, values[spec.path], target) for spec, target in matched.leaves])


def place_initial_state(tree: Tree, sharding: ShardingRule | None) -> Tree:
    """Return a state that the init function just made, placed like a restored one.

    Its arrays are also committed to their devices like restored ones: a program that was compiled for uncommitted
    arrays is compiled again for committed ones, and that would be part of the stall after the first failure.
    """
    abstract = make_abstract_state(lambda: tree)
    return restore_state(abstract, copy_to_host(flatten_state(0, tree)), sharding)


def _place(path: str, value: jax.Array | np.ndarray, sharding: Sharding | None) -> jax.Array:
    if isinstance(value, np.ndarray):
        if sharding is None:
            sharding = SingleDeviceSharding(jax.local_devices()[0])
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    if sharding is None:
        if value.is_fully_addressable:
            return value
        raise StateError(
            f"the state's leaf {path} is on a mesh of several hosts ({value.sharding}) that has changed, expected a "
            "sharding for the present one: restore_or_init(init, sharding=NamedSharding(world.mesh(...), ...))"
        )
    if value.sharding == sharding:
        return value
    return _move(path, value, sharding)


def _move(path: str, value: jax.Array, sharding: Sharding) -> jax.Array:
    """Return the array with another sharding: the same shards where they fit, else a copy through host memory."""
    shards = {shard.device: (shard.index, shard.data) for shard in value.addressable_shards}
    wanted = sharding.addressable_devices_indices_map(value.shape)
    if all(
        device in shards and _is_same_index(shards[device][0], index, value.shape)
        for device, index in wanted.items()
    ):
        return jax.make_array_from_single_device_arrays(
            value.shape, sharding, [shards[device][1] for device in wanted]
        )
    array = copy_array(path, value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: array[index])


def _is_same_index(one: tuple[slice, ...], other: tuple[slice, ...] | None, shape: tuple[int, ...]) -> bool:
    if other is None:
        return False
    return all(a.indices(n) == b.indices(n) for a, b, n in zip(one, other, shape, strict=True))
