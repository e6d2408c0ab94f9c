"""Reads from one peer's bulk server; see `bulk_wire` for the rules."""

import select
import socket
import threading
import time
from typing import Any, Final

import msgspec

from resilient_jax.erasure import choose_checksum
from resilient_jax.errors import ChecksumMismatch, InternalError, MessageError, PeerUnreachable
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
from resilient_jax.transport.server_address import parse_address

CONNECT_TIMEOUT_S: Final = 10.0


class BulkChannel:
    """Connections to one server, as many as reads are under way at once; safe to share between threads."""

    def __init__(self, address: str, ticket: bytes, credentials: Credentials) -> None:
        """Connects to nothing yet.

        Args:
            address: of the bulk server, "host:port".
            ticket: that it gave.
            credentials: of the job.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self._address = address
        self._ticket = ticket
        self._tls = make_client_context(credentials.tls) if credentials.tls is not None else None
        self._server_name = credentials.tls.server_name if credentials.tls is not None else None
        self._lock = threading.Lock()  # guards what follows
        self._idle: list[socket.socket] = []
        self._used: set[socket.socket] = set()
        self._closed = False

    def read_into(self, request: msgspec.Struct, out: memoryview, *, timeout_s: float) -> None:
        """Fills `out` with the bytes that the request asks for, verified against the digest if one came with them.

        Raises:
            ChecksumMismatch: they were changed on the way, or in the peer's memory meanwhile.
            MessageError: it is another number of bytes, or no answer of ours.
            PeerUnreachable: the peer is gone, or did not answer in time, or this channel is closed.
            ResilientJaxError: what the peer raised.
        """
        connection = self._acquire(time.monotonic() + min(CONNECT_TIMEOUT_S, timeout_s))
        is_whole = False
        try:
            end_s = time.monotonic() + timeout_s
            send_frame(connection, request, end_s)
            head = self._decode(receive_frame(connection, end_s))
            if isinstance(head, BulkRefusal):
                is_whole = True
                raise ERROR_CLASSES.get(head.error, InternalError)(head.message)
            if head.length != len(out):
                raise MessageError(f"{self._address} sends {head.length} bytes, expected {len(out)}")
            receive_into(connection, out, end_s)
            is_whole = True
        except DeadlineExceeded as error:
            raise PeerUnreachable(f"{self._address} did not answer a read within {timeout_s} s") from error
        except (OSError, EOFError) as error:
            raise PeerUnreachable(f"{self._address} broke off a read: {error}") from error
        finally:
            self._release(connection, is_whole=is_whole)
        if head.checksum is None:
            return
        found = choose_checksum(head.checksum).compute(out)
        if found != head.digest:
            raise ChecksumMismatch(
                f"{len(out)} bytes from {self._address} were changed on the way: found {head.checksum} {found:08x}, "
                f"expected {head.digest:08x}"
            )

    def close(self) -> None:
        """Ends every read; those that come after fail."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._used:  # whoever reads, or connects, wakes and closes it
                shut_down_socket(connection)
        for connection in idle:
            connection.close()

    def _acquire(self, end_s: float) -> socket.socket:
        """A connection that nobody else uses. One that was idle may be broken by now: then it is seen here."""
        while True:
            with self._lock:
                self._check_open()
                if not self._idle:
                    break
                connection = self._idle.pop()
                self._used.add(connection)
            if _is_quiet(connection):
                return connection
            self._release(connection, is_whole=False)
        return self._connect(end_s)

    def _release(self, connection: socket.socket, *, is_whole: bool) -> None:
        """To be used again if nothing of an answer is still to come."""
        with self._lock:
            self._used.discard(connection)
            if is_whole and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise PeerUnreachable(f"our channel to {self._address} was closed")

    def _connect(self, end_s: float) -> socket.socket:
        """A new connection, to the first of the name's addresses that takes it."""
        host, port = parse_address(self._address)
        failure: OSError | None = None
        try:
            for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                try:
                    return self._connect_to(socket.socket(family, kind, protocol), where, host, end_s)
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
        where: Any,  # noqa: ANN401 - of getaddrinfo, by family
        host: str,
        end_s: float,
    ) -> socket.socket:
        """Counts as used from its beginning, so that `close` ends it."""
        try:
            self._use(connection)
            connection.settimeout(max(0.001, end_s - time.monotonic()))
            connection.connect(where)
            if self._tls is not None:
                plain = connection
                connection = self._tls.wrap_socket(plain, server_hostname=self._server_name or host)
                self._use(connection, instead_of=plain)
            configure_socket(connection)
            send_all(connection, self._ticket, end_s)
        except BaseException:
            self._release(connection, is_whole=False)
            raise
        return connection

    def _use(self, connection: socket.socket, instead_of: socket.socket | None = None) -> None:
        with self._lock:
            self._used.discard(instead_of)
            self._used.add(connection)
            self._check_open()

    def _decode(self, head: bytes) -> BulkHeader | BulkRefusal:
        try:
            return HEADER_DECODER.decode(head)
        except msgspec.DecodeError as error:
            raise MessageError(
                f"{self._address} answered a bulk read with something else ({error}); does it run the same version "
                "of resilient_jax?"
            ) from error


def _is_quiet(connection: socket.socket) -> bool:
    """Whether nothing came, not even its end."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return not waiting.poll(0)
