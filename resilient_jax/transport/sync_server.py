"""The server for synchronous processes: handlers are functions and generators, run by a few threads."""

import concurrent.futures
import logging
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, cast

import grpc

from resilient_jax.errors import ResilientJaxError
from resilient_jax.threads import start_thread_pool
from resilient_jax.transport.authentication import Authenticator, OnEvent
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.error_codec import encode_error
from resilient_jax.transport.grpc_options import server_options
from resilient_jax.transport.method import AnyMethod, encode, format_method_path
from resilient_jax.transport.routes import Routes
from resilient_jax.transport.server_address import bind_server

logger = logging.getLogger(__name__)

UnaryHandler = Callable[[Any], Any]
StreamHandler = Callable[[Any], Iterator[Any]]
# The message types differ per method; Method ties them together, a mapping cannot.


class SyncServer:
    """Serves methods from threads: for the worker, whose main thread is busy with JAX.

    At most `threads` calls run at once, streams included; the next ones wait, within their deadline.
    A streaming handler learns that its caller is gone when it yields next: it must not block for ever.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        credentials: Credentials,
        num_threads: int = 4,
        on_event: OnEvent | None = None,
    ) -> None:
        self._asked_address = address
        self._credentials = credentials
        self._threads = num_threads
        self._gate = Authenticator(credentials.token, on_event)
        self._routes = Routes()
        self._server: grpc.Server | None = None
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._address: str | None = None

    @property
    def address(self) -> str:
        """Where the server listens, with the actual port; only once started."""
        if self._address is None:
            raise RuntimeError("the server has no address before it is started")
        return self._address

    @property
    def num_unauthenticated(self) -> int:
        """How many calls were refused for their token."""
        return self._gate.num_unauthenticated

    def add(self, service: str, handlers: Mapping[AnyMethod, UnaryHandler | StreamHandler]) -> None:
        """Serves `handlers` under `service`; before the start, or callers may find them missing.

        Args:
            service: a name that no other `add` used.
            handlers: `def h(request) -> response`, or a generator of responses where the method streams.
        """
        for method, handler in handlers.items():
            path = format_method_path(service, method)
            if method.is_streaming:
                serve = grpc.unary_stream_rpc_method_handler(self._serve_stream(path, method, handler))
            else:
                serve = grpc.unary_unary_rpc_method_handler(self._serve_unary(path, method, handler))
            self._routes.add(path, serve)

    def start(self) -> None:
        """Binds the address and serves.

        Raises:
            AddressInUse: another process listens there.
            ConfigError: the address or a TLS file is wrong.
        """
        assert self._server is None, "a server starts once"
        executor = start_thread_pool(self._threads, "rj-transport")
        server = grpc.server(executor, handlers=[self._routes], options=server_options())
        self._address = bind_server(
            self._asked_address, self._credentials, server.add_insecure_port, server.add_secure_port
        )
        server.start()
        self._server, self._executor = server, executor

    def stop(self, grace_s: float | None = None) -> None:
        """Closes the port and ends running calls, after `grace_s` for those that end by themselves."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(grace_s).wait()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _serve_unary(self, path: str, method: AnyMethod, handler: UnaryHandler) -> Any:  # noqa: ANN401 grpc's
        def serve(data: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return encode(handler(self._admit(data, path, method, context)))
            except Exception as error:  # the process boundary: it goes to the caller
                failed = error
            try:
                _abort(context, failed, path)
            finally:
                del failed  # else the error holds this frame, the frame the error, and both the request
            raise AssertionError("abort raises")

        return serve

    def _serve_stream(self, path: str, method: AnyMethod, handler: StreamHandler) -> Any:  # noqa: ANN401 grpc's
        def serve(data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            try:
                for response in handler(self._admit(data, path, method, context)):
                    yield encode(response)
                return
            except Exception as error:  # the process boundary: it goes to the caller
                failed = error
            _abort(context, failed, path)

        return serve

    def _admit(self, data: bytes, path: str, method: AnyMethod, context: grpc.ServicerContext) -> Any:  # noqa: ANN401 typed by Method
        return self._gate.decode_authenticated(
            data, method, cast(Any, context.invocation_metadata()), context.peer(), path
        )


def _abort(context: grpc.ServicerContext, error: Exception, path: str) -> None:
    if not isinstance(error, ResilientJaxError):
        logger.error("%s failed", path, exc_info=error)
    failure = encode_error(error, path)
    context.set_trailing_metadata(failure.trailing_metadata)
    context.abort(failure.code, failure.details)
