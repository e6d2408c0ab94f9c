"""What a host has of a state that is in shards over hosts, from one world to the next: on devices or in host memory.

A unit of such a state is what the hosts with one *rank* have. On a mesh of all replicas the hosts of each replica have
ranks, so a unit has as many holders as there are replicas. On a mesh of all hosts each is the only holder of its own.
"""

import dataclasses
from collections.abc import Iterable
from typing import Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.state_records import StatePart, UnitKind
from resilient_jax.sharding.placements import REPLICA_AXIS
from resilient_jax.state.flat_state import FlatState
from resilient_jax.state.peer_transfer import StateOffer


def find_part(shardings: Iterable[Sharding]) -> StatePart | None:
    """Return the part that this host has of arrays with these shardings, by its rank.

    Returns:
        None: no array spans hosts; or they do on several meshes, or are sharded over replicas.
    """
    over_hosts = [
        (sharding.mesh, sharding.spec)
        for sharding in shardings
        if isinstance(sharding, NamedSharding)
        and isinstance(sharding.mesh, Mesh)
        and not sharding.is_fully_addressable
    ]
    # What is sharded over replicas, too, is not in each of them.
    is_over_replicas = any(REPLICA_AXIS in jax.tree.leaves(tuple(spec)) for _, spec in over_hosts)
    if len({mesh for mesh, _ in over_hosts}) != 1 or is_over_replicas:
        return None
    mesh = over_hosts[0][0]
    on_replicas = mesh.axis_names[0] == REPLICA_AXIS
    devices = mesh.devices if on_replicas else mesh.devices.reshape(1, -1)
    # The hosts of a replica, in the order of their devices, are those with rank 0, 1, ...
    rows = [list(dict.fromkeys(device.process_index for device in row.flat)) for row in devices]
    own = jax.process_index()
    ranks = [row.index(own) for row in rows if own in row]
    if not on_replicas:
        return StatePart.from_units(ranks, len(rows[0]), UnitKind.HOSTS)
    axes = [(str(name), mesh.shape[name]) for name in mesh.axis_names[1:]]
    return StatePart.from_units(ranks, len(rows[0]), UnitKind.RANKS, axes)


def find_part_of_state(state: FlatState) -> StatePart | None:
    """Return the part that this host has of a state; None: it has all, or the state is not in shards."""
    if state.is_complete:
        return None
    return find_part(leaf.value.sharding for leaf in state.leaves if isinstance(leaf.value, jax.Array))


@dataclasses.dataclass(frozen=True, slots=True)
class HeldShards:
    """This host's shards of a committed state that is not placed in the present world yet.

    Attributes:
        part: which of the units they are.
        state: the arrays, on the devices of the world before; None: they have left the devices.
        offer: copies of them in host memory; None: none are made yet.
    """

    part: StatePart
    state: FlatState | None
    offer: StateOffer | None = None

    def copy(self, host: HostName, generation: GenerationNumber) -> StateOffer:
        """Return copies of the shards in host memory, as this host offers them in a generation."""
        if self.offer is not None:
            return self.offer.for_generation(generation)
        assert self.state is not None, "shards are on devices, or were copied"
        return StateOffer.of_state(host, generation, self.state)

    def move_to_host(self, host: HostName, generation: GenerationNumber) -> Self:
        """Return the same shards in host memory alone."""
        return dataclasses.replace(self, state=None, offer=self.copy(host, generation))

    @property
    def nbytes(self) -> int:
        """Bytes of the shards that are here."""
        if self.offer is not None:
            return self.offer.part.part_bytes
        assert self.state is not None
        arrays = (leaf.value for leaf in self.state.leaves)
        return sum(
            array.nbytes
            if isinstance(array, np.ndarray)
            else sum(s.data.nbytes for s in array.addressable_shards)
            for array in arrays
        )
