"""The sum of the squares of arrays in shards on replicas: each element of the first replica once."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from resilient_jax.jax_runtime.jaxlib_types import Device


def add_squares(mesh: Mesh, leaves: Sequence[jax.Array]) -> float:
    """Return the part of the sum that this host is to add up; 0: it has nothing of the first replica.

    Args:
        mesh: all replicas, the outermost axis, with the axes of each.
    """
    counted = _list_counted(mesh, leaves)
    by_device: dict[Device, list[jax.Array]] = {device: [] for device in counted}
    for position, leaf in enumerate(leaves):
        for shard in leaf.addressable_shards:
            if position in counted.get(shard.device, ()):
                by_device[shard.device].append(shard.data)
    return math.fsum(float(_sum_squares(arrays)) for arrays in by_device.values() if arrays)


def compile_squares(mesh: Mesh, leaves: Sequence[Any], device: Device) -> None:
    """Compile what any host of the first replica calls for arrays of these shapes, dtypes and shardings.

    Args:
        device: one of this host, in the place of any.
    """
    here = SingleDeviceSharding(device)
    for positions in set(map(tuple, _list_counted(mesh, leaves).values())):
        shards = [
            jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype, sharding=here)
            for leaf in (leaves[position] for position in positions)
        ]
        _sum_squares.lower(shards).compile()


def _list_counted(mesh: Mesh, leaves: Sequence[Any]) -> dict[Device, list[int]]:
    """Return for each device of the first replica the positions of the leaves whose shards on it count."""
    first = list(mesh.devices[0].flat)
    found: dict[Device, list[int]] = {}
    for position, leaf in enumerate(leaves):
        owners = {first[0]}
        if not leaf.sharding.is_fully_replicated:
            boxes = leaf.sharding.devices_indices_map(leaf.shape)
            owners = set({str(boxes[device]): device for device in reversed(first)}.values())
        for device in owners:
            found.setdefault(device, []).append(position)
    return found


@jax.jit
def _sum_squares(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.sum(jnp.square(array.astype(jnp.float32))) for array in arrays]).sum()
