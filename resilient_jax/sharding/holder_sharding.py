"""The sharding of an array that some hosts of a world have, each all of it, and the others have nothing of.

JAX has no such kind, and hosts may have unequal numbers of devices, over which no mesh of all holders could be. So on
each holder it is an array over the devices of that host alone, and elsewhere one over a device of another host. The
name of the mesh's first axis, whose size is 1, says which hosts hold it: it tells it from an array that a single host
has for itself, as every other host has one.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.jaxlib_types import Device

HOLDER_AXIS: Final = "holder"
"""How the name of the first axis begins: `holder <host> of <holder> <holder> ...`."""


class Holders(NamedTuple):
    """Who has an array.

    Attributes:
        host: this host, or another if this host does not have the array.
        hosts: hosts that have the array, in the same order on every host.
    """

    host: HostName
    hosts: tuple[HostName, ...]


def make_holder_mesh(hosts: Sequence[HostName], host: HostName, local: Mesh) -> Mesh:
    """Return the mesh of arrays that these hosts have, and no other.

    Args:
        hosts: hosts that have the arrays, in the same order on every host.
        host: this host, which is among them.
        local: mesh of this host's devices.
    """
    return _make_mesh(Holders(host, tuple(hosts)), local.devices, local)


def make_absent_mesh(hosts: Sequence[HostName], device: Device, local: Mesh) -> Mesh:
    """Return the mesh of arrays that these hosts have, and not this one.

    Args:
        hosts: hosts that have the arrays, in the same order on every host.
        device: a device of the first of these hosts.
        local: the mesh of this host's devices, whose axes the result has.
    """
    grid = np.array([device]).reshape((1,) * local.devices.ndim)
    return _make_mesh(Holders(hosts[0], tuple(hosts)), grid, local)


def _make_mesh(holders: Holders, grid: np.ndarray, local: Mesh) -> Mesh:
    name = f"{HOLDER_AXIS} {holders.host} of {' '.join(holders.hosts)}"
    return Mesh(grid[np.newaxis], (name, *map(str, local.axis_names)))


def find_holders_of(sharding: Sharding) -> Holders | None:
    """Return who has an array of a mesh of `make_holder_mesh` or `make_absent_mesh`; None: it has another sharding."""
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.axis_names:
        return None
    match str(sharding.mesh.axis_names[0]).split(" "):
        case [first, host, "of", *hosts] if first == HOLDER_AXIS:
            return Holders(HostName(host), tuple(map(HostName, hosts)))
        case _:
            return None


def make_holder_array(array: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """Return an array of this host as the one that all its holders have.

    Args:
        array: array on this host's devices, sharded by `spec`; shares its memory with the result.
        mesh: mesh of `make_holder_mesh`.
        spec: spec over the axes of each host.
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
        like: shape and dtype of the array.
        mesh: mesh of `make_absent_mesh`.
        spec: spec over the axes of each host.
    """
    return jax.make_array_from_single_device_arrays(
        like.shape, NamedSharding(mesh, spec), [], dtype=like.dtype
    )


def read_holder_array(array: jax.Array, local: Mesh) -> jax.Array | None:
    """Return this host's array of one that holders have; None: it has none.

    Args:
        local: mesh of this host's devices.
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
