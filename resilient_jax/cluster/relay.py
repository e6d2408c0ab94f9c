"""The way from a worker to its world's coordination service, which takes anybody who can connect to it.

worker -> Relay of its agent -> gRPC call to the agent of the service's host -> the service
          on loopback           token, and TLS where it is configured           on loopback

So nobody reaches the service from another machine without the job's token.

JAX aborts a process when its connection to the coordination service breaks. So the relay never closes the worker's
connection: when the service dies, the worker's side stays open and silent, and the worker survives. A worker that has
left the world may keep its connection, because an array of the world keeps the world's client: so nobody but the worker
closes it, or its end.

A way to the service costs two agents a connection with its proofs and a stream, on the loops that keep their hosts
registered. So it is opened only for who has begun to speak as a worker does, and not for strangers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from resilient_jax.errors import PeerError, ResilientJaxError
from resilient_jax.protocol.host_status import CoordinationServiceStatus
from resilient_jax.protocol.service_address import LOOPBACK, split_service_address
from resilient_jax.transport.byte_stream import ByteStream
from resilient_jax.transport.channel import Channel
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.grpc_options import PATIENT
from resilient_jax.transport.method import ByteStreamMethod
from resilient_jax.transport.server import Server

SERVICE: Final = "rj.relay"
CHUNK_BYTES: Final = 65536
PREFACE: Final = b"PRI * HTTP/2.0\r\n"
"""What JAX's client sends first, at once, as each HTTP/2 client (RFC 9113, 3.4)."""

logger = logging.getLogger(__name__)


class ReachService(msgspec.Struct, frozen=True, kw_only=True):
    """Asks an agent for a connection to a coordination service of its host, by the address in the service's status."""

    address: str


REACH_SERVICE: Final = ByteStreamMethod("reach_service", ReachService)


def serve_services(server: Server, list_services: Callable[[], Sequence[CoordinationServiceStatus]]) -> None:
    """Connect other agents to the coordination services of this host, and to nothing else on its loopback."""

    async def reach_service(request: ReachService, stream: ByteStream) -> None:
        if request.address not in [service.address for service in list_services()]:
            raise PeerError(f"{request.address}: expected a coordination service that runs here, found none")
        _, port = split_service_address(request.address)
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        upwards = asyncio.create_task(_take_out_of(stream, writer))
        try:
            await _send_into(reader, stream)  # until the service ends, or the caller does, which cancels this
        finally:
            upwards.cancel()
            writer.close()

    server.add_byte_stream(SERVICE, REACH_SERVICE, reach_service)


class Relay:
    """Forwards every connection to one coordination service.

    Attributes:
        service: address in the status of the service.
        address: address where the worker connects, on the loopback of this host.
    """

    def __init__(self, service: str, credentials: Credentials) -> None:
        self.service = service
        self.address = ""
        self._credentials = credentials
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._accept, LOOPBACK, 0)
        name, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{name}:{port}"

    @property
    def has_connections(self) -> bool:
        """Whether a worker is connected."""
        return bool(self._connections)

    def stop_listening(self) -> None:
        """Take no new connection; each one that exists ends when the worker closes it."""
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Close all connections. The worker must have ended."""
        self.stop_listening()
        connections = tuple(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._forward(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not await _begins_as_worker(reader):
                return
            if self.service:  # empty: it ended before this worker could connect
                try:
                    await self._reach(reader, writer)
                # The agent is gone, or has another token; certificates are being replaced; the address is none of ours.
                except (ResilientJaxError, ValueError) as error:
                    logger.info("the coordination service cannot be reached: %s", error)
            # Whether or not the service still runs: what the worker sends to a dead one is discarded.
            await _read_until_closed(reader)
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def _reach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward until the worker closes its connection, or what it sends arrives nowhere."""
        agent, _ = split_service_address(self.service)
        request = ReachService(address=self.service)
        # A channel of its own: it is closed with the worker's connection, and lives as long, whatever files change.
        async with (
            Channel(agent, self._credentials, keepalive=PATIENT) as channel,
            channel.open_byte_stream(SERVICE, REACH_SERVICE, request) as stream,
        ):
            downwards = asyncio.create_task(_take_out_of(stream, writer))
            try:
                if await stream.write(PREFACE):
                    await _send_into(reader, stream)
            finally:
                downwards.cancel()


async def _begins_as_worker(reader: asyncio.StreamReader) -> bool:
    """Return whether the first bytes of a connection are `PREFACE`; they are taken out of it."""
    try:
        return await reader.readexactly(len(PREFACE)) == PREFACE
    except (OSError, asyncio.IncompleteReadError):
        return False


async def _send_into(reader: asyncio.StreamReader, stream: ByteStream) -> None:
    """Put what a socket receives into the stream, until one of them ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            if not await stream.write(data):
                return


async def _take_out_of(stream: ByteStream, writer: asyncio.StreamWriter) -> None:
    """Send what comes out of the stream to a socket, until one of them ends."""
    with contextlib.suppress(OSError):
        while data := await stream.read():
            writer.write(data)
            await writer.drain()


async def _read_until_closed(reader: asyncio.StreamReader) -> None:
    """Discard what the worker sends to a dead service, until the worker closes its connection."""
    with contextlib.suppress(OSError):
        while await reader.read(CHUNK_BYTES):
            pass
