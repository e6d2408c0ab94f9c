"""The server of synchronous processes: a `Server` on the event loop thread, with handlers on a pool of threads."""

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

from resilient_jax.threads import start_thread_pool
from resilient_jax.transport import server
from resilient_jax.transport.authentication import OnEvent
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.event_loop_thread import share_event_loop
from resilient_jax.transport.method import AnyMethod

SyncUnaryHandler = Callable[[Any], Any]
SyncStreamHandler = Callable[[Any], Iterator[Any]]
# The message types differ per method; Method ties them together, a mapping cannot.

_END: Final = object()
"""What follows the last response of a handler."""


class SyncServer:
    """Serves methods from threads, for a worker, whose main thread is busy with JAX, and for a snapshot server.

    At most `num_threads` handlers run at once; further calls wait, within their deadline. A stream occupies a thread
    while it computes a response, not while that is sent. A cancelled handler is not interrupted: a unary one runs to
    its end, a streaming one is closed where it yields next, so neither may block for ever.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        credentials: Credentials,
        num_threads: int = 4,
        on_event: OnEvent | None = None,
    ) -> None:
        """Create the server without listening; `on_event` is called on the event loop thread and must not block."""
        self._server = server.Server(address, credentials=credentials, on_event=on_event)
        self._num_threads = num_threads
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    @property
    def address(self) -> str:
        """The address with the actual port; available once started."""
        return self._server.address

    def add(self, service: str, handlers: Mapping[AnyMethod, SyncUnaryHandler | SyncStreamHandler]) -> None:
        """Serve `handlers` under `service`. Call it before `start`, or callers may find methods missing.

        Args:
            service: a name that no other `add` used.
            handlers: `def h(request) -> response`, or a generator function of responses where the method streams.
        """
        self._server.add(
            service,
            {
                method: self._make_stream(handler) if method.is_streaming else self._make_unary(handler)
                for method, handler in handlers.items()
            },
        )

    def start(self) -> None:
        """Bind the address and serve.

        Raises:
            AddressInUse: another process listens there.
            ConfigError: the address or a TLS file is invalid.
        """
        self._pool = start_thread_pool(self._num_threads, "rj-transport")
        try:
            share_event_loop().run(self._server.start())
        except BaseException:
            self._pool.shutdown(wait=False)
            raise

    def stop(self, grace_s: float | None = None) -> None:
        """Close the port and end running calls, after `grace_s` for those that end by themselves."""
        share_event_loop().run(self._server.stop(grace_s))
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _make_unary(self, handler: SyncUnaryHandler) -> server.UnaryHandler:
        async def serve(request: Any) -> Any:  # noqa: ANN401 - typed by Method
            return await asyncio.wrap_future(self._submit(handler, request))

        return serve

    def _make_stream(self, handler: SyncStreamHandler) -> server.StreamHandler:
        async def serve(request: Any) -> AsyncIterator[Any]:  # noqa: ANN401 - typed by Method
            responses = iter(handler(request))
            pending = self._submit(next, responses, _END)
            try:
                while (response := await asyncio.wrap_future(pending)) is not _END:
                    yield response
                    pending = self._submit(next, responses, _END)
            finally:
                # A cancelled call may leave `next` running, and a running generator cannot be closed.
                pending.add_done_callback(lambda _: _close(responses))

        return serve

    def _submit(self, function: Callable[..., Any], *arguments: object) -> "concurrent.futures.Future[Any]":
        assert self._pool is not None, "handlers run while the server does"
        return self._pool.submit(function, *arguments)


def _close(responses: Iterator[Any]) -> None:
    if (close := getattr(responses, "close", None)) is not None:
        close()
