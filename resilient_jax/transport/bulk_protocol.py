"""The protocol of bulk reads: a separate socket, on which bytes go from memory to memory without further copies.

gRPC copies every message several times; at gigabytes that is most of the time. Rules of a connection:
1. The client sends the ticket that it got through gRPC, so only authenticated clients are admitted.
2. The client sends a request, the server a header and, unless the header is a refusal, the announced number of bytes.
   Then the next request follows. Requests and headers are msgpack frames; the bytes are raw. The header may carry
   their digest.
3. A side that receives anything else, or waits longer than its deadline, closes the connection.
"""

import contextlib
import socket
import ssl
import struct
import time
from typing import Final

import msgspec

from resilient_jax.erasure import ChecksumName
from resilient_jax.errors import MessageError
from resilient_jax.protocol.framing import HEADER, encode_frame
from resilient_jax.transport.credentials import TlsFiles, check_pem_files

TICKET_BYTES: Final = 16
MAX_FRAME_BYTES: Final = 65_536
"""The limit of a request or header: a longer frame is not one of ours."""
TLS_ALERT: Final = b"\x15\x03"
"""The first bytes that a server with TLS sends to a client without (RFC 8446, 5.1). As a length: 350 MB."""
_TIMEVAL: Final = struct.Struct("ll")


class BulkHeader(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Announces the bytes that follow.

    Attributes:
        checksum: algorithm of `digest`; None where the client verifies the bytes by other means.
        digest: digest of the bytes, which detects damage in transit.
    """

    length: int
    checksum: ChecksumName | None = None
    digest: int = 0


class BulkRefusal(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Announces that no bytes follow, because of an error, by the name of its class in `errors.py`."""

    error: str
    message: str


HEADER_DECODER: Final[msgspec.msgpack.Decoder[BulkHeader | BulkRefusal]] = msgspec.msgpack.Decoder(
    BulkHeader | BulkRefusal
)
_ENCODER: Final = msgspec.msgpack.Encoder()


class DeadlineExceeded(OSError):
    """The other side took longer than the deadline."""


def configure_socket(connection: socket.socket) -> None:
    """Set the options of a connected socket, the same on both sides."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_frame(connection: socket.socket, message: msgspec.Struct, deadline_s: float) -> None:
    """Send a request or a header."""
    send_all(connection, encode_frame(_ENCODER.encode(message)), deadline_s)


def send_all(connection: socket.socket, data: bytes | memoryview, deadline_s: float) -> None:
    """Send all of `data`.

    Raises:
        DeadlineExceeded: the transfer did not end before `deadline_s`, of the monotonic clock.
        OSError: the connection is broken.
    """
    left = memoryview(data)
    while left:
        _set_deadline(
            connection, socket.SO_SNDTIMEO, deadline_s
        )  # before each call: the kernel's timer restarts with it
        try:
            left = left[connection.send(left) :]
        except (BlockingIOError, TimeoutError):
            continue  # the next turn checks the deadline


def receive_frame(connection: socket.socket, deadline_s: float) -> bytes:
    """Return a request or a header, still encoded.

    Raises:
        MessageError: the frame is longer than MAX_FRAME_BYTES.
        EOFError: the other side refuses a connection without TLS.
        DeadlineExceeded, OSError, EOFError: as `receive_into`.
    """
    header = bytearray(HEADER.size)
    receive_into(connection, memoryview(header), deadline_s)
    if header.startswith(TLS_ALERT):
        raise EOFError("the other side uses TLS and we do not; give this process the job's certificates too")
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise MessageError(f"bulk frame of {length} bytes, expected {MAX_FRAME_BYTES} at most")
    message = bytearray(length)
    receive_into(connection, memoryview(message), deadline_s)
    return bytes(message)


def receive_into(connection: socket.socket, out: memoryview, deadline_s: float) -> None:
    """Fill `out`.

    Raises:
        DeadlineExceeded: the transfer did not end before `deadline_s`, of the monotonic clock.
        EOFError: the other side closed the connection first.
        OSError: the connection is broken.
    """
    filled = 0
    while filled < len(out):
        _set_deadline(connection, socket.SO_RCVTIMEO, deadline_s)
        try:
            got = connection.recv_into(out[filled:], 0, *_wait_all(connection))
        except (BlockingIOError, TimeoutError):
            continue  # the next turn checks the deadline
        if not got:
            raise EOFError("the other side closed the connection")
        filled += got


def shut_down_socket(connection: socket.socket) -> None:
    """Wake every thread that waits on the socket.

    It shuts down the socket below TLS: TLS would drop its keys first, and a thread that sends at that moment would
    continue in the clear.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def make_server_context(tls: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server that refuses clients without a certificate.

    Raises:
        ConfigError: a file cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, tls)
    return context


def make_client_context(tls: TlsFiles) -> ssl.SSLContext:
    """Return the context of a client that checks the server's certificate and name.

    Raises:
        ConfigError: a file cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, tls)
    return context


def _load(context: ssl.SSLContext, tls: TlsFiles) -> None:
    check_pem_files(tls)
    context.load_cert_chain(tls.certificate, tls.key)
    context.load_verify_locations(tls.authority)


def _wait_all(connection: socket.socket) -> tuple[int, ...]:
    """Return the flags to receive all bytes in one system call, which TLS cannot use."""
    return () if isinstance(connection, ssl.SSLSocket) else (socket.MSG_WAITALL,)


def _set_deadline(connection: socket.socket, option: int, deadline_s: float) -> None:
    """Set the kernel's timer of the socket to the deadline.

    Python's own timeouts make the socket non-blocking and poll beside it; TLS in Python supports only those.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded("the deadline has passed")
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(left_s)
        return
    microseconds = max(1, int(left_s * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))
