"""The live hosts' devices as a grid, and a tree's leaves as one vector on it.

Two small programs on this host's devices: *pack* concatenates leaves of one dtype, sharded over the host's devices;
*unpack* restores them. The programs in between, over all hosts, do not depend on the model.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.jax_runtime.live_processes import get_seat

HOST_AXIS, LOCAL_AXIS = "host", "local"
MAX_GRIDS = 8
"""Worlds whose programs are kept in memory: the present one, and those that it may become by a loss or a return."""


class HostGrid:
    """One row of devices for each host, in the order of their processes.

    Each host gives the same number of devices, its first ones: as many as the host with the fewest devices has.

    Leaves are replicated over a host's row; or, `in_shards`, sharded along dim 0 over its devices, each of which then
    packs its own shards, so that no device has those of another.

    Attributes:
        mesh: all rows, with the axes (HOST_AXIS, LOCAL_AXIS).
        local_mesh: this host's row, with the axis LOCAL_AXIS.
        num_hosts: the number of rows.
        host_index: position of this host's row.
        device_counts: for each host the number of all its devices, in its row or not.
        in_shards: how leaves are on a host's row, see above.
    """

    def __init__(self, devices: Sequence[Device], process_index: int, *, in_shards: bool = False) -> None:
        self.in_shards = in_shards
        by_host: dict[int, list[Device]] = {}
        for device in devices:
            by_host.setdefault(device.process_index, []).append(device)
        self.device_counts = tuple(len(by_host[index]) for index in sorted(by_host))
        width = min(self.device_counts)
        self.mesh = Mesh(
            np.array([by_host[index][:width] for index in sorted(by_host)]), (HOST_AXIS, LOCAL_AXIS)
        )
        self.num_hosts = len(by_host)
        self.host_index = sorted(by_host).index(process_index)
        self.local_mesh = Mesh(np.array(by_host[process_index][:width]), (LOCAL_AXIS,))

    def pack(self, leaves: Sequence[Any]) -> jax.Array:
        """Return [hosts, n]: the leaves of each host, which are of one dtype, concatenated.

        Sharded over hosts and over a host's devices; n is padded to a multiple of the latter.
        """
        # Replicated first: then each device cuts its own run of the vector, and nothing moves between devices.
        placed = [jax.device_put(leaf, self.leaf_sharding) for leaf in leaves]
        packed = _choose_pack(self)(placed)
        return jax.make_array_from_single_device_arrays(
            (self.num_hosts, packed.shape[1]),
            NamedSharding(self.mesh, P(HOST_AXIS, LOCAL_AXIS)),
            [shard.data for shard in packed.addressable_shards],
        )

    @property
    def leaf_sharding(self) -> NamedSharding:
        """How leaves are on this host's row."""
        return NamedSharding(self.local_mesh, P(LOCAL_AXIS) if self.in_shards else P())

    def compile_pack(self, leaves: Sequence[Any]) -> None:
        """Compile what `pack` calls for leaves of these shapes and one dtype."""
        dtype = jnp.result_type(leaves[0])
        _choose_pack(self).lower(
            [jax.ShapeDtypeStruct(jnp.shape(leaf), dtype, sharding=self.leaf_sharding) for leaf in leaves]
        ).compile()

    def compile_unpack(self, leaves: Sequence[Any]) -> None:
        """Compile what `unpack` calls for leaves of these shapes and one dtype."""
        shapes = tuple(jnp.shape(leaf) for leaf in leaves)
        make_reader(self, shapes, list).lower(self.abstract_local(leaves)).compile()

    def abstract_pack(self, leaves: Sequence[Any]) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and sharding of what `pack` returns for leaves of these shapes."""
        size = sum(math.prod(jnp.shape(leaf)) for leaf in leaves)
        # Padded as `_pack` pads (shards need none): else another program is compiled ahead than is called.
        padded = size + -size % self.local_mesh.size
        return jax.ShapeDtypeStruct(
            (self.num_hosts, padded),
            jnp.result_type(leaves[0]),
            sharding=NamedSharding(self.mesh, P(HOST_AXIS, LOCAL_AXIS)),
        )

    def abstract_local(self, leaves: Sequence[Any]) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and sharding of what `unpack` takes for leaves of these shapes."""
        packed = self.abstract_pack(leaves)
        return jax.ShapeDtypeStruct(
            packed.shape[1:], packed.dtype, sharding=NamedSharding(self.local_mesh, P(LOCAL_AXIS))
        )

    def unpack(self, flat: jax.Array, origins: Sequence[Any]) -> list[jax.Array]:
        """Return the leaves in a vector [n], sharded over this host's devices, with the shapes and shardings of their
        origins.

        An equivalent sharding on the same devices would not do: an update that takes the sums and the state would
        return a state of another sharding, and every program of the step would be compiled again for it.
        """
        shapes = tuple(jnp.shape(origin) for origin in origins)
        found = make_reader(self, shapes, list)(flat)
        return [reshard_like(origin, leaf) for origin, leaf in zip(origins, found, strict=True)]

    def gather(self, rows: jax.Array) -> jax.Array:
        """Return all rows of [hosts, n], sharded over both axes, as this host's own array sharded over n, computed."""
        return self.to_local(collective_thread.run(_gather(self.mesh), rows))

    def compile_gather(self, rows: jax.ShapeDtypeStruct) -> None:
        """Compile what `gather` calls for such rows."""
        _make_gather(self.mesh).lower(rows).compile()

    def compile_join_slices(self, slices: jax.ShapeDtypeStruct, size: int) -> None:
        """Compile what `join_slices` calls for what was gathered from such slices."""
        _join(self.local_mesh, size).lower(
            jax.ShapeDtypeStruct(
                slices.shape, slices.dtype, sharding=NamedSharding(self.local_mesh, P(None, LOCAL_AXIS))
            )
        ).compile()

    def join_slices(self, slices: jax.Array, size: int) -> jax.Array:
        """Return [size] from [hosts, n / hosts], where each device has the slices of its own part, without padding."""
        return _join(self.local_mesh, size)(slices)

    def to_local(self, everywhere: jax.Array) -> jax.Array:
        """Return an array, replicated over hosts and sharded over their devices along its last dim, as this host's."""
        spec = P(*[None] * (everywhere.ndim - 1), LOCAL_AXIS)
        return jax.make_array_from_single_device_arrays(
            everywhere.shape,
            NamedSharding(self.local_mesh, spec),
            [shard.data for shard in everywhere.addressable_shards],
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveHosts:
    """The live hosts with all of their devices, in the order of their process indexes.

    Attributes:
        host_index: position of this host among them.
        grid: rows of the devices that take part in reductions, which may be fewer.
    """

    process_indexes: tuple[int, ...]
    devices_by_host: tuple[tuple[Device, ...], ...]
    host_index: int
    grid: HostGrid

    @property
    def seats(self) -> list[Seat]:
        """Where each host is in the world."""
        return [get_seat(devices[0]) for devices in self.devices_by_host]

    @classmethod
    def from_devices(cls, devices: Sequence[Device], process_index: int) -> "LiveHosts":
        """Return the hosts of these devices; `process_index` is that of this worker."""
        by_process: dict[int, list[Device]] = {}
        for device in devices:
            by_process.setdefault(device.process_index, []).append(device)
        indexes = sorted(by_process)
        return cls(
            process_indexes=tuple(indexes),
            devices_by_host=tuple(tuple(by_process[index]) for index in indexes),
            host_index=indexes.index(process_index),
            grid=HostGrid(devices, process_index),
        )


def group_by_dtype(leaves: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the positions of leaves that can be packed into one vector."""
    groups: dict[Any, list[int]] = {}
    for position, leaf in enumerate(leaves):
        groups.setdefault(jnp.result_type(leaf), []).append(position)
    yield from groups.values()


def reshard_like(origin: object, total: jax.Array) -> jax.Array:
    """Return `total`, which is replicated over this host's row, with the sharding of `origin`."""
    if not isinstance(origin, jax.Array) or origin.sharding == total.sharding:
        return total
    by_device = {shard.device: shard.data for shard in total.addressable_shards}
    if not origin.is_fully_replicated or not origin.sharding.addressable_devices <= by_device.keys():
        return jax.device_put(total, origin.sharding)
    # Each of these devices has a copy already: the new array is made of those, and nothing moves.
    copies = [by_device[device] for device in origin.sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(origin.shape, origin.sharding, copies)


def stack_shards(leaf: jax.Array, local: Mesh) -> jax.Array:
    """Return this host's shards of a leaf, in the order of its devices, as one array that is sharded along dim 0.

    Nothing moves.
    """
    by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
    shards = [by_device[device] for device in local.devices.flat]
    first, *others = shards[0].shape
    sharding = NamedSharding(local, P(LOCAL_AXIS))
    return jax.make_array_from_single_device_arrays((len(shards) * first, *others), sharding, shards)


def _make_gather(mesh: Mesh) -> Any:  # noqa: ANN401 - a jitted function
    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P(None, LOCAL_AXIS)))
    # An identity whose result is replicated over hosts: the compiler makes one all-gather of it.
    def gather(rows: jax.Array) -> jax.Array:
        return rows

    return gather


_gather = functools.lru_cache(MAX_GRIDS)(_make_gather)


def _choose_pack(grid: HostGrid) -> Any:  # noqa: ANN401 - a jitted function
    return (pack_shards if grid.in_shards else _pack)(grid.local_mesh)


@functools.cache
def pack_shards(local: Mesh) -> Any:  # noqa: ANN401 - a jitted function
    """Return a program that concatenates each device's shards, without communication: [1, n] of this host's row."""

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=local.abstract_mesh,  # else its trace would refer to the devices
        in_specs=P(LOCAL_AXIS),
        out_specs=P(None, LOCAL_AXIS),
        check_vma=False,
    )
    def pack(shards: list[jax.Array]) -> jax.Array:
        return jnp.concatenate([shard.reshape(-1) for shard in shards])[None]

    return pack


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
        # [hosts, devices k] -> [devices, hosts k]: each device's slices from all hosts, in order. `add_in_order` pads
        # every device's part on its own, so the padding is at the end of each row.
        by_device = slices.reshape(slices.shape[0], local.size, -1).swapaxes(0, 1).reshape(local.size, -1)
        return by_device[:, : size // local.size].reshape(-1)

    return join


def make_reader(
    grid: HostGrid, shapes: tuple[tuple[int, ...], ...], read: Callable[..., list[jax.Array]]
) -> Any:  # noqa: ANN401 - a jitted function
    """Return a program that cuts the leaves out of a vector [n], sharded over a host's row, and reads them.

    It is independent of other hosts, so that a change of their number compiles nothing again.

    Args:
        read: makes the results of the list of leaves, and of what else the program is called with; a function of a
            module, or one that is kept, since programs are cached by it.
    """
    return _make_reader(grid.local_mesh, shapes, read, grid.in_shards)


@functools.cache
def _make_reader(
    local: Mesh,
    shapes: tuple[tuple[int, ...], ...],
    read: Callable[..., list[jax.Array]],
    in_shards: bool,
) -> Any:  # noqa: ANN401 - a jitted function
    if in_shards:
        own = tuple((shape[0] // local.size, *shape[1:]) for shape in shapes)

        @jax.jit
        def read_shards(flat: jax.Array, *others: Any) -> list[jax.Array]:  # noqa: ANN401 - arrays
            return jax.shard_map(
                lambda part, *others: read(cut_vector(part, own), *others),
                mesh=local.abstract_mesh,  # else its trace would refer to the devices
                in_specs=(P(LOCAL_AXIS), *[P()] * len(others)),
                out_specs=P(LOCAL_AXIS),
                check_vma=False,
            )(flat, *others)

        return read_shards
    everywhere = NamedSharding(local, P())

    @functools.partial(jax.jit, out_shardings=everywhere)
    def read_whole(flat: jax.Array, *others: Any) -> list[jax.Array]:  # noqa: ANN401 - arrays
        flat = jax.lax.with_sharding_constraint(flat, everywhere)  # once, and not for each leaf
        return read(cut_vector(flat, shapes), *others)

    return read_whole


def cut_vector(flat: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Return the arrays of these shapes that follow each other in a vector, which may have padding at its end."""
    leaves, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        leaves.append(flat[start : start + size].reshape(shape))
        start += size
    return leaves


def clear_caches() -> None:
    """Drop every cached program and mesh, before their devices are destroyed."""
    for cache in (_gather, _pack, pack_shards, _join, _make_reader):
        cache.cache_clear()
