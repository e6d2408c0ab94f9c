"""Arrays of a step under way in host memory, while the world of their devices goes and the next one is formed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.sharding.stage_sharding import StageSharding
from resilient_jax.state.flat_state import is_random_key

Tree = Any
"""A pytree of arrays."""


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayCopy:
    """An array in host memory; a leaf of a tree.

    Attributes:
        value: of the array, complete; of random keys their raw data.
        spec: over the devices that it was on.
        key_impl: the implementation of random keys; None for other arrays.
    """

    value: np.ndarray
    spec: P
    key_impl: str | None = None


def can_copy(tree: Tree) -> bool:
    """Return whether `place_copies` would place each array as it is now: not if XLA alone knows how it is sharded."""
    known = (NamedSharding, SingleDeviceSharding)
    return all(isinstance(leaf.sharding, known) for leaf in jax.tree.leaves(tree))


def copy_to_host(tree: Tree) -> Tree:
    """Return copies that hold no memory of the devices' backend."""
    return jax.tree.map(_copy, tree)


def place_copies(tree: Tree, sharding: StageSharding) -> Tree:
    """Return copies on the devices of a stage of the same axes, as the arrays were."""
    return jax.tree.map(lambda copy: jax.device_put(_unwrap(copy), sharding.place(copy.spec)), tree)


def _copy(array: jax.Array) -> ArrayCopy:
    spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else P()
    # np.array copies. On CPU np.asarray would be a view of a buffer that the backend owns.
    if is_random_key(array):
        return ArrayCopy(np.array(jax.random.key_data(array)), spec, str(jax.random.key_impl(array)))
    return ArrayCopy(np.array(array), spec)


def _unwrap(copy: ArrayCopy) -> Any:  # noqa: ANN401 - an array of any kind
    if copy.key_impl is None:
        return copy.value
    return jax.random.wrap_key_data(jnp.asarray(copy.value), impl=copy.key_impl)
