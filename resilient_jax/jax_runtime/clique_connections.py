"""Which of gloo's connections an abort must spare: those of cliques that the present generation does not use.

On CPU every clique (some devices that communicate) has TCP connections of its own, those between two devices of one
process included. XLA caches a clique, under the ordered ids of its devices, as long as the backend lives, and an abort
breaks all cliques whose connections it shuts, for good. So it must not shut

- those of the *local clique*, of this process's own devices: local programs lose nothing by a peer's death. It is
  formed first, while there is no other.
- those of *earlier members* who may be the members again: if a process joins and dies, the others go on as before, in
  the clique that they had. A generation's connections are those that were made in it; they are remembered by the
  members. What was shut once is remembered as broken.

An abort shuts the present members' connections alone, unless the main thread does not unwind by that.
Cliques of a *part* of the local devices do not survive an abort; the next use fails, and the world is re-formed.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.abort import shut_connections
from resilient_jax.jax_runtime.gloo import GlooConnection, GlooSockets, find_connections
from resilient_jax.jax_runtime.jaxlib_types import Device

NO_CONNECTIONS: frozenset[GlooConnection] = frozenset()


class CliqueConnections:
    """The connections of one world's cliques, by their members."""

    def __init__(self) -> None:
        self._local = NO_CONNECTIONS
        self._by_members: dict[frozenset[Seat], frozenset[GlooConnection]] = {}
        self._broken: set[frozenset[Seat]] = set()
        self._members: frozenset[Seat] = frozenset()
        self._found = NO_CONNECTIONS
        """What there was before any process could begin with the next members."""
        self._before = NO_CONNECTIONS
        """What there was before the present members began, except for connections of their own."""

    def form_local_clique(self, gloo: GlooSockets) -> None:
        """Form the clique of the local devices: right after `connect`, before any other. Costs one tiny program."""
        devices = jax.local_devices()
        if len(devices) == 1 or not gloo.own_listeners:
            return
        before = _find_self_connections(gloo)
        _add_up(devices).block_until_ready()
        self._local = self._found = _find_self_connections(gloo) - before

    def begin(self, members: Sequence[Seat]) -> frozenset[GlooConnection]:
        """Return what an abort must spare while these are the members.

        Cliques with a process that is no member any more are closed: a seat is not taken twice.
        """
        self._members = frozenset(members)
        gone = [known for known in self._by_members if not known <= self._members]
        shut_connections(frozenset().union(*(self._by_members.pop(known) for known in gone)) - self._local)
        self._broken = {broken for broken in self._broken if broken <= self._members}
        self._before = self._found - self._by_members.get(self._members, NO_CONNECTIONS)
        return self._before

    def end(self, gloo: GlooSockets, *, is_intact: bool) -> None:
        """Remember the connections of the members that end here.

        Before this process reports that it is idle: afterwards others may open connections for the next members.

        Args:
            gloo: of the world.
            is_intact: nothing was aborted.
        """
        self._found = find_connections(gloo)
        if is_intact:
            if own := self._found - self._before:
                self._by_members[self._members] = own
        else:
            self._broken.add(self._members)

    def is_current(self, seats: frozenset[Seat]) -> bool:
        """Return whether a clique of these seats may be one that is made in this generation."""
        return seats <= self._members and seats not in self._by_members and seats not in self._broken

    def is_broken(self, members: Sequence[Seat]) -> bool:
        """Return whether the clique of these members cannot be used, nor made again."""
        return frozenset(members) in self._broken


def _find_self_connections(gloo: GlooSockets) -> frozenset[GlooConnection]:
    """Return gloo's connections of this process with itself, both ends of each."""
    found = find_connections(gloo)
    return frozenset((here, there) for here, there in found if (there, here) in found)


def _add_up(devices: Sequence[Device]) -> jax.Array:
    mesh = Mesh(np.array(devices), ("local",))
    ones = np.ones((len(devices),), np.float32)
    values = jax.make_array_from_callback(
        ones.shape, NamedSharding(mesh, P("local")), lambda index: ones[index]
    )
    return jax.jit(_total, out_shardings=NamedSharding(mesh, P()))(values)


def _total(values: jax.Array) -> jax.Array:
    return values.sum()
