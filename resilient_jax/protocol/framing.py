"""Messages on a byte stream: four bytes of length (big endian), then the message."""

import struct

HEADER = struct.Struct(">I")
LIMIT_BYTES = 16 * 2**20
"""A longer frame is a bug or a foreign writer, never a message of ours."""


class FrameError(ValueError):
    """The stream does not hold frames of ours."""


def frame(message: bytes) -> bytes:
    """The message with its length in front."""
    if len(message) > LIMIT_BYTES:
        raise FrameError(f"message of {len(message)} bytes; at most {LIMIT_BYTES} fit a frame")
    return HEADER.pack(len(message)) + message


class Deframer:
    """Gives back whole messages from bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete now, in order."""
        self._buffer += data
        messages: list[bytes] = []
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            if length > LIMIT_BYTES:
                raise FrameError(f"frame announces {length} bytes; at most {LIMIT_BYTES} are allowed")
            if len(self._buffer) < HEADER.size + length:
                break
            messages.append(bytes(self._buffer[HEADER.size : HEADER.size + length]))
            del self._buffer[: HEADER.size + length]
        return messages
