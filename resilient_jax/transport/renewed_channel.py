"""A gRPC channel that is opened anew when its TLS files change, since gRPC reads them once."""

import asyncio
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from resilient_jax.transport.credentials import TlsFiles, channel_credentials
from resilient_jax.transport.grpc_options import GrpcOptions
from resilient_jax.transport.renewed_files import RenewedFiles

RETIREMENT_S: Final = 30.0
"""How long calls that began before the files changed may still take; streams are resumed by their readers."""


class RenewedChannel:
    """The channel to one address."""

    def __init__(
        self, address: str, tls: TlsFiles | None, make_options: Callable[[str | None], GrpcOptions]
    ) -> None:
        """Open the channel without connecting.

        Args:
            address: host:port of the server.
            tls: files for mutual TLS; None for plain TCP.
            make_options: returns the options for the name in the server's certificate, or None.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self._address = address
        self._files = RenewedFiles(tls, channel_credentials) if tls is not None else None
        self._options = make_options(tls.server_name if tls is not None else None)
        self._credentials = self._files.get() if self._files is not None else None
        self._channel = self._open()
        self._retiring: dict[grpc.aio.Channel, asyncio.Task[None]] = {}

    def get(self) -> grpc.aio.Channel:
        """Return the channel for the next call."""
        if self._files is not None and (current := self._files.get()) is not self._credentials:
            self._retire(self._channel)
            self._credentials = current
            self._channel = self._open()
        return self._channel

    async def close(self) -> None:
        """End the connection and every call on it."""
        retiring = dict(self._retiring)
        for task in retiring.values():
            task.cancel()
        for channel in (self._channel, *retiring):
            await channel.close()

    def _retire(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close(RETIREMENT_S))
        self._retiring[channel] = task
        task.add_done_callback(lambda _: self._retiring.pop(channel))

    def _open(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, self._options)
        return grpc.aio.secure_channel(self._address, self._credentials, self._options)
