"""The client of one peer's bulk server; see `bulk_protocol` for the rules."""

import select
import socket
import threading
import time
from typing import Any, Final

import msgspec

from resilient_jax.erasure import choose_checksum
from resilient_jax.errors import ChecksumMismatch, InternalError, MessageError, PeerUnreachable
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.transport.bulk_protocol import (
    HEADER_DECODER,
    BulkHeader,
    BulkRefusal,
    DeadlineExceeded,
    configure_socket,
    make_client_context,
    receive_frame,
    receive_into,
    send_all,
    send_frame,
    shut_down_socket,
)
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.error_codec import ERROR_CLASSES
from resilient_jax.transport.renewed_files import RenewedFiles
from resilient_jax.transport.server_address import parse_address

CONNECT_TIMEOUT_S: Final = 10.0


class BulkChannel:
    """Connections to one server, one for each concurrent read; safe to share between threads."""

    def __init__(self, address: str, ticket: bytes, credentials: Credentials) -> None:
        """Create the channel without connecting.

        Args:
            address: the bulk server, "host:port".
            ticket: the ticket of that server.
            credentials: the credentials of the job.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self._address = address
        self._ticket = ticket
        self._tls = (
            RenewedFiles(credentials.tls, make_client_context) if credentials.tls is not None else None
        )
        self._server_name = credentials.tls.server_name if credentials.tls is not None else None
        self._lock = threading.Lock()  # guards the attributes below
        self._idle: list[socket.socket] = []
        self._active: set[socket.socket] = set()
        self._closed = False

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
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._active:  # the thread that reads or connects wakes, and closes it
                shut_down_socket(connection)
        for connection in idle:
            connection.close()

    def _acquire(self, deadline_s: float) -> socket.socket:
        """Return an unused connection; an idle one that broke meanwhile is detected here."""
        while True:
            with self._lock:
                self._check_open()
                if not self._idle:
                    break
                connection = self._idle.pop()
                self._active.add(connection)
            # The server sends nothing unasked: what can be read here is the end of the connection.
            if _is_quiet(connection):
                return connection
            self._release(connection, is_complete=False)
        return self._connect(deadline_s)

    def _release(self, connection: socket.socket, *, is_complete: bool) -> None:
        """Keep the connection for the next read if the answer was received to its end, else close it."""
        with self._lock:
            self._active.discard(connection)
            # After a broken read the rest of its answer may still arrive, and would be taken for the next answer.
            if is_complete and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise PeerUnreachable(f"our channel to {self._address} was closed")

    def _connect(self, deadline_s: float) -> socket.socket:
        """Return a new connection, to the first address of the host that accepts it."""
        host, port = parse_address(self._address)
        failure: OSError | None = None
        try:
            for family, kind, protocol, _, socket_address in socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            ):
                try:
                    return self._connect_to(
                        socket.socket(family, kind, protocol), socket_address, host, deadline_s
                    )
                except OSError as error:
                    failure = error
        except OSError as error:  # no such name
            failure = error
        refused = isinstance(failure, ConnectionRefusedError)
        raise PeerUnreachable(
            f"{self._address} cannot be reached for bulk reads: {failure}", is_refused=refused
        ) from failure

    def _connect_to(
        self,
        connection: socket.socket,
        socket_address: Any,  # noqa: ANN401 - its type depends on the address family
        host: str,
        deadline_s: float,
    ) -> socket.socket:
        """Connect a socket, which counts as used from the beginning, so that `close` ends it."""
        try:
            self._activate(connection)
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            connection.connect(socket_address)
            if self._tls is not None:
                plain = connection
                connection = self._tls.get().wrap_socket(plain, server_hostname=self._server_name or host)
                self._activate(connection, replacing=plain)
            configure_socket(connection)
            send_all(connection, self._ticket, deadline_s)
        except BaseException:
            self._release(connection, is_complete=False)
            raise
        return connection

    def _activate(self, connection: socket.socket, replacing: socket.socket | None = None) -> None:
        with self._lock:
            self._active.discard(replacing)
            self._active.add(connection)
            self._check_open()

    def _decode(self, frame: bytes) -> BulkHeader | BulkRefusal:
        return decode_message(HEADER_DECODER, frame, f"the answer of {self._address} to a bulk read")


def _is_quiet(connection: socket.socket) -> bool:
    """Return whether the socket has nothing to read, not even its end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)
