"""The asyncio client of one peer."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import grpc
import grpc.aio

from resilient_jax.errors import MessageError, PeerUnreachable, ResilientJaxError, Unauthenticated
from resilient_jax.transport.byte_stream import ByteStream
from resilient_jax.transport.call_proofs import CallSession
from resilient_jax.transport.client_sessions import (
    OPENING_TIMEOUT_S,
    ClientSessions,
    has_proof,
    make_impostor_error,
)
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.error_codec import STALE_CODE, decode_error, is_named
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

ResultT = TypeVar("ResultT")
Metadata = tuple[tuple[str, bytes], ...]


class Channel:
    """Calls methods of the server at `address`; connects at the first call and reconnects by itself.

    No call is made before the server has proved that it has the job's token, and no answer is returned without such a
    proof (see `call_proofs`). The channel never repeats a call that may have been served: after PeerUnreachable a
    request may or may not have been.
    """

    def __init__(self, address: str, credentials: Credentials, *, keepalive: Keepalive = IMPATIENT) -> None:
        """Create the channel without connecting.

        Args:
            address: host:port of the server.
            keepalive: when a silent server counts as gone.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self.address = address
        self._sessions = ClientSessions(address, credentials.token)
        self._connector = RenewedChannel(
            address, credentials.tls, lambda name: channel_options(name, keepalive)
        )

    async def call(
        self, service: str, method: Method[RequestT, ResponseT], request: RequestT, *, timeout_s: float
    ) -> ResponseT:
        """Return the response to `request`.

        Raises:
            PeerUnreachable: no answer within `timeout_s`; at once, with `is_refused`, if no process listens.
            Unauthenticated: the peer does not accept this process's token, or has not proved that it has the token.
            MessageError: the request or the response does not decode.
            ResilientJaxError: the error that the peer's handler raised.
        """
        assert not method.is_streaming, f"{method.name} streams: use stream()"
        path, data = format_method_path(service, method), encode(request)
        deadline_s = asyncio.get_running_loop().time() + timeout_s

        async def attempt() -> bytes:
            session = await self._get_session(path, _find_left_s(deadline_s), timeout_s)
            number, metadata = session.sign_call(path, data)
            with self._translated(path, timeout_s, session, number):
                unary = self._connector.get().unary_unary(path)
                call = unary(data, timeout=_find_left_s(deadline_s), metadata=metadata)
                answer = cast(bytes, await call or b"")  # None: it has ended without one
                if not has_proof(await call.trailing_metadata(), session, number):
                    raise make_impostor_error(self.address)
            return answer

        answer = await _repeat_if_not_served(attempt)
        return decode(answer, method.response, f"response to {path} from {self.address}")

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
        path, data = format_method_path(service, method), encode(request)
        where = f"response to {path} from {self.address}"

        async def begin(channel: grpc.aio.Channel, metadata: Metadata) -> Any:  # noqa: ANN401 - private in grpc
            return channel.unary_stream(path)(data, timeout=timeout_s, metadata=metadata)

        async with self._opened(path, data, timeout_s, begin) as (call, translated):
            while True:
                with translated():
                    answer = await call.read()
                if answer is _EOF:
                    return
                yield decode(cast(bytes, answer), method.response, where)

    @contextlib.asynccontextmanager
    async def open_byte_stream(
        self, service: str, method: ByteStreamMethod[RequestT], request: RequestT
    ) -> AsyncGenerator[ByteStream, None]:
        """Open a stream of bytes, which ends with the context.

        Raises:
            The same as `call`, while the stream is opened. Afterwards the stream's reader and writer see its end.
        """
        path, data = format_method_path(service, method), encode(request)

        async def begin(channel: grpc.aio.Channel, metadata: Metadata) -> Any:  # noqa: ANN401 - private in grpc
            call = channel.stream_stream(path)(metadata=metadata)
            await ByteStream(call).write(data)
            return call

        async with self._opened(path, data, None, begin) as (call, _):
            yield ByteStream(call)

    async def close(self) -> None:
        """End the connection and every call on it."""
        await self._connector.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def _opened(
        self,
        path: str,
        data: bytes,
        timeout_s: float | None,
        begin: Callable[[grpc.aio.Channel, Metadata], Awaitable[Any]],
    ) -> AsyncGenerator[tuple[Any, Callable[[], AbstractContextManager[None]]], None]:
        """Begin a streaming call that the server has admitted, with the translation of its errors, and end it."""

        async def attempt() -> tuple[Any, CallSession, int]:
            session = await self._get_session(path, timeout_s, timeout_s)
            number, metadata = session.sign_call(path, data)
            with self._translated(path, timeout_s, session, number):
                call = await begin(self._connector.get(), metadata)
                try:
                    await self._check_admitted(call, session, number)
                except BaseException:
                    call.cancel()
                    raise
            return call, session, number

        call, session, number = await _repeat_if_not_served(attempt)
        try:
            yield call, lambda: self._translated(path, timeout_s, session, number)
        finally:
            # A reader that stops early must not leave the server sending.
            call.cancel()

    async def _check_admitted(self, call: Any, session: CallSession, number: int) -> None:  # noqa: ANN401 - private in grpc
        """Wait until the server has proved that it has admitted a streaming call."""
        if has_proof(await call.initial_metadata(), session, number):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                await call.read()  # raises why the call was refused, if it was
        raise make_impostor_error(self.address)

    async def _get_session(self, path: str, left_s: float | None, timeout_s: float | None) -> CallSession:
        with self._translated(path, timeout_s):
            return await self._sessions.get(self._connector.get(), left_s)

    @contextlib.contextmanager
    def _translated(
        self, path: str, timeout_s: float | None, session: CallSession | None = None, number: int = 0
    ) -> Generator[None, None, None]:
        """Raise what gRPC raises as errors of ours; without a `session` it was about to be opened."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._ours(error, path, timeout_s, session, number) from error
        except grpc.aio.UsageError as error:
            raise self._ours_of(grpc.StatusCode.CANCELLED, path, timeout_s) from error
        except TimeoutError as error:
            raise self._ours_of(grpc.StatusCode.DEADLINE_EXCEEDED, path, timeout_s) from error
        except asyncio.CancelledError as error:
            if not is_task_cancelled():
                raise self._ours_of(grpc.StatusCode.CANCELLED, path, timeout_s) from error
            raise

    def _ours(
        self,
        error: grpc.aio.AioRpcError,
        path: str,
        timeout_s: float | None,
        session: CallSession | None,
        number: int,
    ) -> ResilientJaxError:
        metadata = cast(Any, error.trailing_metadata())
        if error.code() is STALE_CODE:
            if session is not None:
                self._sessions.forget(session)
            return _NotServed(f"{self.address} has begun new sessions; {path} was not served")
        ours = self._ours_of(error.code(), path, timeout_s, error.details(), metadata)
        is_proved = session is not None and has_proof(metadata, session, number)
        # An impostor may refuse, and end a call, but raise no error of a handler.
        if (
            is_proved
            or not is_named(metadata)
            or isinstance(ours, Unauthenticated | PeerUnreachable | MessageError)
        ):
            return ours
        return make_impostor_error(self.address)

    def _ours_of(
        self,
        code: grpc.StatusCode,
        path: str,
        timeout_s: float | None,
        details: str | None = None,
        metadata: Any = None,  # noqa: ANN401 - as gRPC has it
    ) -> ResilientJaxError:
        return decode_error(code, details, metadata, address=self.address, path=path, timeout_s=timeout_s)


class _NotServed(PeerUnreachable):
    """The server does not know the session of a call, which it has not served."""


async def _repeat_if_not_served(attempt: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Return what the attempt returns; make it once more in a new session if the server has forgotten the first."""
    try:
        return await attempt()
    except _NotServed:
        return await attempt()


def _find_left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - asyncio.get_running_loop().time())


def is_task_cancelled() -> bool:
    """Return whether this task was cancelled: gRPC raises CancelledError also when a channel is closed or retired."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
