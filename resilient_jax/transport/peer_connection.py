"""Connections to a peer, proved and with TLS where it is configured; closing their owner ends every wait on them."""

import socket
import ssl
import threading
import time
from typing import Any, Final

from resilient_jax.errors import PeerUnreachable
from resilient_jax.transport.call_proofs import Token
from resilient_jax.transport.credentials import Credentials, make_client_context
from resilient_jax.transport.peer_handshake import PeerHello, introduce
from resilient_jax.transport.renewed_files import RenewedFiles
from resilient_jax.transport.server_address import parse_address
from resilient_jax.transport.socket_io import configure_socket, shut_down_socket

CONNECT_TIMEOUT_S: Final = 10.0
"""The limit for a connection: until the peer has proved itself."""


class OpenSockets:
    """Sockets of one owner; safe to share between threads."""

    def __init__(self, owner: str) -> None:
        """Begin with none; `owner` is for the message of the error after `shut_down`."""
        self._owner = owner
        self._lock = threading.Lock()  # guards the attributes below
        self._sockets: set[socket.socket] = set()
        self._is_shut_down = False

    @property
    def is_shut_down(self) -> bool:
        """Whether `shut_down` was called."""
        with self._lock:
            return self._is_shut_down

    def check_open(self) -> None:
        """Raise the error of a closed owner, if it is.

        Raises:
            PeerUnreachable: the owner was closed.
        """
        if self.is_shut_down:
            raise PeerUnreachable(f"{self._owner} was closed")

    def add(self, connection: socket.socket, replacing: socket.socket | None = None) -> None:
        """Add a socket before a thread waits on it; TLS wraps one in another, which it replaces.

        Raises:
            PeerUnreachable: the owner was closed; the socket is to be closed by `close`.
        """
        with self._lock:
            if replacing is not None:
                self._sockets.discard(replacing)
            self._sockets.add(connection)
            if self._is_shut_down:
                raise PeerUnreachable(f"{self._owner} was closed")

    def close(self, connection: socket.socket) -> None:
        """Close a socket, on the thread that has used it last."""
        with self._lock:
            self._sockets.discard(connection)
        connection.close()

    def shut_down(self) -> None:
        """Wake the threads that wait on these sockets, each of which then closes its own."""
        with self._lock:
            self._is_shut_down = True
            for connection in self._sockets:
                shut_down_socket(connection)


class PeerConnector:
    """Connects to a service of the process at an address; safe to share between threads."""

    def __init__(
        self, address: str, credentials: Credentials, service: str, caller: str = "", caller_address: str = ""
    ) -> None:
        """Read the TLS files.

        Args:
            address: "host:port" of a `PeerServer`.
            service: name of the service there.
            caller: name of this host, where the service asks for it.
            caller_address: address of this host's mailbox, likewise.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self.address = address
        self._hello = PeerHello(
            service=service, address=address, caller=caller, caller_address=caller_address
        )
        self._token = Token(credentials.token)
        self._tls: RenewedFiles[ssl.SSLContext] | None = None
        self._server_name: str | None = None
        if credentials.tls is not None:
            self._tls = RenewedFiles(credentials.tls, make_client_context)
            self._server_name = credentials.tls.server_name

    def connect(self, deadline_s: float, sockets: OpenSockets) -> socket.socket:
        """Return a new connection, whose ends have proved themselves to each other; it is in `sockets`.

        Raises:
            PeerUnreachable: no connection can be made; `is_refused` is set where no process listens.
            Unauthenticated: one side has another token.
            MessageError: the other side is no peer of ours.
        """
        connection = self._connect_to_any(deadline_s, sockets)
        try:
            introduce(connection, self._token, self._hello, deadline_s)
        except (OSError, EOFError) as error:
            sockets.close(connection)
            raise PeerUnreachable(f"{self.address} broke off a connection: {error}") from error
        except BaseException:
            sockets.close(connection)
            raise
        return connection

    def _connect_to_any(self, deadline_s: float, sockets: OpenSockets) -> socket.socket:
        """Return a connection to the first address of the host that accepts it."""
        host, port = parse_address(self.address)
        failure: OSError | None = None
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, socket_address in found:
                try:
                    connection = socket.socket(family, kind, protocol)
                    return self._connect_to(connection, socket_address, host, deadline_s, sockets)
                except OSError as error:
                    failure = error
        except OSError as error:  # no such name
            failure = error
        if isinstance(failure, ConnectionRefusedError):
            text = f"{self.address} refused the connection: no process listens there"
            raise PeerUnreachable(text, is_refused=True) from failure
        raise PeerUnreachable(f"{self.address} cannot be reached: {failure}") from failure

    def _connect_to(
        self,
        connection: socket.socket,
        socket_address: Any,  # noqa: ANN401 - its type depends on the address family
        host: str,
        deadline_s: float,
        sockets: OpenSockets,
    ) -> socket.socket:
        try:
            sockets.add(connection)
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            connection.connect(socket_address)
            if self._tls is not None:
                plain = connection
                secured = connection = self._tls.get().wrap_socket(
                    plain, server_hostname=self._server_name or host, do_handshake_on_connect=False
                )
                sockets.add(secured, replacing=plain)  # so that it is woken also while it shakes hands
                secured.settimeout(max(0.001, deadline_s - time.monotonic()))
                secured.do_handshake()
            configure_socket(connection)
            return connection
        except BaseException:
            sockets.close(connection)
            raise
