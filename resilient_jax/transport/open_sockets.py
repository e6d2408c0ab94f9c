"""The sockets that threads of an object wait on, so that closing the object ends every wait."""

import socket
import threading

from resilient_jax.errors import PeerUnreachable
from resilient_jax.transport.bulk_protocol import shut_down_socket


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
