"""Bytes and messages over a connected socket, from memory to memory, each transfer with a deadline.

gRPC copies every message several times; at gigabytes that is most of the time.
"""

import contextlib
import ctypes
import socket
import ssl
import struct
import time
from typing import Final

import msgspec

from resilient_jax.errors import MessageError
from resilient_jax.protocol.framing import HEADER, encode_frame

MAX_FRAME_BYTES: Final = 65_536
"""The limit of a frame, where no other is given: a longer one is not one of ours."""
KEEPALIVE_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""With these the kernel finds a peer whose machine has vanished, within half a minute."""
TLS_ALERT: Final = b"\x15\x03"
"""The first bytes that a server with TLS sends to a client without (RFC 8446, 5.1). As a length: 350 MB."""
_TIMEVAL: Final = struct.Struct("ll")
_make_bytearray: Final = ctypes.pythonapi.PyByteArray_FromStringAndSize
_make_bytearray.restype, _make_bytearray.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)


class DeadlineExceeded(OSError):
    """The other side took longer than the deadline."""


def configure_socket(connection: socket.socket) -> None:
    """Set the options of a connected socket, the same on both sides."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for level, option, value in KEEPALIVE_OPTIONS:
        connection.setsockopt(level, option, value)


def send_frame(connection: socket.socket, message: msgspec.Struct, deadline_s: float) -> None:
    """Send a message, encoded as msgpack."""
    send_all(connection, encode_frame(msgspec.msgpack.encode(message)), deadline_s)


def send_all(connection: socket.socket, data: bytes | memoryview, deadline_s: float) -> None:
    """Send all of `data`.

    Raises:
        DeadlineExceeded: the transfer did not end before `deadline_s`, of the monotonic clock.
        OSError: the connection is broken.
    """
    left = memoryview(data)
    while left:
        # Before each call: the kernel's timer restarts with it.
        _set_deadline(connection, socket.SO_SNDTIMEO, deadline_s)
        try:
            left = left[connection.send(left) :]
        except (BlockingIOError, TimeoutError):
            continue  # the next turn checks the deadline


def receive_frame(
    connection: socket.socket, deadline_s: float, max_bytes: int = MAX_FRAME_BYTES
) -> memoryview:
    """Return a message, still encoded.

    Raises:
        MessageError: the frame is longer than `max_bytes`.
        EOFError: the other side refuses a connection without TLS.
        DeadlineExceeded, OSError, EOFError: as `receive_into`.
    """
    header = bytearray(HEADER.size)
    receive_into(connection, memoryview(header), deadline_s)
    if header.startswith(TLS_ALERT):
        raise EOFError("the other side uses TLS and we do not; give this process the job's certificates too")
    (length,) = HEADER.unpack(header)
    if length > max_bytes:
        raise MessageError(f"frame of {length} bytes, expected {max_bytes} at most")
    return receive_bytes(connection, length, deadline_s)


def receive_bytes(connection: socket.socket, size: int, deadline_s: float) -> memoryview:
    """Return so many bytes, in memory of their own; raises as `receive_into`."""
    # `bytearray(size)` writes zeros first, and new memory of the kernel is cleared page by page: either takes as long
    # as to receive. This is memory that malloc may have used before: with 16 MiB, 5.8 ms instead of 15.
    data = memoryview(_make_bytearray(None, size))
    receive_into(connection, data, deadline_s)
    return data


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
