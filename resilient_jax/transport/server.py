"""The asyncio server: handlers are coroutines and async generators."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self, cast

import grpc
import grpc.aio

from resilient_jax.errors import ResilientJaxError
from resilient_jax.transport.authentication import Authenticator, OnEvent
from resilient_jax.transport.byte_stream import ByteStream
from resilient_jax.transport.call_proofs import (
    ANSWER_KEY,
    ASK_NONCE,
    INTRODUCE,
    SERVICE,
    AskNonce,
    Introduction,
    ServerNonce,
    StaleSession,
    Welcome,
)
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.error_codec import encode_error
from resilient_jax.transport.grpc_options import server_options
from resilient_jax.transport.method import AnyMethod, ByteStreamMethod, decode, encode, format_method_path
from resilient_jax.transport.server_address import bind_server, check_own_address

logger = logging.getLogger(__name__)

UnaryHandler = Callable[[Any], Awaitable[Any]]
StreamHandler = Callable[[Any], AsyncIterator[Any]]
AnswerProof = tuple[tuple[str, bytes], ...]
NO_PROOF: AnswerProof = ()
ByteStreamHandler = Callable[[Any, ByteStream], Awaitable[None]]
# The message types differ per method; Method ties them together, a mapping cannot.


class _Routes(grpc.GenericRpcHandler):
    """Finds the handler of a path; without one gRPC answers UNIMPLEMENTED."""

    def __init__(self) -> None:
        self._by_path: dict[str, grpc.RpcMethodHandler] = {}

    def add(self, path: str, handler: grpc.RpcMethodHandler) -> None:
        """Serve `path` by `handler`.

        Raises:
            ValueError: another handler serves the path.
        """
        if path in self._by_path:
            raise ValueError(f"{path}: found a second handler, expected one for each path")
        self._by_path[path] = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler of a call, for gRPC, or None."""
        return self._by_path.get(handler_call_details.method)


