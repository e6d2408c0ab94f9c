"""Who has not proved to be of the job keeps nobody of the job out, whatever it does not say."""

import contextlib
import socket
import ssl
import threading

import pytest

from resilient_jax.transport import Credentials, incoming_connections
from resilient_jax.transport.credentials import make_client_context
from resilient_jax.transport.incoming_connections import IncomingConnections
from tests.support.authority import Authority
from tests.support.patience import patience, wait_until

MAX_STRANGERS, MAX_CONNECTIONS = 4, 3
WAIT_S = patience(3)
QUIET_S = 0.3
"""An answer takes a millisecond: what has not come after this time waits."""


@pytest.fixture(autouse=True)
def few_places(monkeypatch):
    monkeypatch.setattr(incoming_connections, "MAX_STRANGERS", MAX_STRANGERS)
    monkeypatch.setattr(incoming_connections, "MAX_CONNECTIONS", MAX_CONNECTIONS)


def serve(visit):
    """Answer each byte; the first one proves all there is to prove."""
    connection = visit.connection
    if connection.recv(1) != b"p":
        return
    visit.let_in()
    connection.sendall(b"P")
    while said := connection.recv(1):
        connection.sendall(said.upper())


class Listener:
    def __init__(self, credentials, tls):
        self.incoming = IncomingConnections("0.0.0.0", credentials, serve, "rj-test")
        self._tls = tls
        self._opened = contextlib.ExitStack()

    def connect(self, source="127.0.0.1"):
        """Connect without a word; with TLS, without that of TLS."""
        found = socket.create_connection(
            ("127.0.0.1", self.incoming.port), WAIT_S, source_address=(source, 0)
        )
        return self._opened.enter_context(found)

    def meet(self, source="127.0.0.1"):
        """Connect, and say what a peer says."""
        found = self.connect(source)
        if self._tls is not None:
            found = self._opened.enter_context(self._tls.wrap_socket(found, server_hostname="127.0.0.1"))
        found.sendall(b"p")
        return found

    def close(self):
        self._opened.close()
        self.incoming.close()


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def listener(request, tmp_path):
    credentials, tls = Credentials("token"), None
    if request.param:
        authority = Authority(tmp_path / "job", "job")
        credentials = Credentials("token", authority.sign("server"))
        tls = make_client_context(authority.sign("client"))
    found = Listener(credentials, tls)
    yield found
    found.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("rj-test")]
    assert len(found.incoming) == 0


def answers(connection):
    connection.sendall(b"x")
    return connection.recv(1) == b"X"


def has_ended(connection):
    connection.settimeout(WAIT_S)
    try:
        return connection.recv(1) == b""
    except (ConnectionError, ssl.SSLError):
        return True


def test_strangers_who_say_nothing_keep_no_peer_out(listener):
    strangers = [listener.connect() for _ in range(3 * MAX_STRANGERS)]
    peer = listener.meet()
    assert peer.recv(1) == b"P"
    assert all(has_ended(stranger) for stranger in strangers[:-MAX_STRANGERS])
    assert answers(peer)


def test_strangers_end_no_connection_of_a_peer(listener):
    peers = [listener.meet() for _ in range(MAX_CONNECTIONS)]
    assert [peer.recv(1) for peer in peers] == [b"P"] * MAX_CONNECTIONS
    for _ in range(3 * MAX_STRANGERS):
        listener.connect()
    wait_until(
        "only the newest strangers are left",
        lambda: len(listener.incoming) == MAX_CONNECTIONS + MAX_STRANGERS,
    )
    assert all(map(answers, peers))


def test_of_many_strangers_one_of_the_address_with_the_most_goes(listener):
    slow = listener.connect("127.0.0.9")
    for _ in range(3 * MAX_STRANGERS):
        listener.connect("127.0.0.2")
    wait_until("the places are taken", lambda: len(listener.incoming) == MAX_STRANGERS)
    slow.settimeout(QUIET_S)
    with pytest.raises(TimeoutError):
        slow.recv(1)


def test_a_peer_waits_while_peers_have_all_places(listener):
    first, *_ = peers = [listener.meet() for _ in range(MAX_CONNECTIONS)]
    assert [peer.recv(1) for peer in peers] == [b"P"] * MAX_CONNECTIONS
    late = listener.meet()
    late.settimeout(QUIET_S)
    with pytest.raises(TimeoutError):
        late.recv(1)
    first.close()
    late.settimeout(WAIT_S)
    assert late.recv(1) == b"P"
