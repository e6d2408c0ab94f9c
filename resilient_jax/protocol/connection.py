"""IPC between two processes of a host: complete typed messages over a socket pair, optionally with file descriptors.

It connects agent and worker, agent and snapshot server, snapshot server and worker, worker and storage process.

Rules:
1. A frame (see `framing`) holds one byte, the number of descriptors that travel with it, then the message in msgpack.
2. Descriptors are sent with the first byte of their frame. The kernel never merges two sets of descriptors into one
   read, so they arrive in the order of their frames, at the latest with the frame's last byte.
3. A process at its limit of open files loses descriptors (the kernel drops them, not the bytes). Their message arrives
   nevertheless and says that they are lost; the connection stays usable.
4. A frame that was sent in part and cannot be finished ends the connection: what follows would be read as its rest.

`Connection` blocks and is for threads; `async_connection` has the same messages on an event loop and never blocks it.
"""

import collections
import contextlib
import dataclasses
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from resilient_jax.errors import MessageError
from resilient_jax.protocol.framing import FrameDecoder, encode_frame
from resilient_jax.protocol.message_decoding import decode_message

RECEIVE_BUFFER_BYTES: Final = 65_536
MAX_DESCRIPTORS: Final = 6
"""Of one message."""
SEND_TIMEOUT_S: Final = 60
"""A peer that reads nothing for so long, while its buffer of about a hundred messages is full, is as good as dead."""

_ENCODER: Final = msgspec.msgpack.Encoder()

SentT = TypeVar("SentT", bound=msgspec.Struct)
ReceivedT = TypeVar("ReceivedT")


@dataclasses.dataclass(frozen=True, slots=True)
class Received(Generic[ReceivedT]):
    """A message with its descriptors, which are the receiver's to close.

    Attributes:
        num_lost: descriptors that are lost because this process had no room for them.
    """

    message: ReceivedT
    descriptors: tuple[int, ...] = ()
    num_lost: int = 0

    def take_descriptors(self, count: int) -> tuple[int, ...]:
        """Return the descriptors of a message that has `count` of them.

        Raises:
            MessageError: another number arrived, or some were lost; descriptors that arrived are closed.
        """
        if self.num_lost or len(self.descriptors) != count:
            for descriptor in self.descriptors:
                os.close(descriptor)
            lost = (
                f", lost {self.num_lost} because this process has no room for more" if self.num_lost else ""
            )
            raise MessageError(
                f"{type(self.message).__name__}: found {len(self.descriptors)} descriptors{lost}, expected {count}"
            )
        return self.descriptors


def encode_message(message: msgspec.Struct, num_descriptors: int = 0) -> bytes:
    """Return the frame of a message.

    Raises:
        FrameError: the message is too long.
    """
    return encode_frame(bytes([num_descriptors]) + _ENCODER.encode(message))


class MessageDecoder(Generic[ReceivedT]):
    """Turns bytes and descriptors, as the kernel delivers them, into messages. Pure but for closing descriptors."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[ReceivedT]) -> None:
        self._decoder = decoder
        self._frames = FrameDecoder()
        self._sets: collections.deque[tuple[int, ...]] = collections.deque()
        """Of descriptors, one for each frame that has any and is not complete yet."""

    def feed(
        self, data: bytes, descriptors: Sequence[int] = (), *, is_truncated: bool = False
    ) -> list[Received[ReceivedT]]:
        """Return the messages that `data` completes, in order.

        Args:
            data: bytes of one read.
            is_truncated: whether the kernel dropped descriptors (MSG_CTRUNC).

        Raises:
            FrameError: the stream does not consist of frames.
            MessageError: a frame does not contain a message of the expected type.
        """
        if descriptors or is_truncated:
            self._sets.append(tuple(descriptors))
        return [self._decode(payload) for payload in self._frames.feed(data)]

    def close(self) -> None:
        """Close the descriptors whose messages never became complete."""
        while self._sets:
            for descriptor in self._sets.popleft():
                os.close(descriptor)

    def _decode(self, payload: bytes) -> Received[ReceivedT]:
        message = decode_message(self._decoder, memoryview(payload)[1:], "a message of another process")
        num_sent = payload[0]
        descriptors = self._sets.popleft() if num_sent and self._sets else ()
        return Received(message, descriptors, num_lost=num_sent - len(descriptors))


class Connection(Generic[SentT, ReceivedT]):
    """One end of a socket pair, which owns its descriptor. One thread receives; any may send.

    Iterating yields each message as it arrives, until the peer is gone.
    """

    def __init__(
        self,
        descriptor: int,
        decoder: msgspec.msgpack.Decoder[ReceivedT],
        *,
        send_timeout_s: int | None = SEND_TIMEOUT_S,
    ) -> None:
        """Take over a socket's descriptor; with `send_timeout_s=None` a send waits for as long as the peer is alive."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        timeout = struct.pack("ll", send_timeout_s or 0, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._sending = threading.Lock()  # guards the order of frames on the socket
        self._messages = MessageDecoder(decoder)
        self._readable = select.poll()  # not `select.select`, which refuses descriptors from 1024 on
        self._readable.register(self._socket, select.POLLIN)

    def send(self, message: SentT, descriptors: Sequence[int] = ()) -> None:
        """Send a message; the descriptors stay the caller's to close.

        Raises:
            OSError: the peer is gone, or did not read within the send timeout.
            FrameError: the message is too long.
        """
        frame = memoryview(encode_message(message, len(descriptors)))
        with self._sending:
            if descriptors:
                sent = socket.send_fds(self._socket, [frame], list(descriptors))
            else:
                sent = self._socket.send(frame)
            if sent == len(frame):
                return  # the peer may have read it and closed by now: an empty send would fail
            try:
                self._socket.sendall(frame[sent:])
            except OSError:
                self.shut_down()
                raise

    def receive(self, timeout_s: float | None = None) -> list[Received[ReceivedT]]:
        """Return the messages that are complete, waiting for one at most `timeout_s`; empty: none arrived in time.

        Raises:
            EOFError: the peer is gone.
            FrameError, MessageError: the peer violates the protocol.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if end_s is not None and not self._readable.poll(max(0.0, end_s - time.monotonic()) * 1000):
                return []
            try:
                data, descriptors, flags, _ = socket.recv_fds(
                    self._socket, RECEIVE_BUFFER_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:  # reset, or closed by this process
                raise EOFError("the connection was reset") from error
            if not data:
                raise EOFError("the peer closed the connection")
            if messages := self._messages.feed(
                data, descriptors, is_truncated=bool(flags & socket.MSG_CTRUNC)
            ):
                return messages

    def __iter__(self) -> Iterator[Received[ReceivedT]]:
        while True:
            try:
                messages = self.receive()
            except EOFError:
                return
            yield from messages

    def fileno(self) -> int:
        """Return the socket's descriptor, for a poll of several."""
        return self._socket.fileno()

    def abandon(self) -> None:
        """Forget the descriptor without closing it, after a fork of the process that uses it."""
        self._socket.detach()

    def shut_down(self) -> None:
        """End `receive` at both ends. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, and the descriptors of messages that never became complete."""
        self.shut_down()
        self._socket.close()
        self._messages.close()
