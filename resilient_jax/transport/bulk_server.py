"""The server of bulk reads out of memory; see `bulk_protocol` for the rules."""

import _thread
import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from resilient_jax.erasure import Checksum
from resilient_jax.errors import ResilientJaxError
from resilient_jax.transport.bulk_protocol import (
    TICKET_BYTES,
    BulkHeader,
    BulkRefusal,
    configure_socket,
    make_server_context,
    receive_frame,
    receive_into,
    send_all,
    send_frame,
    shut_down_socket,
)
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.error_codec import encode_error
from resilient_jax.transport.method import decode
from resilient_jax.transport.renewed_files import RenewedFiles

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

logger = logging.getLogger(__name__)

ADMISSION_TIMEOUT_S: Final = 10.0
"""The limit for a client to send its ticket, TLS handshake included."""
IDLE_TIMEOUT_S: Final = 600.0
"""The limit between two requests; past it the client has leaked its connection, or its machine is gone."""
SEND_TIMEOUT_S: Final = 60.0
"""The limit for the answer to one request. The client has a deadline of its own."""
MAX_CONNECTIONS: Final = 512
"""The number of connections, each with a thread. The members of a group have a few each; further ones wait."""
ACCEPT_RETRY_INTERVAL_S: Final = 0.2
"""The pause after the system had no free descriptor or thread."""


class BulkResponse(NamedTuple):
    """The answer of a handler.

    Attributes:
        data: the requested bytes. If they change while they are sent, the client finds that the digest differs.
        has_digest: whether the client wants a digest.
    """

    data: memoryview
    has_digest: bool = True


class BulkServer(Generic[RequestT]):
    """Answers each connection on a thread of its own, and sends memory without a copy.

    Attributes:
        port: the port, once started.
        ticket: admits clients; give it only to authenticated ones.
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        request_type: type[RequestT],
        handler: Callable[[RequestT], BulkResponse],
        checksum: Checksum,
        transform_sent: Callable[[memoryview], memoryview] = lambda data: data,
    ) -> None:
        """Create the server without listener.

        Args:
            host: an address of this machine.
            credentials: the credentials of the job; the ticket takes the place of their token.
            request_type: the type of the clients' requests.
            handler: answers a request, or raises; called from many threads.
            checksum: the algorithm of the digests.
            transform_sent: applied to the bytes after their digest was computed, to inject damage.
        """
        self.port = 0
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self._host = host
        self._request_type = request_type
        self._handler = handler
        self._checksum = checksum
        self._transform_sent = transform_sent
        self._tls = (
            RenewedFiles(credentials.tls, make_server_context) if credentials.tls is not None else None
        )
        self._changed = threading.Condition()  # guards the attributes below
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()

    def start(self) -> None:
        """Bind a free port and serve."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((self._host.strip("[]"), 0))
        listener.listen(MAX_CONNECTIONS)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="rj-bulk-accept", daemon=True).start()

    def stop(self) -> None:
        """Close the port and every connection."""
        with self._changed:
            listener, self._listener = self._listener, None
            connections = list(self._connections)
            self._changed.notify_all()
        if listener is not None:
            # To close it would not wake the thread that waits in `accept`.
            shut_down_socket(listener)
            listener.close()
        for connection in connections:
            shut_down_socket(connection)

    def _accept(self, listener: socket.socket) -> None:
        while self._wait_for_room():
            try:
                self._begin(listener.accept()[0])
            except (
                OSError,
                RuntimeError,
                MemoryError,
            ) as error:  # stopped; or no descriptor or thread is left just now
                with self._changed:
                    if self._listener is None:
                        return
                logger.warning("a bulk server cannot accept a connection: %s; it tries again", error)
                time.sleep(ACCEPT_RETRY_INTERVAL_S)

    def _begin(self, accepted: socket.socket) -> None:
        with self._changed:
            self._connections.add(accepted)
        try:
            _thread.start_new_thread(
                self._serve_connection, (accepted,)
            )  # `Thread.start` may wait for ever: see `threads`
        except (RuntimeError, MemoryError):
            with self._changed:
                self._connections.discard(accepted)
            accepted.close()
            raise

    def _wait_for_room(self) -> bool:
        """Wait while there are MAX_CONNECTIONS (clients wait within their deadlines); return False once stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._listener is None or len(self._connections) < MAX_CONNECTIONS)
            return self._listener is not None

    def _serve_connection(self, accepted: socket.socket) -> None:
        """Serve one connection until either side ends it."""
        connection = accepted
        try:
            # Connections that break, unauthenticated clients and clients that are gone need no answer.
            with contextlib.suppress(OSError, EOFError, ResilientJaxError):
                deadline_s = time.monotonic() + ADMISSION_TIMEOUT_S
                connection = self._wrap_tls(accepted)
                self._check_ticket(connection, deadline_s)
                while True:
                    request = receive_frame(connection, time.monotonic() + IDLE_TIMEOUT_S)
                    self._answer(connection, decode(request, self._request_type, "bulk request"))
        finally:
            with self._changed:
                self._connections -= {accepted, connection}
                self._changed.notify_all()
            connection.close()
            accepted.close()

    def _wrap_tls(self, accepted: socket.socket) -> socket.socket:
        configure_socket(accepted)
        if self._tls is None:
            return accepted
        accepted.settimeout(ADMISSION_TIMEOUT_S)
        connection = self._tls.get().wrap_socket(accepted, server_side=True)
        with self._changed:  # `wrap_socket` has detached `accepted`
            self._connections.remove(accepted)
            self._connections.add(connection)
        return connection

    def _check_ticket(self, connection: socket.socket, deadline_s: float) -> None:
        ticket = bytearray(TICKET_BYTES)
        receive_into(connection, memoryview(ticket), deadline_s)
        if not hmac.compare_digest(ticket, self.ticket):
            raise ConnectionRefusedError("wrong ticket")

    def _answer(self, connection: socket.socket, request: RequestT) -> None:
        try:
            data, has_digest = self._handler(request)
            header = BulkHeader(length=len(data))
            if has_digest:
                digest = self._checksum.compute(data)
                header = BulkHeader(length=len(data), checksum=self._checksum.name, digest=digest)
        except Exception as error:  # the process boundary: the error goes to the client
            if not isinstance(error, ResilientJaxError):
                logger.exception("a bulk read failed")
            failure = encode_error(error, "bulk read")
            refused = BulkRefusal(error=failure.trailing_metadata[0][1], message=failure.details)
            send_frame(connection, refused, time.monotonic() + SEND_TIMEOUT_S)
            return
        deadline_s = time.monotonic() + SEND_TIMEOUT_S
        send_frame(connection, header, deadline_s)
        send_all(connection, self._transform_sent(data), deadline_s)
