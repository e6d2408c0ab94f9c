"""The server of bulk reads out of memory; see `bulk_protocol` for the rules."""

import hmac
import logging
import secrets
import socket
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
    receive_frame,
    receive_into,
    send_all,
    send_frame,
)
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.error_codec import encode_error
from resilient_jax.transport.incoming_connections import IncomingConnections
from resilient_jax.transport.method import decode

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

logger = logging.getLogger(__name__)

ADMISSION_TIMEOUT_S: Final = 10.0
"""The limit for a client to send its ticket."""
IDLE_TIMEOUT_S: Final = 600.0
"""The limit between two requests; past it the client has leaked its connection, or its machine is gone."""
SEND_TIMEOUT_S: Final = 60.0
"""The limit for the answer to one request. The client has a deadline of its own."""


class BulkResponse(NamedTuple):
    """The answer of a handler.

    Attributes:
        data: requested bytes. If the bytes change while they are sent, the client finds that the digest differs.
        has_digest: whether the client wants a digest.
    """

    data: memoryview
    has_digest: bool = True


class BulkServer(Generic[RequestT]):
    """Answers each connection on a thread of its own, and sends memory without a copy.

    Attributes:
        port: port that the server listens on, once started.
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
            host: address of this machine.
            credentials: credentials whose token the ticket replaces.
            handler: function that answers a request, or raises; called from many threads.
            transform_sent: applied to the bytes after their digest was computed, to inject damage.
        """
        self.port = 0
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self._host = host
        self._request_type = request_type
        self._handler = handler
        self._checksum = checksum
        self._transform_sent = transform_sent
        self._credentials = credentials
        self._incoming: IncomingConnections | None = None

    def start(self) -> None:
        """Bind a free port and serve."""
        self._incoming = IncomingConnections(self._host, self._credentials, self._serve_connection, "rj-bulk")
        self.port = self._incoming.port

    def stop(self) -> None:
        """Close the port and every connection."""
        if self._incoming is not None:
            self._incoming.shut_down()

    @property
    def num_connections(self) -> int:
        """How many connections there are, of clients and of strangers."""
        return 0 if self._incoming is None else len(self._incoming)

    def _serve_connection(self, connection: socket.socket, peer: str, let_in: Callable[[], None]) -> None:
        """Serve one connection until either side ends it."""
        self._check_ticket(connection, time.monotonic() + ADMISSION_TIMEOUT_S)
        let_in()
        while True:
            request = receive_frame(connection, time.monotonic() + IDLE_TIMEOUT_S)
            self._answer(connection, decode(request, self._request_type, "bulk request"))

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
