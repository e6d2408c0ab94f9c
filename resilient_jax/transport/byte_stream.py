"""Bytes in both directions inside one gRPC call: it has the port, the admission and the TLS of every other call."""

import asyncio
from typing import Any, Final, cast

import grpc
import grpc.aio

_EOF: Final = cast(Any, grpc.aio).EOF  # missing in the type stubs


class ByteStream:
    """One end of the stream. Pieces arrive in order, none is empty, and their division has no meaning.

    A reader that does not read slows down the writer of the other end, as with a socket.
    """

    def __init__(self, end: Any) -> None:  # noqa: ANN401 - a gRPC call or the context of a handler, which read and write alike
        self._end = end

    async def read(self) -> bytes:
        """Return the next piece, or nothing once the other end has closed the stream or is gone."""
        try:
            data = await self._end.read()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return b""
        return b"" if data is _EOF else cast(bytes, data)

    async def write(self, data: bytes) -> bool:
        """Send a piece that is not empty; return False if the stream has ended."""
        assert data, "an empty piece would be taken for the end"
        try:
            await self._end.write(data)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return False
        return True
