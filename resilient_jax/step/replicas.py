"""Replicas of the model, each on one host, on several, or several on one host.

Between two microbatches totals are *local*: on the devices of one host. So is the state, or it is on a mesh of all
replicas. A replica takes a state to its own mesh for a microbatch (`to_replica`), and `step.accumulation_layout` takes
the result back. Nothing is moved, and what is sharded over the axes of a replica stays sharded.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import CallerError
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.sharding.placements import REPLICA_AXIS
from resilient_jax.step.assignment import ReplicaLocation, ReplicaShape

Tree = TypeVar("Tree")
_shards_lock = threading.Lock()
"""Held while the shards of an array are read. JAX makes the list of shards at the first read, and of two threads that
read at once (the replicas of a host, the same parameters) one may see half the list, or each shard twice. Seen in jax
0.10.2."""


class Replica:
    """One replica that this host belongs to.

    Attributes:
        mesh: devices with the axes of the replica's shape; a microbatch's examples are sharded over the first.
        rank: position of this host among those of the replica.
        data_shard: (k, n): this host has the k-th of n equal runs of rows of each microbatch.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        local: Sequence[Device],
        axes: Mapping[str, int],
    ) -> None:
        self.mesh = Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
        num_hosts, self.rank = len(devices) // len(local), devices.index(local[0]) // len(local)
        # Where an inner axis spans hosts, several of them have the same rows.
        num_runs = min(num_hosts, next(iter(axes.values())))
        self.data_shard = (self.rank * num_runs // num_hosts, num_runs)
        self._local = tuple(local)
        self._devices = frozenset(devices)
        self._replicated = NamedSharding(self.mesh, P())
        self._examples_axis = next(iter(axes))
        self._sharded = NamedSharding(self.mesh, P(self._examples_axis))

    @property
    def is_on_one_host(self) -> bool:
        """Whether all its devices are this host's, so that its programs wait for no other host."""
        return len(self._devices) == len(self._local)

    def to_replica(self, tree: Tree) -> Tree:
        """Return arrays on the replica's mesh, without moving anything.

        Args:
            tree: local arrays, equal on all hosts of the replica; or arrays on a mesh of all replicas.
        """
        # Arrays are placed also while a call is traced (`traced_call`), which could not follow it.
        with jax.ensure_compile_time_eval():
            return jax.tree.map(self._leaf_to_replica, tree)

    def _leaf_to_replica(self, leaf: Any) -> Any:  # noqa: ANN401 - any array
        if isinstance(leaf, jax.Array):
            if self._is_placed(leaf):
                return leaf
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                data = self._leaf_to_replica(jax.random.key_data(leaf))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            if (spec := self._get_local_spec(leaf)) is not None:
                by_device = _shards_by_device(leaf)
                shards = [by_device[device] for device in self._local]
                return jax.make_array_from_single_device_arrays(
                    leaf.shape, NamedSharding(self.mesh, spec), shards
                )
        local = _replicate_on(leaf, self._local)
        return jax.make_array_from_single_device_arrays(local[0].shape, self._replicated, local)

    def _is_placed(self, leaf: jax.Array) -> bool:
        """Whether programs on this mesh take the leaf as it is; another mesh of its devices would compile again."""
        where = leaf.sharding
        if where.device_set != self._devices:
            return False
        return self._get_local_spec(leaf) is None or (
            isinstance(where, NamedSharding) and where.mesh == self.mesh
        )

    def _get_local_spec(self, leaf: jax.Array) -> P | None:
        """Return the spec of a leaf on a mesh over replicas, if sharded over a replica's axes only."""
        where = leaf.sharding
        if not isinstance(where, NamedSharding):
            return None
        is_inside = self._devices <= where.device_set and self._list_axes(where.spec) <= set(self.mesh.shape)
        return where.spec if is_inside else None

    @staticmethod
    def _list_axes(spec: P) -> set[str]:
        return {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,)) if name}

    def place_batch(self, batch: Tree) -> Tree:
        """Return this host's rows of a microbatch, numpy arrays, as arrays that are sharded over the mesh along dim 0.

        Raises:
            CallerError: the rows cannot be sharded evenly.
        """
        return jax.tree.map(self._place_rows, batch)

    def describe_batch(self, batch: Tree) -> Tree:
        """Return the shapes of a complete microbatch, with the shardings that `place_batch` gives its arrays."""
        return jax.tree.map(self._describe_rows, batch)

    def _describe_rows(self, rows: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401 - any array or its shape
        dtype = jax.dtypes.canonicalize_dtype(rows.dtype)
        return jax.ShapeDtypeStruct(rows.shape, dtype, sharding=self._sharded)

    def _place_rows(self, rows: Any) -> jax.Array:  # noqa: ANN401 - any array
        rows = np.asarray(rows)
        num_shards = self.mesh.shape[self._examples_axis] // self.data_shard[1]
        if rows.ndim == 0 or rows.shape[0] % num_shards:
            found = f"{rows.shape[0]} rows" if rows.ndim else "a single number"
            raise CallerError(
                f"a microbatch: found {found} for this host, expected a multiple of {num_shards}, the shards that "
                "its replica has on this host. Change the microbatch's size or the devices per host"
            )
        # A replica on one host needs no global array: all of its devices are here.
        if self.is_on_one_host:
            return jax.device_put(rows, self._sharded)
        with jax.ensure_compile_time_eval():
            return jax.make_array_from_process_local_data(
                self._sharded, rows, (rows.shape[0] * self.data_shard[1], *rows.shape[1:])
            )


def is_on_replicas(leaf: jax.Array) -> bool:
    """Return whether an array is on a mesh of all replicas, each of which has all of it."""
    where = leaf.sharding
    return (
        isinstance(where, NamedSharding)
        and REPLICA_AXIS in where.mesh.axis_names
        and REPLICA_AXIS not in jax.tree.leaves(tuple(where.spec))
    )


def _shards_by_device(leaf: jax.Array) -> dict[Device, jax.Array]:
    with _shards_lock:
        return {shard.device: shard.data for shard in leaf.addressable_shards}


def _replicate_on(leaf: Any, devices: Sequence[Device]) -> list[jax.Array]:  # noqa: ANN401 - any array
    """Return a copy on each device, without a transfer where there is one already."""
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
        by_device = _shards_by_device(leaf)
        return [by_device[d] if d in by_device else jax.device_put(leaf, d) for d in devices]
    return [jax.device_put(leaf, device) for device in devices]


def make_replica_mesh(
    locations: Sequence[ReplicaLocation],
    devices_by_host: Sequence[Sequence[Device]],
    replica_shape: ReplicaShape,
) -> Mesh:
    """Return the mesh of all replicas: `REPLICA_AXIS`, and then the axes of each; the same on all hosts.

    Raises:
        CallerError: a host has several replicas, or hosts differ in axes.
    """
    if replica_shape.axes_by_devices or any(location.slot for location in locations):
        raise CallerError(
            f"mesh: found {replica_shape}, expected replicas of one host or more, alike on all: "
            "ReplicaShape(hosts=2, axes=...). Where a host has several, its state is on world.local_mesh"
        )
    rows = [_list_devices(location, devices_by_host) for location in locations]
    axes = replica_shape.mesh_axes(len(rows[0]))
    return Mesh(np.array(rows).reshape(len(rows), *axes.values()), (REPLICA_AXIS, *axes))


def _list_devices(location: ReplicaLocation, devices_by_host: Sequence[Sequence[Device]]) -> list[Device]:
    """Return a replica's devices in the order of its hosts, so that its mesh is equal on all of them."""
    first, width = location.slot * location.devices, location.devices
    return [
        device for host in location.host_indexes for device in devices_by_host[host][first : first + width]
    ]


def build_replicas(
    locations: Sequence[ReplicaLocation],
    devices_by_host: Sequence[Sequence[Device]],
    host_index: int,
    replica_shape: ReplicaShape,
) -> dict[int, Replica]:
    """Return the replicas that this host belongs to, by their numbers.

    Args:
        locations: where all replicas are, by their numbers.
        devices_by_host: all devices of each live host.
        host_index: position of this host among the live ones.
        replica_shape: what the locations follow from, the same on all hosts.
    """
    replicas = {}
    for number, location in enumerate(locations):
        if host_index not in location.host_indexes:
            continue
        devices = _list_devices(location, devices_by_host)
        local = [device for device in devices if device in devices_by_host[host_index]]
        own_shape = replica_shape.for_host(len(devices_by_host[host_index]))
        replicas[number] = Replica(devices, local, own_shape.mesh_axes(len(devices)))
    return replicas
