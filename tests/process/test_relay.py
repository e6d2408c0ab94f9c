"""The relay: a dead coordination service is silence for the worker, never a hang-up."""

import asyncio
import contextlib
import socket

from resilient_jax.cluster.relay import Relay

ADDRESS = "127.0.0.1"


def run(main):
    async def bounded():
        async with asyncio.timeout(30):
            await main()

    asyncio.run(bounded())


class Service:
    """Answers each line with the same line, until it hangs up."""

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
    """Return whether neither bytes nor an end come within a moment. A wrong hang-up comes over loopback in
    microseconds."""
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


def test_a_service_that_hangs_up_leaves_the_workers_side_open():
    async def main():
        async with relayed() as (service, _, reader, writer):
            writer.write(b"hello\n")
            await reader.readline()
            for theirs in service.writers:
                theirs.close()
            assert await is_silent(reader)
            writer.write(b"anybody?\n" * 100_000)  # swallowed, so that the worker never blocks
            await writer.drain()
            assert await is_silent(reader)

    run(main)


def test_a_service_that_resets_leaves_the_workers_side_open():
    async def main():
        async with relayed() as (service, _, reader, writer):
            writer.write(b"hello\n")
            await reader.readline()
            for theirs in service.writers:
                theirs.transport.abort()
            assert await is_silent(reader)

    run(main)


def test_a_service_that_is_not_there_is_silence():
    async def main():
        with socket.socket() as unused:
            unused.bind((ADDRESS, 0))  # bound, not listening: refused
            relay = Relay("{}:{}".format(*unused.getsockname()))
            await relay.start(ADDRESS)
            reader, writer = await connect(relay)
            assert await is_silent(reader)
            await relay.close()
            assert await reader.read() == b""
            writer.close()

    run(main)


def test_a_worker_that_hangs_up_is_gone_for_the_service():
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
