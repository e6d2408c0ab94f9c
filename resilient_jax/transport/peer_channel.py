"""The client of one service of a peer; see `peer_calls` for the rules."""

import select
import socket
import threading
import time
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from resilient_jax.erasure import choose_checksum
from resilient_jax.errors import ChecksumMismatch, InternalError, MessageError, PeerUnreachable
from resilient_jax.protocol.framing import encode_frame
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.error_codec import ERROR_CLASSES
from resilient_jax.transport.method import Method, ReadMethod, RequestT, ResponseT, decode, encode
from resilient_jax.transport.peer_calls import HEADER_DECODER, AnswerHeader, CallRefusal, PeerRequest
from resilient_jax.transport.peer_connection import CONNECT_TIMEOUT_S, OpenSockets, PeerConnector
from resilient_jax.transport.socket_io import (
    DeadlineExceeded,
    receive_bytes,
    receive_frame,
    receive_into,
    send_all,
)

MAX_ANSWER_BYTES: Final = 2**34
"""More is damage, or no answer of ours: the largest are compiled programs."""


class PeerChannel:
    """Connections to one service, one for each concurrent call; safe to share between threads."""

    def __init__(self, address: str, credentials: Credentials, service: str) -> None:
        """Create the channel without connecting.

        Args:
            address: "host:port" of a `PeerServer`.
            service: name of its service.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self._address = address
        self._connector = PeerConnector(address, credentials, service)
        self._sockets = OpenSockets(f"our channel to {address}")
        self._lock = threading.Lock()  # guards the connections below
        self._idle: list[socket.socket] = []

    def call(self, method: Method[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        """Return the answer to a request.

        Raises:
            MessageError: the answer is not of our protocol.
            PeerUnreachable: the peer is gone or did not answer in time, or this channel is closed.
            Unauthenticated: one side has another token.
            ResilientJaxError: the error that the peer raised.
        """
        _, data = self._exchange(method, request, None, timeout_s)
        return decode(data, method.response, f"the answer of {self._address} to {method.name}")

    def read_into(
        self, method: ReadMethod[RequestT], request: RequestT, out: memoryview, *, timeout_s: float
    ) -> None:
        """Fill `out` with the requested bytes, verified against their digest if the peer sends one.

        Raises:
            ChecksumMismatch: the bytes were changed in transit, or in the peer's memory meanwhile.
            MessageError: the answer has another number of bytes, or is not of our protocol.
            PeerUnreachable, Unauthenticated, ResilientJaxError: as `call`.
        """
        header, _ = self._exchange(method, request, out, timeout_s)
        # After the connection is released, so that another call need not wait for the checksum.
        if header.checksum is None:
            return
        found = choose_checksum(header.checksum).compute(out)
        if found != header.digest:
            raise ChecksumMismatch(
                f"{len(out)} bytes from {self._address} were changed in transit: found {header.checksum} {found:08x}, "
                f"expected {header.digest:08x}"
            )

    def close(self) -> None:
        """End every call; later ones fail."""
        self._sockets.shut_down()  # the thread that calls or connects wakes, and closes its connection
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._sockets.close(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(
        self,
        method: Method[Any, Any] | ReadMethod[Any],
        request: msgspec.Struct,
        out: memoryview | None,
        timeout_s: float,
    ) -> tuple[AnswerHeader, memoryview]:
        """Return the header of the answer, and its bytes, which are in `out` if there is one."""
        frame = encode_frame(encode(PeerRequest(method.name, msgspec.Raw(encode(request)))))
        deadline_s = time.monotonic() + timeout_s
        connection = self._take_idle()
        was_idle = connection is not None
        while True:
            if connection is None:
                connect_until_s = min(time.monotonic() + CONNECT_TIMEOUT_S, deadline_s)
                connection = self._connector.connect(connect_until_s, self._sockets)
            is_complete = False
            try:
                try:
                    send_all(connection, frame, deadline_s)
                    data = receive_frame(connection, deadline_s)
                except (OSError, EOFError) as error:
                    if (
                        was_idle
                        and not isinstance(error, DeadlineExceeded)
                        and not self._sockets.is_shut_down
                    ):
                        continue
                    raise
                header = decode_message(
                    HEADER_DECODER, data, f"the answer of {self._address} to {method.name}"
                )
                if isinstance(header, CallRefusal):
                    # A refusal is a complete answer: the connection serves the next call.
                    is_complete = True
                    raise ERROR_CLASSES.get(header.error, InternalError)(header.message)
                answer = self._receive(connection, header.length, out, deadline_s)
                is_complete = True
                return header, answer
            except DeadlineExceeded as error:
                raise PeerUnreachable(
                    f"{self._address} did not answer {method.name} within {timeout_s} s"
                ) from error
            except (OSError, EOFError) as error:
                raise PeerUnreachable(f"{self._address} broke off {method.name}: {error}") from error
            finally:
                self._release(connection, is_complete=is_complete)
                connection, was_idle = None, False

    def _receive(
        self, connection: socket.socket, length: int, out: memoryview | None, deadline_s: float
    ) -> memoryview:
        if out is None:
            if not 0 <= length <= MAX_ANSWER_BYTES:
                raise MessageError(
                    f"{self._address} sends {length} bytes, expected {MAX_ANSWER_BYTES} at most"
                )
            return receive_bytes(connection, length, deadline_s)
        if length != len(out):
            raise MessageError(f"{self._address} sends {length} bytes, expected {len(out)}")
        receive_into(connection, out, deadline_s)
        return out

    def _take_idle(self) -> socket.socket | None:
        """Return an unused connection, if there is one; those that broke meanwhile are detected here."""
        while True:
            self._sockets.check_open()
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            # The server sends nothing unasked: what can be read here is the end of the connection.
            if _is_quiet(connection):
                return connection
            self._sockets.close(connection)

    def _release(self, connection: socket.socket, *, is_complete: bool) -> None:
        """Keep the connection for the next call if the answer was received to its end, else close it."""
        with self._lock:
            # After a broken call the rest of its answer may still arrive, and would be taken for the next answer.
            if is_complete and not self._sockets.is_shut_down:
                self._idle.append(connection)
                return
        self._sockets.close(connection)


def _is_quiet(connection: socket.socket) -> bool:
    """Return whether the socket has nothing to read, not even its end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)
