"""The client of one peer for synchronous callers: a `Channel` on the process's event loop thread."""

from collections.abc import AsyncGenerator, Generator
from types import TracebackType
from typing import Any, Final, Self

from resilient_jax.transport.channel import Channel
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.event_loop_thread import share_event_loop
from resilient_jax.transport.method import Method, RequestT, ResponseT

_END: Final = object()
"""What follows the last response of a stream."""


class SyncChannel:
    """Calls methods of the server at `address`, blocking; safe to share between threads.

    As `Channel`: it connects when first used, reconnects by itself and repeats no call.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        """Create the channel without connecting.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self.address = address
        self._loop = share_event_loop()
        self._channel = self._loop.run(_open(address, credentials))

    def call(
        self, service: str, method: Method[RequestT, ResponseT], request: RequestT, *, timeout_s: float
    ) -> ResponseT:
        """Return the response to `request`; raises as `Channel.call`."""
        return self._loop.run(self._channel.call(service, method, request, timeout_s=timeout_s))

    def stream(
        self,
        service: str,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        *,
        timeout_s: float | None = None,
    ) -> Generator[ResponseT, None, None]:
        """Yield the responses to `request` as they arrive; close the generator to end the call.

        Raises as `Channel.stream`.
        """
        responses = self._channel.stream(service, method, request, timeout_s=timeout_s)
        try:
            while (response := self._loop.run(_next(responses))) is not _END:
                yield response
        finally:
            # Without waiting: the garbage collector may close this generator on the thread of the loop.
            self._loop.submit(_close(responses))

    def close(self) -> None:
        """End the connection and every call on it."""
        self._loop.run(self._channel.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _open(address: str, credentials: Credentials) -> Channel:
    """Create the channel on the running loop, to which grpc.aio binds it."""
    return Channel(address, credentials)


async def _next(responses: AsyncGenerator[Any, None]) -> Any:  # noqa: ANN401 - a response or _END
    return await anext(responses, _END)


async def _close(responses: AsyncGenerator[Any, None]) -> None:
    await responses.aclose()
