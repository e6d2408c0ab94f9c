"""Which of gloo's connections an abort must spare: those of cliques that lose nothing by a process's death.

On CPU every clique (some devices that communicate) has TCP connections of its own, those between two devices of one
process included. XLA caches a clique, under the ordered ids of its devices, as long as the backend lives, and an abort
breaks all cliques whose connections it shuts, for good. So it must not shut

- those of the *local clique*, of this process's own devices: local programs lose nothing by a peer's death. It is
  formed first, while there is no other.
- those of *earlier members* who may be the members again: if a process joins and dies, the others go on as before, in
  the clique that they had. A generation's connections are those that were made in it; they are remembered by the
  members. What was shut once is remembered as broken.
- those of *replicas over several hosts*, as long as all their processes live. The programs of a replica run one at a
  time, between `begin_program` and `end_program`, and all connections that appear in between are the replica's: of
  whatever cliques of its devices its programs have. A process that dies closes its connections, so a replica all of
  whose connections are open has lost none.

An abort shuts the connections of the present members, and of replicas that have lost one, unless the main thread does
not unwind by that. Cliques of a *part* of the local devices do not survive an abort; the next use fails, and the world
is re-formed. The same holds for cliques of some hosts that are not those of a replica.
"""

import dataclasses
import threading
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.abort import shut_connections
from resilient_jax.jax_runtime.failures import FormingFailed
from resilient_jax.jax_runtime.gloo import (
    GlooConnection,
    GlooSockets,
    list_connections,
    list_open_connections,
    list_sockets,
)
from resilient_jax.jax_runtime.jaxlib_types import Device

Seats = frozenset[Seat]
NO_CONNECTIONS: frozenset[GlooConnection] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """A program of a replica that runs: its processes, and what was connected before."""

    seats: Seats
    before: frozenset[GlooConnection]


