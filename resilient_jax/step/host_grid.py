"""The live hosts' devices as a grid, and a tree's leaves as one vector on it.

Two small programs on this host's devices: *pack* lays leaves of one dtype end to end, cut over the host's devices;
*unpack* restores them. What is between, over all hosts, knows nothing of the model.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.jax_runtime.jaxlib_types import Device

HOST_AXIS, LOCAL_AXIS = "host", "local"


class HostGrid:
    """Hosts down, devices of a host across.

    The devices are taken in the order of their process; each host gives the same number of them, the first ones, as
    many as the host with the fewest has.

    Attributes:
        mesh: all of them, axes (HOST, LOCAL).
        local: those of this host, axis LOCAL.
        hosts: how many hosts.
        row: this host's place among them.
    """

    def __init__(self, devices: Sequence[Device], process_index: int) -> None:
        by_host: dict[int, list[Device]] = {}
        for device in devices:
            by_host.setdefault(device.process_index, []).append(device)
        width = min(len(of_host) for of_host in by_host.values())
        self.mesh = Mesh(
            np.array([by_host[index][:width] for index in sorted(by_host)]), (HOST_AXIS, LOCAL_AXIS)
        )
        self.num_hosts = len(by_host)
        self.host_index = sorted(by_host).index(process_index)
        self.local_mesh = Mesh(np.array(by_host[process_index][:width]), (LOCAL_AXIS,))

    def pack(self, leaves: Sequence[Any]) -> jax.Array:
        """[hosts, n]: all leaves, which are of one dtype, end to end, with their likes on the other hosts.

        Cut over a host's devices; n is filled up to a multiple of them.
        """
        everywhere = NamedSharding(self.local_mesh, P())
        packed = _pack(self.local_mesh)([jax.device_put(leaf, everywhere) for leaf in leaves])
        return jax.make_array_from_single_device_arrays(
            (self.num_hosts, packed.shape[1]),
            NamedSharding(self.mesh, P(HOST_AXIS, LOCAL_AXIS)),
            [shard.data for shard in packed.addressable_shards],
        )

    def abstract_pack(self, leaves: Sequence[Any]) -> jax.ShapeDtypeStruct:
        """What `pack` gives for leaves of these shapes."""
        size = sum(math.prod(jnp.shape(leaf)) for leaf in leaves)
        whole = size + -size % self.local_mesh.size
        return jax.ShapeDtypeStruct(
            (self.num_hosts, whole),
            jnp.result_type(leaves[0]),
            sharding=NamedSharding(self.mesh, P(HOST_AXIS, LOCAL_AXIS)),
        )

    def unpack(self, flat: jax.Array, origins: Sequence[Any]) -> list[jax.Array]:
        """The leaves in a vector [n] that is cut over this host's devices; each gets the shape of its origin, and lies
        where that lies.

        With the very sharding, not just on the same devices: an update that takes the sums and the state would
        else give a state of another sharding, and every program of the step would be compiled again for it.
        """
        shapes = tuple(jnp.shape(origin) for origin in origins)
        found = _unpack(self.local_mesh, shapes)(flat)
        return [_lay_like(origin, leaf) for origin, leaf in zip(origins, found, strict=True)]

    def gather(self, rows: jax.Array) -> jax.Array:
        """[hosts, n], cut over both, as this host's own array: every row, cut over this host's devices."""
        return self.to_local(_gather(self.mesh)(rows))

    def compile_gather(self, rows: jax.ShapeDtypeStruct) -> None:
        """Compiles what `gather` calls for such rows."""
        _make_gather(self.mesh).lower(rows).compile()

    def compile_join_slices(self, slices: jax.ShapeDtypeStruct, size: int) -> None:
        """Compiles what `join` calls for what was gathered from such slices."""
        _join(self.local_mesh, size).lower(
            jax.ShapeDtypeStruct(
                slices.shape, slices.dtype, sharding=NamedSharding(self.local_mesh, P(None, LOCAL_AXIS))
            )
        ).compile()

    def join_slices(self, slices: jax.Array, size: int) -> jax.Array:
        """[size] of [hosts, n / hosts], where each device has as many slices of its part; what filled them up goes."""
        return _join(self.local_mesh, size)(slices)

    def to_local(self, everywhere: jax.Array) -> jax.Array:
        """An array that all hosts have, its last dim cut over a host's devices, as this host's own."""
        spec = P(*[None] * (everywhere.ndim - 1), LOCAL_AXIS)
        return jax.make_array_from_single_device_arrays(
            everywhere.shape,
            NamedSharding(self.local_mesh, spec),
            [shard.data for shard in everywhere.addressable_shards],
        )


def group_by_dtype(leaves: Sequence[Any]) -> Iterator[list[int]]:
    """Groups of leaves that can be packed into one vector."""
    groups: dict[Any, list[int]] = {}
    for position, leaf in enumerate(leaves):
        groups.setdefault(jnp.result_type(leaf), []).append(position)
    yield from groups.values()


def _lay_like(origin: object, total: jax.Array) -> jax.Array:
    """`total`, which every device of the grid's here has, with the sharding of `origin`."""
    if not isinstance(origin, jax.Array) or origin.sharding == total.sharding:
        return total
    by_device = {shard.device: shard.data for shard in total.addressable_shards}
    if not origin.is_fully_replicated or not origin.sharding.addressable_devices <= by_device.keys():
        return jax.device_put(total, origin.sharding)
    parts = [by_device[device] for device in origin.sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(origin.shape, origin.sharding, parts)


def _make_gather(mesh: Mesh) -> Any:  # noqa: ANN401 - a jitted function
    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P(None, LOCAL_AXIS)))
    def gather(rows: jax.Array) -> jax.Array:
        return rows

    return gather


_gather = functools.cache(_make_gather)


@functools.cache
def _pack(local: Mesh) -> Any:  # noqa: ANN401 - a jitted function
    @functools.partial(jax.jit, out_shardings=NamedSharding(local, P(None, LOCAL_AXIS)))
    def pack(leaves: list[jax.Array]) -> jax.Array:
        flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
        return jnp.pad(flat, (0, -flat.shape[0] % local.size))[None]

    return pack


@functools.cache
def _join(local: Mesh, size: int) -> Any:  # noqa: ANN401 - a jitted function
    @functools.partial(jax.jit, out_shardings=NamedSharding(local, P(LOCAL_AXIS)))
    def join(slices: jax.Array) -> jax.Array:
        by_device = slices.reshape(slices.shape[0], local.size, -1).swapaxes(0, 1).reshape(local.size, -1)
        return by_device[:, : size // local.size].reshape(-1)

    return join


@functools.cache
def _unpack(local: Mesh, shapes: tuple[tuple[int, ...], ...]) -> Any:  # noqa: ANN401 - a jitted function
    """Knows nothing of the other hosts: it has many slices, and is not compiled again when their number changes."""

    everywhere = NamedSharding(local, P())

    @functools.partial(jax.jit, out_shardings=everywhere)
    def unpack(flat: jax.Array) -> list[jax.Array]:
        flat = jax.lax.with_sharding_constraint(flat, everywhere)  # once, and not for each leaf
        leaves, start = [], 0
        for shape in shapes:
            size = math.prod(shape)
            leaves.append(flat[start : start + size].reshape(shape))
            start += size
        return leaves

    return unpack


def clear_caches() -> None:
    """Drops every cached program and mesh: their devices are about to go."""
    for cache in (_gather, _pack, _join, _unpack):
        cache.cache_clear()
