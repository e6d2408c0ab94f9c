"""The sharding of an array that some hosts of a world have, each all of it, and the others have nothing of.

JAX has no such kind: it is an array over the devices of those hosts alone, replicated. The name of the mesh's axis
tells it from an array that a single host has for itself, as every other host has one.
"""

from collections.abc import Sequence
from typing import Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from resilient_jax.jax_runtime.jaxlib_types import Device

HOLDER_AXIS: Final = "holder"


def make_holder_sharding(devices: Sequence[Device]) -> NamedSharding:
    """Return the sharding of an array that each of these devices has, and no other.

    Args:
        devices: one of each host that holds the array, in the same order on every host.
    """
    return NamedSharding(Mesh(np.array(devices), (HOLDER_AXIS,)), P())


def is_holder_sharding(sharding: Sharding) -> bool:
    """Return whether a sharding is one of `make_holder_sharding`."""
    return isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == (HOLDER_AXIS,)


def make_holder_array(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return an array of this host as the one that all its holders have.

    Args:
        array: on the first device of this host, which is one of the sharding's; shares its memory with the result.
        sharding: of `make_holder_sharding`.
    """
    return jax.make_array_from_single_device_arrays(array.shape, sharding, [array], dtype=array.dtype)


def make_non_addressable_array(like: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
    """Return an array that other hosts have, which takes no memory here.

    Args:
        like: its shape and dtype.
        sharding: of `make_holder_sharding`, without a device of this host.
    """
    return jax.make_array_from_single_device_arrays(like.shape, sharding, [], dtype=like.dtype)
