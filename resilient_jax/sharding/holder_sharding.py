"""The sharding of an array that some hosts of a world have, each all of it, and the others have nothing of.

JAX has no such kind: it is an array over the devices of those hosts alone, replicated over hosts and maybe sharded over
the devices of each. The name of the mesh's first axis tells it from an array that a single host has for itself, as
every other host has one.
"""

from collections.abc import Sequence
from typing import Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from resilient_jax.jax_runtime.jaxlib_types import Device

HOLDER_AXIS: Final = "holder"


def make_holder_mesh(devices: Sequence[Sequence[Device]], local: Mesh) -> Mesh:
    """Return the mesh of arrays that these hosts have, and no other.

    Args:
        devices: of each host that has the arrays; hosts and devices in the same order on every host.
        local: the mesh of a host's devices, whose axes the devices of each host have.
    """
    grid = np.array([list(own) for own in devices]).reshape(len(devices), *local.devices.shape)
    return Mesh(grid, (HOLDER_AXIS, *map(str, local.axis_names)))


def is_holder_sharding(sharding: Sharding) -> bool:
    """Return whether a sharding is over a mesh of `make_holder_mesh`."""
    return isinstance(sharding, NamedSharding) and sharding.mesh.axis_names[:1] == (HOLDER_AXIS,)


def make_holder_array(array: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """Return an array of this host as the one that all its holders have.

    Args:
        array: on this host's devices, sharded by `spec`; shares its memory with the result.
        mesh: of `make_holder_mesh`, with these devices.
        spec: over the axes of each host.
    """
    return jax.make_array_from_single_device_arrays(
        array.shape,
        NamedSharding(mesh, spec),
        [shard.data for shard in array.addressable_shards],
        dtype=array.dtype,
    )


def make_non_addressable_array(like: jax.ShapeDtypeStruct, mesh: Mesh, spec: P) -> jax.Array:
    """Return an array that other hosts have, which takes no memory here.

    Args:
        like: its shape and dtype.
        mesh: of `make_holder_mesh`, without a device of this host.
        spec: over the axes of each host.
    """
    return jax.make_array_from_single_device_arrays(
        like.shape, NamedSharding(mesh, spec), [], dtype=like.dtype
    )


def read_holder_array(array: jax.Array, local: Mesh) -> jax.Array | None:
    """Return this host's array of one that holders have; None: it has none.

    Args:
        array: over a mesh of `make_holder_mesh`.
        local: the mesh of this host's devices.
    """
    shards = array.addressable_shards
    if not shards:
        return None
    if local.size == 1:
        return shards[0].data
    assert isinstance(array.sharding, NamedSharding)
    return jax.make_array_from_single_device_arrays(
        array.shape,
        NamedSharding(local, array.sharding.spec),
        [shard.data for shard in shards],
        dtype=array.dtype,
    )
