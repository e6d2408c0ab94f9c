"""Arrays of a step under way in host memory, while the world of their devices goes and the next one is formed."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.sharding.stage_sharding import StageSharding
from resilient_jax.state.leaf_kinds import give_back, keep_leaf

Tree = Any
"""A pytree of arrays."""


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayCopy:
    """An array in host memory; a leaf of a tree.

    Attributes:
        value: complete array; of random keys the raw data.
        spec: spec over the mesh axes of the devices that the array was on; empty if that was a single device.
        leaf: kind of the leaf, and the implementation of random keys.
    """

    value: np.ndarray
    spec: P
    leaf: LeafSpec


def can_copy(tree: Tree) -> bool:
    """Return whether `place_copies` would place each array as it is now: not if XLA alone knows how it is sharded."""
    known = (NamedSharding, SingleDeviceSharding)
    return all(isinstance(leaf.sharding, known) for leaf in jax.tree.leaves(tree))


def copy_to_host(tree: Tree) -> Tree:
    """Return copies that hold no memory of the devices' backend."""
    return jax.tree.map(_copy, tree)


def place_copies(tree: Tree, sharding: StageSharding) -> Tree:
    """Return copies on the devices of a stage of the same axes, as the arrays were."""
    return jax.tree.map(lambda copy: _place(copy, sharding.place(copy.spec)), tree)


def _copy(array: jax.Array) -> ArrayCopy:
    spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else P()
    kept = keep_leaf("", array)
    # np.array copies. On CPU np.asarray would be a view of a buffer that the backend owns.
    value = np.array(kept.value)
    return ArrayCopy(value, spec, LeafSpec("", value.dtype.name, value.shape, kept.key_impl, kept.kind))


def _place(copy: ArrayCopy, sharding: Sharding) -> jax.Array:
    if copy.leaf.key_impl is not None:
        return jax.device_put(give_back(copy.leaf, copy.value), sharding)
    return give_back(copy.leaf, jax.device_put(copy.value, sharding))