class Server:
    """Serves methods on one address of this process, to callers with the job token.

    Guarantee: a handler sees only calls with the right token and requests of the declared type, and is
    cancelled when its caller's deadline passes, the caller cancels or dies, or the server stops.

    Example:
        server = Server("127.0.0.1:0", credentials=Credentials("secret"))
        server.add("echo", {ECHO: echo})
        async with server:
            print(server.address)
            ...
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        credentials: Credentials,
        on_event: OnEvent | None = None,
    ) -> None:
        self._asked_address = address
        self._credentials = credentials
        self._gate = Authenticator(credentials.token, on_event)
        self._routes = _Routes()
        self._add_admission()
        self._server: grpc.aio.Server | None = None
        self._address: str | None = None

    @property
    def address(self) -> str:
        """The address with the actual port; available once started."""
        if self._address is None:
            raise RuntimeError("the server has no address before it is started")
        return self._address

    def add(self, service: str, handlers: Mapping[AnyMethod, UnaryHandler | StreamHandler]) -> None:
        """Serve `handlers` under `service`. Call it before `start`, or callers may find methods missing.

        Args:
            service: a name that no other `add` used.
            handlers: `async def h(request) -> response`, or an async generator function of responses where the method
                streams.
        """
        for method, handler in handlers.items():
            path = format_method_path(service, method)
            if method.is_streaming:
                serve = self._serve_stream(path, method, cast(StreamHandler, handler))
                self._routes.add(path, grpc.unary_stream_rpc_method_handler(serve))
            else:
                serve = self._serve_unary(path, method, cast(UnaryHandler, handler))
                self._routes.add(path, grpc.unary_unary_rpc_method_handler(serve))

    def add_byte_stream(
        self, service: str, method: ByteStreamMethod[Any], handler: ByteStreamHandler
    ) -> None:
        """Serve streams of bytes, each by an `async def h(request, stream)`; its return closes the stream."""
        path = format_method_path(service, method)
        serve = self._serve_byte_stream(path, method, handler)
        self._routes.add(path, grpc.stream_stream_rpc_method_handler(serve))

    async def start(self) -> None:
        """Bind the address and serve.

        Raises:
            AddressInUse: another process listens there.
            ConfigError: the address or a TLS file is invalid.
        """
        assert self._server is None, "a server starts once"
        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers((self._routes,))
        self._address = bind_server(
            self._asked_address, self._credentials, server.add_insecure_port, server.add_secure_port
        )
        await server.start()
        self._server = server

    async def stop(self, grace_s: float | None = None) -> None:
        """Close the port and end running calls, after `grace_s` for those that end by themselves."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _serve_unary(self, path: str, method: AnyMethod, handler: UnaryHandler) -> Any:  # noqa: ANN401 - private in grpc
        async def serve(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
            proof = NO_PROOF
            try:
                request, proof = self._admit(data, path, method, context)
                answer = encode(await handler(request))
                context.set_trailing_metadata(proof)
                return answer
            except Exception as error:  # the process boundary: the error goes to the caller
                failed = error
            await _abort(context, failed, path, proof)
            raise AssertionError("abort raises")

        return serve

    def _serve_stream(self, path: str, method: AnyMethod, handler: StreamHandler) -> Any:  # noqa: ANN401 - private in grpc
        async def serve(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            proof = NO_PROOF
            try:
                request, proof = self._admit(data, path, method, context)
                await context.send_initial_metadata(proof)
                async with contextlib.aclosing(cast(Any, handler(request))) as responses:
                    async for response in responses:
                        yield encode(response)
                return
            except Exception as error:  # the process boundary: the error goes to the caller
                failed = error
            await _abort(context, failed, path, proof)

        return serve

    def _serve_byte_stream(self, path: str, method: ByteStreamMethod[Any], handler: ByteStreamHandler) -> Any:  # noqa: ANN401 - private in grpc
        async def serve(_: object, context: grpc.aio.ServicerContext) -> None:
            stream, proof = ByteStream(context), NO_PROOF
            try:
                request, proof = self._admit(await stream.read(), path, method, context)
                await context.send_initial_metadata(proof)
                await handler(request, stream)
                return
            except Exception as error:  # the process boundary: the error goes to the caller
                failed = error
            await _abort(context, failed, path, proof)

        return serve

    def _admit(
        self,
        data: bytes,
        path: str,
        method: AnyMethod | ByteStreamMethod[Any],
        context: grpc.aio.ServicerContext,
    ) -> tuple[Any, AnswerProof]:
        request, answer = self._gate.decode_authenticated(
            data, method, cast(Any, context.invocation_metadata()), context.peer(), path
        )
        return request, ((ANSWER_KEY, answer),)

    def _add_admission(self) -> None:
        """Serve the methods by which clients and this server prove themselves: they are for everybody."""

        async def tell_nonce(request: AskNonce, peer: str, path: str) -> ServerNonce:
            return self._gate.tell_nonce()

        async def welcome(request: Introduction, peer: str, path: str) -> Welcome:
            proof = self._gate.welcome(request, peer, path)
            # Under TLS the client has compared the address with our certificate.
            if self._credentials.tls is None and request.address != self.address:
                await asyncio.to_thread(check_own_address, request.address, self.address)
            return proof

        for method, handler in ((ASK_NONCE, tell_nonce), (INTRODUCE, welcome)):
            path = format_method_path(SERVICE, method)
            self._routes.add(
                path, grpc.unary_unary_rpc_method_handler(_serve_stranger(path, method, handler))
            )


def _serve_stranger(path: str, method: AnyMethod, handler: Callable[[Any, str, str], Awaitable[Any]]) -> Any:  # noqa: ANN401 - private in grpc
    async def serve(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        peer = context.peer()
        try:
            return encode(
                await handler(decode(data, method.request, f"request of {path} from {peer}"), peer, path)
            )
        except Exception as error:  # the process boundary: the error goes to the caller
            failed = error
        await _abort(context, failed, path, NO_PROOF)
        raise AssertionError("abort raises")

    return serve


async def _abort(context: grpc.aio.ServicerContext, error: Exception, path: str, proof: AnswerProof) -> None:
    if not isinstance(error, ResilientJaxError | StaleSession):
        logger.error("%s failed", path, exc_info=error)
    failure = encode_error(error, path)
    await context.abort(failure.code, failure.details, (*failure.trailing_metadata, *proof))
