"""A socket pair between two processes of a host: whole messages, and the descriptors that belong to them.

Descriptors come with the first bytes of the frame that they were sent with, so in the order of the messages: whoever
decodes a message that has descriptors takes as many as it names.
"""

import collections
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from resilient_jax.errors import MessageError
from resilient_jax.protocol.framing import FrameDecoder, encode_frame

RECEIVE_BUFFER_BYTES: Final = 65_536
MAX_DESCRIPTORS: Final = 4
"""With one frame."""
SEND_TIMEOUT_S: Final = 60
"""The other side reads nothing for so long, and its buffer of a hundred messages is full: it is as good as dead."""

_ENCODER: Final = msgspec.msgpack.Encoder()


class FdConnection:
    """One end; owns its descriptor. One thread receives, any may send."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        deadline = struct.pack("ll", SEND_TIMEOUT_S, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)
        self._sending = threading.Lock()  # guards whole frames on the socket
        self._deframer = FrameDecoder()
        self._descriptors: collections.deque[int] = collections.deque()

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Sends a message; the descriptors stay the caller's to close.

        Raises:
            OSError: the other side is gone, or does not read.
        """
        data = memoryview(encode_frame(_ENCODER.encode(message)))
        with self._sending:
            if descriptors:
                data = data[socket.send_fds(self._socket, [data], list(descriptors)) :]
            self._socket.sendall(data)

    def receive(self) -> list[bytes]:
        """Waits for messages; gives none when the other side is gone."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._socket, RECEIVE_BUFFER_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except OSError:  # reset, or closed by us
                return []
            self._descriptors.extend(descriptors)
            if not data:
                return []
            if messages := self._deframer.feed(data):
                return messages

    def take_descriptor(self) -> int:
        """The next descriptor that came; the caller closes it.

        Raises:
            MessageError: none did.
        """
        return self.take_descriptors(1)[0]

    def take_descriptors(self, count: int) -> list[int]:
        """Those that came with the message that was just received; the caller closes them.

        Raises:
            MessageError: fewer came; they are closed, so that the next message gets its own.
        """
        if len(self._descriptors) < count:
            while self._descriptors:
                os.close(self._descriptors.popleft())
            raise MessageError("a message names a descriptor that did not come with it")
        return [self._descriptors.popleft() for _ in range(count)]

    def shut_down(self) -> None:
        """Ends `receive` here and at the other side."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket, and descriptors that nobody took."""
        self.shut_down()
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
