"""Complete copies of the model, each on one host, on several, or several on one.

Everything between two microbatches (totals, sums, the state) lies on the devices of one host, *local*. A replica
takes local trees up to its own mesh for a microbatch (`lift`) and gives its result back (`lower`). Where the devices
are the same this moves nothing, and where a tree is cut over the axes of a replica inside the host it stays cut.
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
from resilient_jax.step.assignment import ReplicaLocation, ReplicaShape

Tree = TypeVar("Tree")
_looking = threading.Lock()
"""Held while an array is taken apart. JAX makes the list of an array's parts when it is first asked for, and of two
threads that ask at once (the replicas of a host, for the same parameters) one may see half of it, or each part twice.
Seen in jax 0.10.2."""


class Replica:
    """One replica that this host belongs to.

    Attributes:
        mesh: its devices, with the axes of its shape; the first cuts a microbatch's examples.
        part: (k, n): this host has the k-th of n equal runs of rows of each microbatch.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        local: Sequence[Device],
        part: tuple[int, int],
        axes: Mapping[str, int],
    ) -> None:
        self.mesh = Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
        self.data_shard = part
        self._local = tuple(local)
        self._devices = frozenset(devices)
        self._everywhere = NamedSharding(self.mesh, P())
        self._examples = next(iter(axes))
        self._cut = NamedSharding(self.mesh, P(self._examples))
        self._here = NamedSharding(Mesh(np.array(local), ("local",)), P())

    def to_replica(self, tree: Tree) -> Tree:
        """Local arrays, equal on all hosts of the replica, over its mesh; those that lie there stay as they are."""
        return jax.tree.map(self._lift, tree)

    def _lift(self, leaf: Any) -> Any:  # noqa: ANN401 - any array
        if isinstance(leaf, jax.Array):
            if self._lies_right(leaf):
                return leaf
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                data = self._lift(jax.random.key_data(leaf))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            if (spec := self._spec_here(leaf)) is not None:
                there = _shards_by_device(leaf)
                parts = [there[device] for device in self.mesh.devices.flat]
                return jax.make_array_from_single_device_arrays(
                    leaf.shape, NamedSharding(self.mesh, spec), parts
                )
        local = _on_each(leaf, self._local)
        return jax.make_array_from_single_device_arrays(local[0].shape, self._everywhere, local)

    def _lies_right(self, leaf: jax.Array) -> bool:
        """Whether programs on this mesh take the leaf as it is; under another mesh's names they are compiled again."""
        where = leaf.sharding
        if where.device_set != self._devices:
            return False
        return self._spec_here(leaf) is None or (isinstance(where, NamedSharding) and where.mesh == self.mesh)

    def _spec_here(self, leaf: jax.Array) -> P | None:
        """How a leaf is cut that lies on a mesh with the axes of this replica, and those of others on this host."""
        where = leaf.sharding
        if not isinstance(where, NamedSharding):
            return None
        is_inside = self._devices <= where.device_set and self._names_of(where.spec) <= set(self.mesh.shape)
        return where.spec if is_inside else None

    @staticmethod
    def _names_of(spec: P) -> set[str]:
        return {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,)) if name}

    def to_local(self, tree: Tree) -> Tree:
        """This host's copy of arrays that are replicated over the mesh."""
        return jax.tree.map(self._lower, tree)

    def _lower(self, leaf: jax.Array) -> jax.Array:
        if leaf.is_fully_addressable:
            return leaf
        if not leaf.is_fully_replicated:
            raise CallerError(
                f"accumulate_microbatches: found a total sharded over the hosts of a replica ({leaf.sharding}), "
                "expected a replicated one: give the program out_shardings=NamedSharding(replica.mesh, P())"
            )
        copies = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, self._here, copies)

    def place_batch(self, batch: Tree) -> Tree:
        """This host's rows of a microbatch, numpy arrays, as arrays that are cut over the mesh along dim 0.

        Raises:
            CallerError: the rows cannot be cut evenly.
        """
        return jax.tree.map(self._place, batch)

    def _place(self, rows: Any) -> jax.Array:  # noqa: ANN401 - any array
        rows = np.asarray(rows)
        cuts = self.mesh.shape[self._examples] // self.data_shard[1]
        if rows.ndim == 0 or rows.shape[0] % cuts:
            found = f"{rows.shape[0]} rows" if rows.ndim else "a single number"
            raise CallerError(
                f"a microbatch: found {found} for this host, expected a multiple of {cuts}, the parts that its replica "
                "cuts them into here. Change the microbatch's size or the devices per host"
            )
        if self.data_shard == (0, 1):
            return jax.device_put(rows, self._cut)
        return jax.make_array_from_process_local_data(
            self._cut, rows, (rows.shape[0] * self.data_shard[1], *rows.shape[1:])
        )


def _shards_by_device(leaf: jax.Array) -> dict[Device, jax.Array]:
    with _looking:
        return {shard.device: shard.data for shard in leaf.addressable_shards}


def _on_each(leaf: Any, devices: Sequence[Device]) -> list[jax.Array]:  # noqa: ANN401 - any array
    """A copy on each device; those that are there already are taken."""
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
        there = _shards_by_device(leaf)
        return [there[d] if d in there else jax.device_put(leaf, d) for d in devices]
    return [jax.device_put(leaf, device) for device in devices]


def build_replicas(
    locations: Sequence[ReplicaLocation],
    devices_by_host: Sequence[Sequence[Device]],
    host_index: int,
    replica_shape: ReplicaShape,
) -> dict[int, Replica]:
    """The replicas that the host at place `me` belongs to, by their numbers.

    Args:
        seats: of all replicas.
        devices_by_host: the devices of each live host.
    """
    found = {}
    for number, seat in enumerate(locations):
        if host_index not in seat.host_indexes:
            continue
        mine = list(devices_by_host[host_index])
        width = len(mine) // replica_shape.count_replicas_per_host(len(mine))
        local = mine[seat.slot * width : (seat.slot + 1) * width]
        devices = (
            local
            if len(seat.host_indexes) == 1
            else [d for place in seat.host_indexes for d in devices_by_host[place]]
        )
        part = (seat.host_indexes.index(host_index), len(seat.host_indexes))
        found[number] = Replica(devices, local, part, replica_shape.mesh_axes(len(devices)))
    return found
