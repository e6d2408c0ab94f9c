"""A listener that serves each connection on a thread of its own, and leaves no thread and no socket when it closes."""

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final

from resilient_jax.errors import ResilientJaxError
from resilient_jax.transport.bulk_protocol import configure_socket, make_server_context, shut_down_socket
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.open_sockets import OpenSockets
from resilient_jax.transport.renewed_files import RenewedFiles

TLS_TIMEOUT_S: Final = 10.0
"""The limit for the TLS handshake of a new connection."""
MAX_CONNECTIONS: Final = 512
"""Each has a thread. A peer has one; so many are no longer those of a job's neighbours, and further ones are closed."""
ACCEPT_RETRY_INTERVAL_S: Final = 0.2
"""The pause after the system had no free descriptor or thread."""

Serve = Callable[[socket.socket, str], None]
"""Called with each connection, and the address of its other end as gRPC writes it, on a thread of its own; returns or
raises when the connection is to be closed."""

logger = logging.getLogger(__name__)


class IncomingConnections:
    """Accepts connections from when it is made until it is closed.

    Attributes:
        port: on which it listens.
    """

    def __init__(self, host: str, credentials: Credentials, serve: Serve, name: str) -> None:
        """Bind a free port and listen.

        Args:
            host: an address of this machine.
            credentials: of the job; with certificates, connections are encrypted.
            serve: serves a connection.
            name: of the threads, and for messages.

        Raises:
            ConfigError: a TLS file cannot be read.
            OSError: the address is not of this machine.
        """
        self._serve = serve
        self._name = name
        self._tls: RenewedFiles[ssl.SSLContext] | None = None
        if credentials.tls is not None:
            self._tls = RenewedFiles(credentials.tls, make_server_context)
        self._sockets = OpenSockets(name)
        self._lock = threading.Lock()  # guards the threads
        self._threads: set[threading.Thread] = set()
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

    def close(self) -> None:
        """Close the port and every connection, and wait until their threads have ended; not to be called by `serve`."""
        self._sockets.shut_down()
        shut_down_socket(self._listener)  # to close it would not wake the thread that waits in `accept`
        self._accepting.join()
        self._listener.close()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                self._begin(*self._listener.accept())
            except (OSError, RuntimeError, MemoryError, ResilientJaxError) as error:
                if self._sockets.is_shut_down:
                    return
                logger.warning("%s cannot accept a connection: %s; it tries again", self._name, error)
                time.sleep(ACCEPT_RETRY_INTERVAL_S)

    def _begin(self, accepted: socket.socket, address: tuple[str, int]) -> None:
        if len(self._sockets) >= MAX_CONNECTIONS:
            accepted.close()
            logger.warning("%s has %d connections and refuses more", self._name, MAX_CONNECTIONS)
            return
        peer = f"ipv{6 if accepted.family == socket.AF_INET6 else 4}:{address[0]}:{address[1]}"
        thread = threading.Thread(
            target=self._run, args=(accepted, peer), name=f"{self._name}-{address[1]}", daemon=True
        )
        try:
            self._sockets.add(accepted)
            with self._lock:
                self._threads.add(thread)
            thread.start()
        except BaseException:
            with self._lock:
                self._threads.discard(thread)
            self._sockets.close(accepted)
            raise

    def _run(self, accepted: socket.socket, peer: str) -> None:
        connection = accepted
        try:
            # Connections that break, and peers that are not of the job, need no answer.
            with contextlib.suppress(OSError, EOFError, ResilientJaxError):
                configure_socket(accepted)
                if self._tls is not None:
                    accepted.settimeout(TLS_TIMEOUT_S)
                    connection = self._tls.get().wrap_socket(accepted, server_side=True)
                    self._sockets.add(connection, replacing=accepted)
                self._serve(connection, peer)
        finally:
            self._sockets.close(connection)
            self._sockets.close(accepted)
            with self._lock:
                self._threads.discard(threading.current_thread())