class CliqueConnections:
    """The connections of one world's cliques, by their members. Safe to share between the main and the guard thread.

    Args:
        seat: where this process is in the world.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._lock = threading.RLock()  # guards all that follows
        self._local = NO_CONNECTIONS
        self._by_members: dict[Seats, frozenset[GlooConnection]] = {}
        """The connections of cliques of earlier members, and of replicas on several hosts."""
        self._broken: set[Seats] = set()
        self._members: Seats = frozenset()
        self._found = NO_CONNECTIONS
        """The connections that there were before any process could begin with the next members."""
        self._before = NO_CONNECTIONS
        """The connections that there were before the present members began, except for their own of earlier."""
        self._program: _Program | None = None
        self._given_up: Seats = frozenset()
        """The processes of the replica whose program was aborted, until this process has left it."""
        self._sockets: frozenset[int] = frozenset()
        """The sockets when a program's begin or end last looked for connections in this generation."""

    def form_local_clique(self, gloo: GlooSockets) -> None:
        """Form the clique of the local devices: right after `connect`, before any other. Costs one tiny program."""
        devices = jax.local_devices()
        if len(devices) == 1 or not gloo.own_listeners:
            return
        before = _list_self_connections(gloo)
        _add_up(devices).block_until_ready()
        self._local = self._found = _list_self_connections(gloo) - before

    def begin(self, members: Sequence[Seat]) -> None:
        """Have these members from now on.

        Cliques with a process that is no member any more are closed: a seat is not taken twice.
        """
        with self._lock:
            self._members, self._sockets = frozenset(members), frozenset()
            gone = [known for known in self._by_members if not known <= self._members]
            shut_connections(
                frozenset().union(*(self._by_members.pop(known) for known in gone)) - self._local
            )
            self._broken = {broken for broken in self._broken if broken <= self._members}
            # If these have been the members before, what they had then is theirs again: an abort may shut it.
            self._before = self._found - self._by_members.get(self._members, NO_CONNECTIONS)

    def end(self, gloo: GlooSockets, *, is_intact: bool) -> None:
        """Remember the connections of the members that end here.

        Before this process reports that it is idle: afterwards others may open connections for the next members.

        Args:
            gloo: tells the world's connections from other sockets.
            is_intact: whether nothing was aborted.
        """
        with self._lock:
            self._drop_broken(gloo)
            self._found = list_connections(gloo)
            if is_intact:
                # What is new, and no replica's, was made by a collective of the members.
                if own := self._found - self._before - self._list_others():
                    self._by_members[self._members] = own
            else:
                self._broken.add(self._members)

    def abort(self, gloo: GlooSockets) -> None:
        """Shut what the present members have, and what is left of replicas that have lost a process.

        For the guard thread, as `abort_collectives`, which spares nothing.
        """
        with self._lock:  # so no program of a replica begins meanwhile
            self._drop_broken(gloo)
            # What has appeared since a replica's program began is this replica's, complete or not. Its other hosts may
            # be in the program already, and would lose the clique for good.
            endangered = list_connections(gloo) if self._program is None else self._program.before
            shut_connections(endangered - self.list_spared())

    def list_spared(self) -> frozenset[GlooConnection]:
        """Return the known connections that `abort` leaves alone."""
        with self._lock:
            # Of the members' own all are shut, also those that they had when they were the members before.
            own = self._by_members.get(self._members, NO_CONNECTIONS)
            return (self._before | self._list_others()) - own

    def begin_program(self, seats: Seats, gloo: GlooSockets) -> None:
        """Note that a program of a replica on several processes is about to run, on the main thread.

        Where the replica has all members its cliques are those of the members: they are broken with these.

        Raises:
            FormingFailed: a clique of this replica was aborted earlier, and cannot be made again.
        """
        with self._lock:
            if seats in self._broken:
                raise FormingFailed(
                    f"seat {self._seat}: the cliques of a replica of seats {sorted(seats)} were aborted earlier, "
                    "and cannot be made again in this world"
                )
            if seats == self._members:
                return
            # To look costs several system calls for each socket: only if there are others than before.
            if (sockets := list_sockets()) != self._sockets:
                self._found, self._sockets = list_connections(gloo), sockets
            self._program = _Program(seats, self._found)

    def end_program(self, gloo: GlooSockets, *, is_intact: bool) -> None:
        """Note that it has ended, and remember its new connections; if it has failed, break its cliques off.

        At once: the replica's other processes may wait for this one in a program that it has left.
        """
        with self._lock:
            self._given_up = frozenset()
            program, self._program = self._program, None
            if program is None:
                return
            if (sockets := list_sockets()) != self._sockets:
                self._found, self._sockets = list_connections(gloo), sockets
                known = self._by_members.get(program.seats, NO_CONNECTIONS)
                # Not those that `clique_interruption` has made and closed meanwhile.
                self._by_members[program.seats] = known | (list_open_connections(gloo) - program.before)
            if not is_intact:
                self._break(program.seats)

    def break_program(self, gloo: GlooSockets) -> bool:
        """Break off the cliques of the replica whose program runs, for the guard thread; return whether one runs."""
        with self._lock:
            if self._program is None:
                return False
            seats, before = self._program.seats, self._program.before
            # All, open or not: they are shut, and not remembered.
            new = list_connections(gloo) - before
            self._by_members[seats] = self._by_members.get(seats, NO_CONNECTIONS) | new
            self._program, self._given_up = None, seats
            self._break(seats)
            return True

    @property
    def is_in_program(self) -> bool:
        """Whether a replica's program runs, or waits for the replica's other processes to begin it."""
        with self._lock:
            return self._program is not None

    def is_current(self, seats: Seats) -> bool:
        """Return whether the wait for a clique of these seats may be ended: it may be one that is being formed.

        Not that of a replica whose processes all form it, and not that of others.
        """
        with self._lock:
            if self._seat not in seats or (self._program is not None and seats <= self._program.seats):
                return False
            # Its program was broken off while this process may still wait for the clique to be formed.
            if seats == self._given_up:
                return True
            # Of the others one that is remembered is complete, and one that is broken is formed by nobody any more,
            # whatever gloo has published of it.
            return seats <= self._members and seats not in self._by_members and seats not in self._broken

    def is_broken(self, members: Sequence[Seat]) -> bool:
        """Return whether the clique of these members cannot be used, nor made again."""
        with self._lock:
            return frozenset(members) in self._broken

    def _list_others(self) -> frozenset[GlooConnection]:
        """Return the known connections of cliques that are not those of the present members."""
        others = (known for seats, known in self._by_members.items() if seats != self._members)
        return NO_CONNECTIONS.union(*others)

    def _drop_broken(self, gloo: GlooSockets) -> None:
        """Break off the cliques of which a connection is closed by either side."""
        others = [seats for seats in self._by_members if seats != self._members]
        if not others:
            return
        open_connections = list_open_connections(gloo)
        for seats in others:
            if not self._by_members[seats] <= open_connections:
                # The program that runs may have made more connections than are remembered: those are broken, too.
                if self._program is not None and self._program.seats == seats:
                    self.break_program(gloo)
                else:
                    self._break(seats)

    def _break(self, seats: Seats) -> None:
        self._broken.add(seats)
        # Of a process on its own the local clique is a part.
        shut_connections(self._by_members.pop(seats, NO_CONNECTIONS) - self._local)


def _list_self_connections(gloo: GlooSockets) -> frozenset[GlooConnection]:
    """Return gloo's connections of this process with itself, both ends of each."""
    connections = list_connections(gloo)
    return frozenset((here, there) for here, there in connections if (there, here) in connections)


def _add_up(devices: Sequence[Device]) -> jax.Array:
    mesh = Mesh(np.array(devices), ("local",))
    ones = np.ones((len(devices),), np.float32)
    values = jax.make_array_from_callback(
        ones.shape, NamedSharding(mesh, P("local")), lambda index: ones[index]
    )
    return jax.jit(_total, out_shardings=NamedSharding(mesh, P()))(values)


def _total(values: jax.Array) -> jax.Array:
    return values.sum()
