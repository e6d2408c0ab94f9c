"""The relay: when the coordination service dies, the worker's connection becomes silent but stays open."""

import asyncio
import contextlib
import socket

from resilient_jax.cluster.relay import Relay
from tests.support.patience import patience

ADDRESS = "127.0.0.1"


def run(main):
    async def bounded():
        async with asyncio.timeout(patience(3)):
            await main()

    asyncio.run(bounded())


class Service:
    """A server that echoes each line until its connection is closed."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.hung_up = asyncio.Event()

    async def answer(self, reader, writer):
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                writer.write(line)
                await writer.drain()
        writer.close()
        self.hung_up.set()


@contextlib.asynccontextmanager
async def relayed():
    """Yield a service, its relay, and a worker's connection through it."""
    service = Service()
    server = await asyncio.start_server(service.answer, ADDRESS, 0)
    relay = Relay("{}:{}".format(*server.sockets[0].getsockname()))
    await relay.start(ADDRESS)
    reader, writer = await connect(relay)
    try:
        yield service, relay, reader, writer
    finally:
        writer.close()
        await relay.close()
        server.close()


async def connect(relay):
    host, _, port = relay.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def is_silent(reader) -> bool:
    """Return whether neither bytes nor an end of file arrive for a moment: on loopback either takes microseconds."""
    try:
        await asyncio.wait_for(reader.read(1), 0.3)
    except TimeoutError:
        return True
    return False


def test_bytes_go_both_ways():
    async def main():
        async with relayed() as (_, _, reader, writer):
            writer.write(b"hello\n")
            assert await reader.readline() == b"hello\n"

    run(main)


def test_when_the_service_closes_its_connection_the_workers_side_stays_open():
    async def main():
        async with relayed() as (service, _, reader, writer):
            writer.write(b"hello\n")
            await reader.readline()
            for theirs in service.writers:
                theirs.close()
            assert await is_silent(reader)
            writer.write(b"anybody?\n" * 100_000)  # the relay discards it, so that the worker never blocks
            await writer.drain()
            assert await is_silent(reader)

    run(main)


def test_when_the_service_resets_its_connection_the_workers_side_stays_open():
    async def main():
        async with relayed() as (service, _, reader, writer):
            writer.write(b"hello\n")
            await reader.readline()
            for theirs in service.writers:
                theirs.transport.abort()
            assert await is_silent(reader)

    run(main)


def test_a_relay_that_no_longer_listens_keeps_the_workers_connection():
    async def main():
        async with relayed() as (_, relay, reader, writer):
            writer.write(b"hello\n")
            await reader.readline()
            relay.stop_listening()
            with contextlib.suppress(ConnectionError):
                late, _ = await connect(relay)
                assert await late.read() == b""
            assert await is_silent(reader)
            writer.write(b"still there\n")
            assert await reader.readline() == b"still there\n"
            assert relay.has_connections
            writer.close()
            while relay.has_connections:  # noqa: ASYNC110 - `run` has the deadline
                await asyncio.sleep(0.01)

    run(main)


def test_without_a_service_the_workers_connection_is_silent():
    async def main():
        with socket.socket() as unused:
            unused.bind((ADDRESS, 0))  # bound, but not listening: connections are refused
            relay = Relay("{}:{}".format(*unused.getsockname()))
            await relay.start(ADDRESS)
            reader, writer = await connect(relay)
            assert await is_silent(reader)
            await relay.close()
            assert await reader.read() == b""
            writer.close()

    run(main)


def test_when_the_worker_closes_its_connection_the_services_side_ends():
    async def main():
        async with relayed() as (service, _, reader, writer):
            writer.write(b"hello\n")
            await reader.readline()
            writer.close()
            await service.hung_up.wait()

    run(main)


def test_closing_the_relay_closes_the_workers_side_and_the_port():
    async def main():
        async with relayed() as (_, relay, reader, writer):
            writer.write(b"hello\n")
            await reader.readline()
            await relay.close()
            assert await reader.read() == b""
            with contextlib.suppress(ConnectionRefusedError):
                await connect(relay)
                raise AssertionError("the relay still listens")

    run(main)
