"""Complete copies of the model, each on one host, on several, or several on one.

Everything between two microbatches (totals, sums, the state) lies on the devices of one host, *local*. A replica
takes local trees up to its own mesh for a microbatch (`lift`) and gives its result back (`lower`). Where the devices
are the same this moves nothing.
"""

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import CallerError
from resilient_jax.training.jax_runtime.handles import Device
from resilient_jax.training.step.assignment import ReplicaShape, Seat

Tree = TypeVar("Tree")
DATA = "data"
"""The one axis of a replica's mesh: a microbatch's examples are cut over it."""
_looking = threading.Lock()
"""Held while an array is taken apart. JAX makes the list of an array's parts when it is first asked for, and of two
threads that ask at once (the replicas of a host, for the same parameters) one may see half of it, or each part twice.
Seen in jax 0.10.2."""


class Replica:
    """One replica that this host belongs to.

    Attributes:
        mesh: its devices, with the one axis "data".
        part: (k, n): this host has the k-th of n equal runs of rows of each microbatch.
    """

    def __init__(self, devices: Sequence[Device], local: Sequence[Device], part: tuple[int, int]) -> None:
        self.mesh = Mesh(np.array(devices), (DATA,))
        self.part = part
        self._local = tuple(local)
        self._devices = frozenset(devices)
        self._everywhere = NamedSharding(self.mesh, P())
        self._cut = NamedSharding(self.mesh, P(DATA))
        self._here = NamedSharding(Mesh(np.array(local), (DATA,)), P())

    def lift(self, tree: Tree) -> Tree:
        """Local arrays, equal on all hosts of the replica, over its mesh; those that lie there stay as they are."""
        return jax.tree.map(self._lift, tree)

    def _lift(self, leaf: Any) -> Any:  # noqa: ANN401 - any array
        if isinstance(leaf, jax.Array):
            if leaf.sharding.device_set == self._devices:
                return leaf
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                data = self._lift(jax.random.key_data(leaf))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        local = _on_each(leaf, self._local)
        return jax.make_array_from_single_device_arrays(local[0].shape, self._everywhere, local)

    def lower(self, tree: Tree) -> Tree:
        """This host's copy of arrays that are replicated over the mesh."""
        return jax.tree.map(self._lower, tree)

    def _lower(self, leaf: jax.Array) -> jax.Array:
        if leaf.is_fully_addressable:
            return leaf
        if not leaf.is_fully_replicated:
            raise CallerError(
                f"sum_microbatches: found a total cut over the hosts of a replica ({leaf.sharding}), expected one "
                "that each of them has whole: give the program out_shardings=NamedSharding(replica.mesh, P())"
            )
        copies = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, self._here, copies)

    def place(self, batch: Tree) -> Tree:
        """This host's rows of a microbatch, numpy arrays, as arrays that are cut over the mesh along dim 0.

        Raises:
            CallerError: the rows cannot be cut evenly.
        """
        return jax.tree.map(self._place, batch)

    def _place(self, rows: Any) -> jax.Array:  # noqa: ANN401 - any array
        rows = np.asarray(rows)
        if rows.ndim == 0 or rows.shape[0] % len(self._local):
            found = f"{rows.shape[0]} rows" if rows.ndim else "a single number"
            raise CallerError(
                f"a microbatch: found {found} for this host, expected a multiple of {len(self._local)}, the devices "
                "of its replica here. Change the microbatch's size or the devices per host"
            )
        if self.part == (0, 1):
            return jax.device_put(rows, self._cut)
        return jax.make_array_from_process_local_data(
            self._cut, rows, (rows.shape[0] * self.part[1], *rows.shape[1:])
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
    seats: Sequence[Seat], by_place: Sequence[Sequence[Device]], me: int, shape: ReplicaShape
) -> dict[int, Replica]:
    """The replicas that the host at place `me` belongs to, by their numbers.

    Args:
        seats: of all replicas.
        by_place: the devices of each live host.
    """
    found = {}
    for number, seat in enumerate(seats):
        if me not in seat.hosts:
            continue
        mine = list(by_place[me])
        width = len(mine) // shape.count_on(len(mine))
        local = mine[seat.slot * width : (seat.slot + 1) * width]
        devices = local if len(seat.hosts) == 1 else [d for place in seat.hosts for d in by_place[place]]
        found[number] = Replica(devices, local, (seat.hosts.index(me), len(seat.hosts)))
    return found
