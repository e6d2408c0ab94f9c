"""The client of one peer's bulk server; see `bulk_protocol` for the rules."""

import select
import socket
import threading
import time

import msgspec

from resilient_jax.erasure import choose_checksum
from resilient_jax.errors import ChecksumMismatch, InternalError, MessageError, PeerUnreachable
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.transport.bulk_protocol import (
    HEADER_DECODER,
    BulkHeader,
    BulkRefusal,
    DeadlineExceeded,
    receive_frame,
    receive_into,
    send_all,
    send_frame,
)
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.error_codec import ERROR_CLASSES
from resilient_jax.transport.open_sockets import OpenSockets
from resilient_jax.transport.outgoing_connection import CONNECT_TIMEOUT_S, Connector


class BulkChannel:
    """Connections to one server, one for each concurrent read; safe to share between threads."""

    def __init__(self, address: str, ticket: bytes, credentials: Credentials) -> None:
        """Create the channel without connecting.

        Args:
            address: "host:port" of the bulk server.
            ticket: ticket of that server, which the server gives to authenticated clients.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self._address = address
        self._ticket = ticket
        self._connector = Connector(address, credentials)
        self._sockets = OpenSockets(f"our channel to {address}")
        self._lock = threading.Lock()  # guards the connections below
        self._idle: list[socket.socket] = []

    def read_into(self, request: msgspec.Struct, out: memoryview, *, timeout_s: float) -> None:
        """Fill `out` with the requested bytes, verified against their digest if the peer sends one.

        Raises:
            ChecksumMismatch: the bytes were changed in transit, or in the peer's memory meanwhile.
            MessageError: the answer has another number of bytes, or is not of our protocol.
            PeerUnreachable: the peer is gone or did not answer in time, or this channel is closed.
            ResilientJaxError: the error that the peer raised.
        """
        connection = self._acquire(time.monotonic() + min(CONNECT_TIMEOUT_S, timeout_s))
        is_complete = False
        try:
            deadline_s = time.monotonic() + timeout_s
            send_frame(connection, request, deadline_s)
            header = self._decode(receive_frame(connection, deadline_s))
            if isinstance(header, BulkRefusal):
                # A refusal is a complete answer: the connection serves the next read.
                is_complete = True
                raise ERROR_CLASSES.get(header.error, InternalError)(header.message)
            if header.length != len(out):
                raise MessageError(f"{self._address} sends {header.length} bytes, expected {len(out)}")
            receive_into(connection, out, deadline_s)
            is_complete = True
        except DeadlineExceeded as error:
            raise PeerUnreachable(f"{self._address} did not answer a read within {timeout_s} s") from error
        except (OSError, EOFError) as error:
            raise PeerUnreachable(f"{self._address} broke off a read: {error}") from error
        finally:
            self._release(connection, is_complete=is_complete)
        # After the connection is released, so that another read need not wait for the checksum.
        if header.checksum is None:
            return
        found = choose_checksum(header.checksum).compute(out)
        if found != header.digest:
            raise ChecksumMismatch(
                f"{len(out)} bytes from {self._address} were changed in transit: found {header.checksum} {found:08x}, "
                f"expected {header.digest:08x}"
            )

    def close(self) -> None:
        """End every read; later ones fail."""
        self._sockets.shut_down()  # the thread that reads or connects wakes, and closes its connection
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._sockets.close(connection)

    def _acquire(self, deadline_s: float) -> socket.socket:
        """Return an unused connection; an idle one that broke meanwhile is detected here."""
        while True:
            self._sockets.check_open()
            with self._lock:
                if not self._idle:
                    break
                connection = self._idle.pop()
            # The server sends nothing unasked: what can be read here is the end of the connection.
            if _is_quiet(connection):
                return connection
            self._sockets.close(connection)
        connection = self._connector.connect(deadline_s, self._sockets)
        try:
            send_all(connection, self._ticket, deadline_s)
        except OSError as error:
            self._sockets.close(connection)
            raise PeerUnreachable(f"{self._address} broke off a connection: {error}") from error
        return connection

    def _release(self, connection: socket.socket, *, is_complete: bool) -> None:
        """Keep the connection for the next read if the answer was received to its end, else close it."""
        with self._lock:
            # After a broken read the rest of its answer may still arrive, and would be taken for the next answer.
            if is_complete and not self._sockets.is_shut_down:
                self._idle.append(connection)
                return
        self._sockets.close(connection)

    def _decode(self, frame: bytes) -> BulkHeader | BulkRefusal:
        return decode_message(HEADER_DECODER, frame, f"the answer of {self._address} to a bulk read")


def _is_quiet(connection: socket.socket) -> bool:
    """Return whether the socket has nothing to read, not even its end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)
