"""Which connections an abort shuts: sockets of this process stand for those that gloo would open."""

import contextlib
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.clique_connections import CliqueConnections
from resilient_jax.jax_runtime.failures import FormingFailed
from resilient_jax.jax_runtime.gloo import GlooSockets, normalize_endpoint

OWN = Seat(0)


class Peers:
    """The processes of other seats, with a listener of this process that they connect to."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.gloo = GlooSockets(own_listeners=frozenset({normalize_endpoint(self._listener.getsockname())}))
        self._sockets: dict[tuple[str, Seat], socket.socket] = {}

    def connect(self, clique: str, seats: frozenset[Seat]) -> None:
        """Open the connections of a clique, one with each other seat, as its first program does."""
        for seat in seats - {OWN}:
            theirs = socket.create_connection(self._listener.getsockname())
            self._sockets[clique, seat] = self._stack.enter_context(theirs)
            self._stack.enter_context(self._listener.accept()[0])

    def die(self, seat: Seat) -> None:
        for (_, owner), theirs in self._sockets.items():
            if owner == seat:
                theirs.close()

    def is_open(self, clique: str) -> bool:
        """Return whether this process has left all connections of a clique open."""
        found = {self._is_open(theirs) for (name, _), theirs in self._sockets.items() if name == clique}
        assert len(found - {None}) <= 1, "a clique is shut as a whole"
        return found <= {True, None}

    @staticmethod
    def _is_open(theirs: socket.socket) -> bool | None:
        if theirs.fileno() < 0:
            return None
        theirs.setblocking(False)
        try:
            return theirs.recv(1) != b""
        except BlockingIOError:
            return True


@pytest.fixture
def peers() -> Iterator[Peers]:
    with contextlib.ExitStack() as stack:
        yield Peers(stack)


def seats(*numbers: int) -> frozenset[Seat]:
    return frozenset(map(Seat, numbers))


def run_program(cliques: CliqueConnections, peers: Peers, replica: frozenset[Seat], name: str) -> None:
    cliques.begin_program(replica, peers.gloo)
    peers.connect(name, replica)
    cliques.end_program(peers.gloo, is_intact=True)


def begin(peers: Peers, members: frozenset[Seat]) -> CliqueConnections:
    cliques = CliqueConnections(OWN)
    cliques.begin(sorted(members))
    peers.connect("members", members)
    return cliques


def test_an_abort_shuts_the_members_connections_and_spares_the_replica(peers: Peers) -> None:
    cliques = begin(peers, seats(0, 1, 2))
    run_program(cliques, peers, seats(0, 1), "replica")
    peers.die(Seat(2))
    cliques.abort(peers.gloo)
    assert not peers.is_open("members")
    assert peers.is_open("replica")
    cliques.end(peers.gloo, is_intact=False)
    cliques.begin(sorted(seats(0, 1, 3)))
    cliques.begin_program(seats(0, 1), peers.gloo)
    assert peers.is_open("replica")


def test_what_a_running_program_opens_is_spared_and_then_remembered(peers: Peers) -> None:
    cliques = begin(peers, seats(0, 1, 2))
    cliques.begin_program(seats(0, 1), peers.gloo)
    assert not cliques.is_current(seats(0, 1)), "its forming is not ended"
    peers.connect("replica", seats(0, 1))
    cliques.abort(peers.gloo)
    assert not peers.is_open("members")
    assert peers.is_open("replica")
    cliques.end_program(peers.gloo, is_intact=True)
    cliques.abort(peers.gloo)
    assert peers.is_open("replica")


def test_a_replica_that_lost_a_process_is_broken_off_whole(peers: Peers) -> None:
    cliques = begin(peers, seats(0, 1, 2, 3))
    run_program(cliques, peers, seats(0, 1, 2), "replica")
    cliques.begin_program(seats(0, 1, 2), peers.gloo)
    peers.die(Seat(1))
    cliques.abort(peers.gloo)
    assert not cliques.is_in_program
    assert not peers.is_open("replica"), "seat 2 is freed, too"
    assert cliques.is_current(seats(0, 1, 2)), "should it not be complete, its forming is ended"
    cliques.end_program(peers.gloo, is_intact=False)
    assert not cliques.is_current(seats(0, 1, 2))
    with pytest.raises(FormingFailed, match="aborted earlier"):
        cliques.begin_program(seats(0, 1, 2), peers.gloo)


def test_a_program_that_failed_breaks_its_replica_off_at_once(peers: Peers) -> None:
    cliques = begin(peers, seats(0, 1, 2))
    run_program(cliques, peers, seats(0, 1), "replica")
    cliques.begin_program(seats(0, 1), peers.gloo)
    cliques.end_program(peers.gloo, is_intact=False)
    assert not peers.is_open("replica")
    assert peers.is_open("members")


def test_a_replica_of_all_members_is_broken_with_them(peers: Peers) -> None:
    cliques = begin(peers, seats(0, 1))
    run_program(cliques, peers, seats(0, 1), "replica")
    cliques.abort(peers.gloo)
    assert not peers.is_open("replica")
    cliques.end(peers.gloo, is_intact=False)
    cliques.begin(sorted(seats(0, 1)))
    assert cliques.is_broken(sorted(seats(0, 1)))


def test_only_own_cliques_are_ended_while_they_are_formed(peers: Peers) -> None:
    cliques = begin(peers, seats(0, 1, 2))
    assert cliques.is_current(seats(0, 1, 2))
    assert not cliques.is_current(seats(1, 2)), "others may still complete theirs"


@given(
    replicas=st.lists(
        st.frozensets(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4, unique=True
    ),
    dead=st.frozensets(st.integers(1, 5), max_size=3),
)
def test_after_deaths_exactly_the_replicas_of_the_living_are_left(
    replicas: list[frozenset[int]], dead: frozenset[int]
) -> None:
    with contextlib.ExitStack() as stack:
        peers = Peers(stack)
        everyone = seats(*range(6))
        cliques = begin(peers, everyone)
        for replica in replicas:
            run_program(cliques, peers, seats(0, *replica), str(replica))
        for number in dead:
            peers.die(Seat(number))
        cliques.abort(peers.gloo)
        cliques.end(peers.gloo, is_intact=False)
        cliques.begin(sorted(everyone - seats(*dead)))
        assert not peers.is_open("members")
        for replica in replicas:
            assert peers.is_open(str(replica)) == (not replica & dead) or replica <= dead


def test_a_connection_that_was_closed_while_a_program_ran_is_not_the_replicas(peers: Peers) -> None:
    cliques = begin(peers, seats(0, 1, 2))
    cliques.begin_program(seats(0, 1), peers.gloo)
    peers.connect("replica", seats(0, 1))
    peers.connect("to end a wait", seats(0, 3))
    peers.die(Seat(3))
    cliques.end_program(peers.gloo, is_intact=True)
    cliques.abort(peers.gloo)
    cliques.begin_program(seats(0, 1), peers.gloo)
    assert peers.is_open("replica")
