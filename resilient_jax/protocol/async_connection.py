"""The event loop's end of a `connection`: the same messages, sent and received without blocking the loop."""

import asyncio
import collections
import os
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Generic

import msgspec

from resilient_jax.protocol.connection import (
    RECEIVE_BUFFER_BYTES,
    MessageDecoder,
    ReceivedT,
    SentT,
    encode_message,
)


class AsyncConnection(Generic[SentT, ReceivedT]):
    """One end of a socket pair, which it owns. It sends descriptors and receives none.

    Iterating yields each message as it arrives, until the peer is gone. What the peer does not read is kept in memory:
    a worker that is stopped must never stop its agent, which ends such a worker after a while.
    """

    def __init__(self, connected: socket.socket, decoder: msgspec.msgpack.Decoder[ReceivedT]) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._messages = MessageDecoder(decoder)
        self._outbox: collections.deque[tuple[memoryview, list[int]]] = collections.deque()
        """What the socket had no room for: the rest of a frame, with duplicates of its descriptors."""
        self._loop = asyncio.get_running_loop()

    def send(self, message: SentT, descriptors: Sequence[int] = ()) -> None:
        """Send a message, now or as soon as there is room; the descriptors stay the caller's to close.

        A peer that is gone gets nothing, without an error here: `__aiter__` ends, and the process's exit explains it.
        """
        if self._socket.fileno() < 0:
            return
        frame = memoryview(encode_message(message, len(descriptors)))
        # At once only if no other frame waits: frames keep their order.
        if not self._outbox:
            try:
                frame, descriptors = self._write(frame, descriptors)
            except OSError:
                return
        if frame:
            # Duplicates, since the caller closes its own when this returns.
            self._outbox.append((frame, [os.dup(descriptor) for descriptor in descriptors]))
            self._loop.add_writer(self._socket, self._flush)

    async def __aiter__(self) -> AsyncIterator[ReceivedT]:
        while True:
            try:
                data = await self._loop.sock_recv(self._socket, RECEIVE_BUFFER_BYTES)
            except OSError:  # the peer died
                return
            if not data:
                return
            for received in self._messages.feed(data):
                yield received.message

    def close(self) -> None:
        """Close the socket, and drop what was not sent yet."""
        if self._socket.fileno() < 0:
            return
        self._discard_outbox()
        # Now: a cancelled read would do so later, when the descriptor may be reused.
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _write(self, frame: memoryview, descriptors: Sequence[int]) -> tuple[memoryview, Sequence[int]]:
        """Write as much as there is room for; return what is left of the frame and of its descriptors."""
        try:
            if descriptors:
                sent = socket.send_fds(self._socket, [frame], list(descriptors))
            else:
                sent = self._socket.send(frame)
        except BlockingIOError:
            return frame, descriptors
        return frame[sent:], ()

    def _flush(self) -> None:
        try:
            while self._outbox:
                frame, descriptors = self._outbox[0]
                rest, _ = self._write(frame, descriptors)
                if len(rest) == len(frame):
                    return
                # They went with the first byte of the frame, so what is left of it is bytes only.
                for descriptor in descriptors:
                    os.close(descriptor)
                self._outbox[0] = (rest, [])
                if not rest:
                    self._outbox.popleft()
        except OSError:  # the peer is gone
            pass
        self._discard_outbox()

    def _discard_outbox(self) -> None:
        self._loop.remove_writer(self._socket)
        while self._outbox:
            for descriptor in self._outbox.popleft()[1]:
                os.close(descriptor)
