"""Serves bulk reads out of memory; see `bulk_wire` for the rules."""

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

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

logger = logging.getLogger(__name__)

ADMISSION_TIMEOUT_S: Final = 10.0
"""To say the ticket, TLS included."""
IDLE_TIMEOUT_S: Final = 600.0
"""Between two requests; then the client has forgotten us, or its machine is gone."""
SEND_TIMEOUT_S: Final = 60.0
"""For the answer to one request. The client has a deadline of its own."""
MAX_CONNECTIONS: Final = 512
"""Each is a thread. A group's members have a few each; more than these wait."""
ACCEPT_RETRY_INTERVAL_S: Final = 0.2
"""After the system had no descriptor or thread to spare."""


class BulkResponse(NamedTuple):
    """What a request asks for.

    Attributes:
        data: may change while it is sent: then the client finds that it does not match its digest.
        has_digest: whether the client wants one.
    """

    data: memoryview
    has_digest: bool = True


class BulkServer(Generic[RequestT]):
    """Answers each connection from a thread of its own; the memory is sent as it lies.

    Attributes:
        port: where it listens, once started.
        ticket: admits; for those that the gate let in.
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
        """Listens to nothing yet.

        Args:
            host: an address of this machine.
            credentials: of the job; their certificates are used, the ticket stands for the token.
            request: what clients send.
            serve: answers a request, or raises; called from many threads.
            checksum: of what is sent.
            transform_sent: what becomes of the bytes after their digest was made.
        """
        self.port = 0
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self._host = host
        self._request = request_type
        self._serve = handler
        self._checksum = checksum
        self._on_the_way = transform_sent
        self._tls = make_server_context(credentials.tls) if credentials.tls is not None else None
        self._changed = threading.Condition()  # guards what follows
        self._listening: socket.socket | None = None
        self._connections: set[socket.socket] = set()

    def start(self) -> None:
        """Takes a free port and serves."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.bind((self._host.strip("[]"), 0))
        listening.listen(MAX_CONNECTIONS)
        self.port = listening.getsockname()[1]
        self._listening = listening
        threading.Thread(target=self._accept, args=(listening,), name="rj-bulk-accept", daemon=True).start()

    def stop(self) -> None:
        """Closes the port and every connection."""
        with self._changed:
            listening, self._listening = self._listening, None
            connections = list(self._connections)
            self._changed.notify_all()
        if listening is not None:
            shut_down_socket(listening)
            listening.close()
        for connection in connections:
            shut_down_socket(connection)

    def _accept(self, listening: socket.socket) -> None:
        while self._wait_for_room():
            try:
                self._begin(listening.accept()[0])
            except (
                OSError,
                RuntimeError,
                MemoryError,
            ) as error:  # stopped; or no descriptor or thread is left just now
                with self._changed:
                    if self._listening is None:
                        return
                logger.warning("a bulk server cannot accept a connection: %s; it tries again", error)
                time.sleep(ACCEPT_RETRY_INTERVAL_S)

    def _begin(self, accepted: socket.socket) -> None:
        with self._changed:
            self._connections.add(accepted)
        try:
            _thread.start_new_thread(self._serve_connection, (accepted,))  # waits for nothing: see `threads`
        except (RuntimeError, MemoryError):
            with self._changed:
                self._connections.discard(accepted)
            accepted.close()
            raise

    def _wait_for_room(self) -> bool:
        """While all places are taken clients wait, within their deadlines. False once there is nobody to accept for."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._listening is None or len(self._connections) < MAX_CONNECTIONS
            )
            return self._listening is not None

    def _serve_connection(self, accepted: socket.socket) -> None:
        """One connection, until either side ends it."""
        connection = accepted
        try:
            # Broken connections, strangers and clients that are gone: nothing to be done for them.
            with contextlib.suppress(OSError, EOFError, ResilientJaxError):
                end_s = time.monotonic() + ADMISSION_TIMEOUT_S
                connection = self._wrap_tls(accepted)
                self._check_ticket(connection, end_s)
                while True:
                    request = receive_frame(connection, time.monotonic() + IDLE_TIMEOUT_S)
                    self._answer(connection, decode(request, self._request, "bulk request"))
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
        connection = self._tls.wrap_socket(accepted, server_side=True)
        with self._changed:  # `accepted` has no socket any more
            self._connections.remove(accepted)
            self._connections.add(connection)
        return connection

    def _check_ticket(self, connection: socket.socket, end_s: float) -> None:
        ticket = bytearray(TICKET_BYTES)
        receive_into(connection, memoryview(ticket), end_s)
        if not hmac.compare_digest(ticket, self.ticket):
            raise ConnectionRefusedError("wrong ticket")

    def _answer(self, connection: socket.socket, request: RequestT) -> None:
        try:
            data, has_digest = self._serve(request)
            head = BulkHeader(length=len(data))
            if has_digest:
                digest = self._checksum.compute(data)
                head = BulkHeader(length=len(data), checksum=self._checksum.name, digest=digest)
        except Exception as error:  # the process boundary: it goes to the client
            if not isinstance(error, ResilientJaxError):
                logger.exception("a bulk read failed")
            failure = encode_error(error, "bulk read")
            refused = BulkRefusal(error=failure.trailing_metadata[0][1], message=failure.details)
            send_frame(connection, refused, time.monotonic() + SEND_TIMEOUT_S)
            return
        end_s = time.monotonic() + SEND_TIMEOUT_S
        send_frame(connection, head, end_s)
        send_all(connection, self._on_the_way(data), end_s)
