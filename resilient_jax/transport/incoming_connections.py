"""A listener that serves each connection on a thread of its own, and leaves no thread and no socket when it closes.

Those who have not proved yet that they are of the job are counted apart. They have places of their own, and one more of
them takes the place of another: so strangers who say nothing keep nobody out, and a peer has all the time that it takes
to fill these places to say who it is.
"""

import _thread
import collections
import contextlib
import dataclasses
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final

from resilient_jax.errors import PeerUnreachable, ResilientJaxError
from resilient_jax.transport.bulk_protocol import configure_socket, make_server_context, shut_down_socket
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.renewed_files import RenewedFiles

TLS_TIMEOUT_S: Final = 10.0
"""The limit for the TLS handshake of a new connection."""
MAX_CONNECTIONS: Final = 512
"""Of peers. Each has a thread; the neighbours of a host in a job have a few each. Further ones wait to be let in."""
MAX_STRANGERS: Final = 128
"""Connections of which it is not known yet whose they are. A peer takes milliseconds to say it."""
ACCEPT_RETRY_INTERVAL_S: Final = 0.2
"""The pause after the system had no free descriptor or thread."""

Serve = Callable[[socket.socket, str, Callable[[], None]], None]
"""Called on a thread of its own with each connection, the address of its other end as gRPC writes it, and what to call
once that end has proved that it is of the job; returns or raises when the connection is to be closed."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, slots=True)
class _Visit:
    """A connection.

    Attributes:
        connection: socket that is read; TLS puts another in the place of the accepted one.
        address: address of the other end, without a port.
        is_known: whether the peer has proved that it is of the job.
        is_inside: whether the connection has one of the places of peers of the job.
    """

    connection: socket.socket
    address: str
    is_known: bool = False
    is_inside: bool = False


class IncomingConnections:
    """Accepts connections from when it is made until it is closed.

    Attributes:
        port: port on which the owner listens.
    """

    def __init__(self, host: str, credentials: Credentials, serve: Serve, name: str) -> None:
        """Bind a free port and listen.

        Args:
            host: address of this machine.
            credentials: credentials of the job; with certificates, connections are encrypted.
            name: name of the thread that accepts, also in messages.

        Raises:
            ConfigError: a TLS file cannot be read.
            OSError: the address is not of this machine.
        """
        self._serve = serve
        self._name = name
        self._tls: RenewedFiles[ssl.SSLContext] | None = None
        if credentials.tls is not None:
            self._tls = RenewedFiles(credentials.tls, make_server_context)
        self._changed = threading.Condition()  # guards the attributes below
        self._visits: dict[_Visit, None] = {}
        """The oldest first."""
        self._num_threads = 0
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((host.strip("[]"), 0))
            self._listener.listen(MAX_CONNECTIONS)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._accepting.start()

    def __len__(self) -> int:
        """Return how many connections there are, of peers and of strangers."""
        with self._changed:
            return len(self._visits)

    def shut_down(self) -> None:
        """Close the port, and wake the threads of all connections, each of which then closes its own."""
        with self._changed:
            self._is_closed = True
            for visit in self._visits:
                shut_down_socket(visit.connection)
            self._changed.notify_all()
        shut_down_socket(self._listener)  # to close it would not wake the thread that waits in `accept`
        self._accepting.join()
        self._listener.close()

    def close(self) -> None:
        """Shut down, and wait until all threads have ended; not to be called by `serve`."""
        self.shut_down()
        with self._changed:
            self._changed.wait_for(lambda: self._num_threads == 0)

    def _accept(self) -> None:
        while True:
            try:
                self._begin(*self._listener.accept())
            except (OSError, RuntimeError, MemoryError, ResilientJaxError) as error:
                with self._changed:
                    if self._is_closed:
                        return
                logger.warning("%s cannot accept a connection: %s; it tries again", self._name, error)
                time.sleep(ACCEPT_RETRY_INTERVAL_S)

    def _begin(self, accepted: socket.socket, address: tuple[str, int]) -> None:
        peer = f"ipv{6 if accepted.family == socket.AF_INET6 else 4}:{address[0]}:{address[1]}"
        visit = _Visit(accepted, address[0])
        with self._changed:
            if self._is_closed:
                accepted.close()
                return
            self._make_room()
            self._visits[visit] = None
            self._num_threads += 1
        try:
            # `Thread.start` may wait for ever where memory is short: see `threads`.
            _thread.start_new_thread(self._run, (visit, peer))
        except BaseException:
            accepted.close()
            self._forget(visit)
            raise

    def _make_room(self) -> None:
        """End a connection of a stranger, if there are too many: the oldest one of the address with the most."""
        strangers = [visit for visit in self._visits if not visit.is_known]
        if len(strangers) < MAX_STRANGERS:
            return
        crowds = collections.Counter(visit.address for visit in strangers)
        ended = max(strangers, key=lambda visit: crowds[visit.address])
        del self._visits[ended]
        shut_down_socket(ended.connection)
        text = "%s has %d connections of which it does not know whose they are; it closes one from %s"
        logger.warning(text, self._name, len(strangers), ended.address)

    def _let_in(self, visit: _Visit) -> None:
        """Give a connection a place among those of peers, once there is one."""
        with self._changed:
            visit.is_known = True
            self._changed.wait_for(
                lambda: self._is_closed or sum(one.is_inside for one in self._visits) < MAX_CONNECTIONS
            )
            visit.is_inside = True
            self._check_open(visit)

    def _check_open(self, visit: _Visit) -> None:
        if self._is_closed or visit not in self._visits:
            raise PeerUnreachable(f"{self._name} has closed the connection")

    def _run(self, visit: _Visit, peer: str) -> None:
        accepted = visit.connection
        try:
            # Connections that break, and peers that are not of the job, need no answer.
            with contextlib.suppress(OSError, EOFError, ResilientJaxError):
                configure_socket(accepted)
                if self._tls is not None:
                    accepted.settimeout(TLS_TIMEOUT_S)
                    with self._changed:
                        # From now on this is the one to wake and to close, also while it shakes hands.
                        visit.connection = secured = self._tls.get().wrap_socket(
                            accepted, server_side=True, do_handshake_on_connect=False
                        )
                        self._check_open(visit)
                    secured.do_handshake()
                self._serve(visit.connection, peer, lambda: self._let_in(visit))
        finally:
            visit.connection.close()
            accepted.close()
            self._forget(visit)

    def _forget(self, visit: _Visit) -> None:
        with self._changed:
            self._visits.pop(visit, None)
            self._num_threads -= 1
            self._changed.notify_all()
