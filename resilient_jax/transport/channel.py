"""The asyncio client of one peer."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self, cast

import grpc
import grpc.aio

from resilient_jax.errors import ResilientJaxError
from resilient_jax.transport.authentication import TOKEN_METADATA_KEY
from resilient_jax.transport.byte_stream import ByteStream
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.error_codec import decode_error
from resilient_jax.transport.grpc_options import IMPATIENT, Keepalive, channel_options
from resilient_jax.transport.method import (
    ByteStreamMethod,
    Method,
    RequestT,
    ResponseT,
    decode,
    encode,
    format_method_path,
)
from resilient_jax.transport.renewed_channel import RenewedChannel

_EOF = cast(Any, grpc.aio).EOF  # missing in the type stubs


class Channel:
    """Calls methods of the server at `address`; connects at the first call and reconnects by itself.

    The channel never repeats a call: after PeerUnreachable a request may or may not have been served.
    """

    def __init__(self, address: str, credentials: Credentials, *, keepalive: Keepalive = IMPATIENT) -> None:
        """Create the channel without connecting.

        Args:
            address: host:port of the server.
            credentials: of the job.
            keepalive: when a silent server counts as gone.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self.address = address
        self._metadata = ((TOKEN_METADATA_KEY, credentials.token),)
        self._connector = RenewedChannel(
            address, credentials.tls, lambda name: channel_options(name, keepalive)
        )

    async def call(
        self, service: str, method: Method[RequestT, ResponseT], request: RequestT, *, timeout_s: float
    ) -> ResponseT:
        """Return the response to `request`.

        Raises:
            PeerUnreachable: no answer within `timeout_s`; at once, with `is_refused`, if no process listens.
            Unauthenticated: the peer does not accept our token.
            MessageError: the request or the response does not decode.
            ResilientJaxError: the error that the peer's handler raised.
        """
        assert not method.is_streaming, f"{method.name} streams: use stream()"
        path = format_method_path(service, method)
        unary = self._connector.get().unary_unary(path)
        try:
            data = await unary(encode(request), timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._ours(error, path, timeout_s) from error
        except grpc.aio.UsageError as error:
            raise self._closed(path) from error
        except asyncio.CancelledError as error:
            if not is_task_cancelled():
                raise self._closed(path) from error
            raise
        return decode(cast(bytes, data), method.response, f"response to {path} from {self.address}")

    async def stream(
        self,
        service: str,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[ResponseT, None]:
        """Yield the responses to `request` as they arrive; close the generator to end the call.

        Without `timeout_s` the call may last for ever: keepalive pings detect a peer that dies or stops, within 4 s
        (see `grpc_options`).

        Raises:
            The same as `call`.
        """
        assert method.is_streaming, f"{method.name} does not stream: use call()"
        path = format_method_path(service, method)
        where = f"response to {path} from {self.address}"
        try:
            call = self._connector.get().unary_stream(path)(
                encode(request), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.UsageError as error:
            raise self._closed(path) from error
        try:
            while (data := await call.read()) is not _EOF:
                yield decode(cast(bytes, data), method.response, where)
        except grpc.aio.AioRpcError as error:
            raise self._ours(error, path, timeout_s) from error
        except asyncio.CancelledError as error:
            if not is_task_cancelled():
                raise self._closed(path) from error
            raise
        finally:
            # A reader that stops early must not leave the server sending.
            call.cancel()

    @contextlib.asynccontextmanager
    async def open_byte_stream(
        self, service: str, method: ByteStreamMethod[RequestT], request: RequestT
    ) -> AsyncGenerator[ByteStream, None]:
        """Open a stream of bytes, which ends with the context.

        A peer that is not there, or refuses, has ended the stream: its reader and its writer see the same.
        """
        call = self._connector.get().stream_stream(format_method_path(service, method))(
            metadata=self._metadata
        )
        stream = ByteStream(call)
        try:
            await stream.write(encode(request))
            yield stream
        finally:
            call.cancel()

    async def close(self) -> None:
        """End the connection and every call on it."""
        await self._connector.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _ours(self, error: grpc.aio.AioRpcError, path: str, timeout_s: float | None) -> ResilientJaxError:
        return decode_error(
            error.code(),
            error.details(),
            cast(Any, error.trailing_metadata()),
            address=self.address,
            path=path,
            timeout_s=timeout_s,
        )

    def _closed(self, path: str) -> ResilientJaxError:
        return decode_error(
            grpc.StatusCode.CANCELLED, None, None, address=self.address, path=path, timeout_s=None
        )


def is_task_cancelled() -> bool:
    """Return whether this task was cancelled: gRPC raises CancelledError also when a channel is closed or retired."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
