"""A TCP relay between a worker and its world's coordination service that never closes the worker's connection.

JAX aborts a process when its connection to the coordination service breaks. So the worker connects to this relay on
its own host: when the service dies, the worker's side stays open and silent, and the worker survives. A worker that has
left the world may keep its connection, because an array of the world keeps the world's client: so nobody but the worker
closes it, or its end.
"""

import asyncio
import contextlib

CHUNK_BYTES = 65536


class Relay:
    """Forwards every connection to one coordination service.

    Attributes:
        address: where the worker connects, on this host.
    """

    def __init__(self, service: str) -> None:
        self.service = service
        self.address = ""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str) -> None:
        """Listen on a free port of `host`."""
        self._server = await asyncio.start_server(self._accept, host, 0)
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
            host, _, port = self.service.rpartition(":")
            try:
                service_reader, service_writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await _read_until_closed(reader)
                return
            downwards = asyncio.create_task(_pump(service_reader, writer))
            try:
                # Ends when the worker closes its connection, whether or not the service still runs.
                await _pump(reader, service_writer)
                await _read_until_closed(reader)
            finally:
                downwards.cancel()
                service_writer.close()
        finally:
            with contextlib.suppress(OSError):
                writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one side is gone, which the caller handles


async def _read_until_closed(reader: asyncio.StreamReader) -> None:
    """Discard what the worker sends to a dead service, until the worker closes its connection."""
    with contextlib.suppress(OSError):
        while await reader.read(CHUNK_BYTES):
            pass
