"""Frames on a byte stream: four bytes of length (big endian), then the payload."""

import struct

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 16 * 2**20
"""A longer frame is a bug or a foreign writer, never a message of ours."""


class FrameError(ValueError):
    """The stream does not consist of frames."""


def encode_frame(payload: bytes) -> bytes:
    """Return `payload` with its length in front.

    Raises:
        FrameError: the payload is longer than `MAX_FRAME_BYTES`.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"message of {len(payload)} bytes; at most {MAX_FRAME_BYTES} fit a frame")
    return HEADER.pack(len(payload)) + payload


class FrameDecoder:
    """Splits a byte stream, which may arrive in any pieces, into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes, in order.

        Raises:
            FrameError: a header announces more than `MAX_FRAME_BYTES`.
        """
        self._buffer += data
        payloads: list[bytes] = []
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"frame announces {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            if len(self._buffer) < HEADER.size + length:
                break
            payloads.append(bytes(self._buffer[HEADER.size : HEADER.size + length]))
            del self._buffer[: HEADER.size + length]
        return payloads
