"""A listener that serves each connection on a thread of its own, and leaves no thread and no socket when it closes.

Those who have not proved yet that they are of the job are counted apart. They have places of their own, and one more of
them takes the place of another: so strangers who say nothing keep nobody out, and a peer has all the time that it takes
to fill these places to say who it is. A peer that finds all places of peers taken has that of a connection on which
nothing is asked at the moment, or waits for one.
"""

import _thread
import collections
import contextlib
import errno
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final

from resilient_jax.errors import PeerUnreachable, ResilientJaxError
from resilient_jax.transport.credentials import Credentials, make_server_context
from resilient_jax.transport.renewed_files import RenewedFiles
from resilient_jax.transport.socket_io import configure_socket, shut_down_socket

TLS_TIMEOUT_S: Final = 10.0
"""The limit for the TLS handshake of a new connection."""
MAX_CONNECTIONS: Final = 512
"""Of peers. Each has a thread; the neighbours of a host in a job have a few each. Further ones wait to be let in."""
MAX_STRANGERS: Final = 128
"""Connections of which it is not known yet whose they are. A peer takes milliseconds to say it."""
ACCEPT_RETRY_INTERVAL_S: Final = 0.2
"""The pause after the system had no free descriptor or thread."""

logger = logging.getLogger(__name__)


class Visit:
    """A connection, served on a thread of its own.

    Attributes:
        connection: socket that is read; TLS puts another in the place of the accepted one.
        peer: address of the other end, as gRPC writes it.
        address: the same without a port.
        is_known: whether the peer has proved that it is of the job.
        is_inside: whether the connection has one of the places of peers of the job.
        is_idle: whether nobody loses anything if the connection is closed.
    """

    def __init__(
        self, owner: "IncomingConnections", connection: socket.socket, address: str, port: int
    ) -> None:
        self.connection = connection
        self.peer = f"ipv{6 if connection.family == socket.AF_INET6 else 4}:{address}:{port}"
        self.address = address
        self.is_known = self.is_inside = self.is_idle = False
        self._owner = owner
        self._poll: select.poll | None = None
        self._has_asked = False

    def let_in(self) -> None:
        """Give the connection, whose peer has proved itself, a place among those of peers, once there is one.

        Raises:
            PeerUnreachable: the connection was closed meanwhile.
        """
        self._owner.let_in(self)

    def wait_asked(self, timeout_s: float) -> None:
        """Wait until the peer sends more; until then another peer may take the place of this one.

        Raises:
            PeerUnreachable: another peer has taken the place, or the time is over.
        """
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.connection, select.POLLIN)
        # Who has just come will ask in a moment, and would take its end for that of this process.
        self._owner.mark_idle(self, is_idle=self._has_asked)
        # What TLS has decrypted already the kernel does not have.
        is_pending = isinstance(self.connection, ssl.SSLSocket) and self.connection.pending() > 0
        if not is_pending and not self._poll.poll(timeout_s * 1000):
            raise PeerUnreachable(f"{self.peer} asks nothing for {timeout_s:g} s")
        self._has_asked = True
        self._owner.mark_idle(self, is_idle=False)


Serve = Callable[[Visit], None]
"""Called on a thread of its own with each connection; returns or raises when the connection is to be closed."""


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
            OSError: the address is not of this machine, or no thread is left.
        """
        self._serve = serve
        self._name = name
        self._tls: RenewedFiles[ssl.SSLContext] | None = None
        if credentials.tls is not None:
            self._tls = RenewedFiles(credentials.tls, make_server_context)
        self._changed = threading.Condition()  # guards the attributes below
        self._visits: dict[Visit, None] = {}
        """The oldest first."""
        self._num_threads = 0
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((host.strip("[]"), 0))
            self._listener.listen(MAX_CONNECTIONS)
            self.port: int = self._listener.getsockname()[1]
            self._accepting = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
            self._accepting.start()
        except OSError:
            self._listener.close()
            raise
        except RuntimeError as error:
            self._listener.close()
            raise OSError(errno.EAGAIN, f"no thread for {name}: {error}") from error

    def __len__(self) -> int:
        """Return how many connections there are, of peers and of strangers."""
        with self._changed:
            return len(self._visits)

    def let_in(self, visit: Visit) -> None:
        """Give a connection a place among those of peers; see `Visit.let_in`."""
        with self._changed:
            visit.is_known = True
            while not self._is_closed and visit in self._visits:
                inside = [one for one in self._visits if one.is_inside]
                if len(inside) < MAX_CONNECTIONS:
                    break
                if (idle := next((one for one in inside if one.is_idle), None)) is not None:
                    self._end(idle)
                else:
                    self._changed.wait()
            visit.is_inside = True
            self._check_open(visit)

    def mark_idle(self, visit: Visit, *, is_idle: bool) -> None:
        """Note whether another peer may take the place of a connection; see `Visit.wait_asked`."""
        with self._changed:
            self._check_open(visit)
            visit.is_idle = is_idle
            if is_idle:
                # The one that was idle first goes first.
                self._visits[visit] = self._visits.pop(visit)
                self._changed.notify_all()

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
        visit = Visit(self, accepted, address[0], address[1])
        with self._changed:
            if self._is_closed:
                accepted.close()
                return
            self._make_room()
            self._visits[visit] = None
            self._num_threads += 1
        try:
            # `Thread.start` may wait for ever where memory is short: see `threads`.
            _thread.start_new_thread(self._run, (visit,))
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
        self._end(ended)
        text = "%s has %d connections of which it does not know whose they are; it closes one from %s"
        logger.warning(text, self._name, len(strangers), ended.address)

    def _end(self, visit: Visit) -> None:
        """Give up the place of a connection, whose thread then closes it."""
        del self._visits[visit]
        shut_down_socket(visit.connection)

    def _check_open(self, visit: Visit) -> None:
        if self._is_closed or visit not in self._visits:
            raise PeerUnreachable(f"{self._name} has closed the connection")

    def _run(self, visit: Visit) -> None:
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
                self._serve(visit)
        finally:
            visit.connection.close()
            accepted.close()
            self._forget(visit)

    def _forget(self, visit: Visit) -> None:
        with self._changed:
            self._visits.pop(visit, None)
            self._num_threads -= 1
            self._changed.notify_all()
