"""Bulk reads on the wire: a socket of their own, so that bytes go from memory to memory and nowhere else.

gRPC copies every message several times; at gigabytes that is most of the time. Rules of a connection:
1. The client sends the ticket that it got through gRPC, so nobody is here whom the gate did not let in.
2. The client sends a request, the server a head, and, unless the head says why not, as many bytes as it announces.
   Then the next request. Requests and heads are msgpack frames; the bytes are raw, under the head's digest if there
   is one.
3. Whoever finds anything else, or waits longer than its deadline, closes the connection.
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
"""A longer request or head is not one of ours."""
TLS_ALERT: Final = b"\x15\x03"
"""With this begins what a server with TLS says to a client without (RFC 8446, 5.1). As a length it would be 350 MB."""
_TIMEVAL: Final = struct.Struct("ll")


class BulkHeader(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """So many bytes follow.

    Attributes:
        checksum: the algorithm of `digest`; None: there is none, the client knows better what is right.
        digest: of the bytes, for what happens to them on the way.
    """

    length: int
    checksum: ChecksumName | None = None
    digest: int = 0


class BulkRefusal(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """None follow, because of an error of ours by the name of its class."""

    error: str
    message: str


HEADER_DECODER: Final[msgspec.msgpack.Decoder[BulkHeader | BulkRefusal]] = msgspec.msgpack.Decoder(
    BulkHeader | BulkRefusal
)
_ENCODER: Final = msgspec.msgpack.Encoder()


class DeadlineExceeded(OSError):
    """The other side took longer than the deadline."""


def configure_socket(connection: socket.socket) -> None:
    """Sets what both ends want of a connected socket."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_frame(connection: socket.socket, message: msgspec.Struct, deadline_s: float) -> None:
    """Sends a request or a head."""
    send_all(connection, encode_frame(_ENCODER.encode(message)), deadline_s)


def send_all(connection: socket.socket, data: bytes | memoryview, deadline_s: float) -> None:
    """Sends all of it.

    Raises:
        DeadlineExceeded: not before `end_s`, of the monotonic clock.
        OSError: the connection is broken.
    """
    left = memoryview(data)
    while left:
        _set_deadline(
            connection, socket.SO_SNDTIMEO, deadline_s
        )  # each time: the kernel's timer starts anew with a call
        try:
            left = left[connection.send(left) :]
        except (BlockingIOError, TimeoutError):
            continue  # the deadline says whether to go on


def receive_frame(connection: socket.socket, deadline_s: float) -> bytes:
    """A request or a head, still encoded.

    Raises:
        MessageError: it is too long to be one.
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
    """Fills `out`.

    Raises:
        DeadlineExceeded: not before `end_s`, of the monotonic clock.
        EOFError: the other side closed before.
        OSError: the connection is broken.
    """
    filled = 0
    while filled < len(out):
        _set_deadline(connection, socket.SO_RCVTIMEO, deadline_s)
        try:
            got = connection.recv_into(out[filled:], 0, *_wait_all(connection))
        except (BlockingIOError, TimeoutError):
            continue  # the deadline says whether to go on
        if not got:
            raise EOFError("the other side closed the connection")
        filled += got


def shut_down_socket(connection: socket.socket) -> None:
    """Wakes whoever waits on it. Of the socket itself: TLS would forget its keys first, and a thread that sends just
    then would go on in the clear.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def make_server_context(tls: TlsFiles) -> ssl.SSLContext:
    """For a server that refuses clients without a certificate.

    Raises:
        ConfigError: a file cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, tls)
    return context


def make_client_context(tls: TlsFiles) -> ssl.SSLContext:
    """For a client that checks the server's certificate and name.

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
    """One call of the kernel for all the bytes, where they come as they are."""
    return () if isinstance(connection, ssl.SSLSocket) else (socket.MSG_WAITALL,)


def _set_deadline(connection: socket.socket, option: int, deadline_s: float) -> None:
    """By the kernel's own timer: Python's would make the socket one that never waits, and wait beside it. TLS in
    Python knows only the latter.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded("the deadline has passed")
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(left_s)
        return
    microseconds = max(1, int(left_s * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))
