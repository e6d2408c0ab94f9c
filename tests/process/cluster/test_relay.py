"""The relay: when the coordination service dies, the worker's connection becomes silent but stays open."""

import asyncio
import contextlib
import os
import socket

from resilient_jax.cluster.relay import PREFACE, Relay, serve_services
from resilient_jax.ids import WorldId
from resilient_jax.protocol.host_status import CoordinationServiceStatus
from resilient_jax.protocol.service_address import format_service_address
from resilient_jax.transport import Credentials, Server
from tests.support.patience import patience

ADDRESS = "127.0.0.1"
CREDENTIALS = Credentials("the-job-token")


def run(main):
    async def bounded():
        async with asyncio.timeout(patience(6)):
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
    async with serving_agent(server.sockets[0].getsockname()[1]) as address:
        relay = Relay(address, CREDENTIALS)
        await relay.start()
        reader, writer = await connect(relay)
        assert await reader.readexactly(len(PREFACE)) == PREFACE
        try:
            yield service, relay, reader, writer
        finally:
            writer.close()
            await relay.close()
            await service.hung_up.wait()
            server.close()


@contextlib.asynccontextmanager
async def serving_agent(port, credentials=CREDENTIALS):
    """Yield the address of a service at a port of this host, whose agent connects others to it."""
    running = []
    agent = Server(credentials=credentials)
    serve_services(agent, lambda: running)
    async with agent:
        address = format_service_address(agent.address, port)
        running.append(
            CoordinationServiceStatus(
                world=WorldId(1), num_processes=2, num_seats=2, address=address, pid=os.getpid()
            )
        )
        yield address


async def connect(relay, first=PREFACE):
    host, _, port = relay.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(first)
    return reader, writer


async def check_silent(service):
    relay = Relay(service, CREDENTIALS)
    await relay.start()
    reader, writer = await connect(relay)
    assert await is_silent(reader)
    await relay.close()
    assert await reader.read() == b""
    writer.close()


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


def test_strangers_get_no_way_to_the_service():
    """Each would cost two agents a connection, proofs and a stream, on the loops that renew their leases."""

    async def main():
        async with relayed() as (service, relay, reader, writer):
            _, idle = await connect(relay, b"")
            refused, other = await connect(relay, bytes(4096))
            with contextlib.suppress(ConnectionResetError):
                assert await refused.read() == b""
            writer.write(b"hello\n")
            assert await reader.readline() == b"hello\n"
            assert len(service.writers) == 1
            idle.close()
            other.close()

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
            async with serving_agent(unused.getsockname()[1]) as address:
                await check_silent(address)

    run(main)


def test_without_an_agent_or_a_service_s_address_the_workers_connection_is_silent():
    async def main():
        with socket.socket() as unused:
            unused.bind((ADDRESS, 0))
            agent = "{}:{}".format(*unused.getsockname())
            await check_silent(format_service_address(agent, 1))
        await check_silent("")

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


def test_a_large_amount_of_data_arrives_complete_and_in_order_both_ways():
    lines = b"".join(b"%d\n" % number for number in range(400_000))

    async def main():
        async with relayed() as (_, _, reader, writer):
            writer.write(lines)
            assert await reader.readexactly(len(lines)) == lines

    run(main)


def test_who_has_another_token_reaches_no_service():
    async def main():
        service = Service()
        server = await asyncio.start_server(service.answer, ADDRESS, 0)
        async with serving_agent(server.sockets[0].getsockname()[1]) as address:
            stranger = Relay(address, Credentials("another-token"))
            await stranger.start()
            reader, writer = await connect(stranger)
            writer.write(b"hello\n")
            assert await is_silent(reader)
            assert not service.writers, "nothing was connected to it"
            writer.close()
            await stranger.close()
        server.close()

    run(main)


def test_an_agent_connects_others_to_its_services_alone():
    async def main():
        other = Service()
        server = await asyncio.start_server(other.answer, ADDRESS, 0)
        port = server.sockets[0].getsockname()[1]
        async with serving_agent(1) as address:
            await check_silent(format_service_address(address.rpartition("/")[0], port))
        assert not other.writers, "nothing was connected to it"
        server.close()

    run(main)


def test_a_relay_listens_on_loopback_alone():
    async def main():
        relay = Relay("", CREDENTIALS)
        await relay.start()
        assert relay.address.startswith("127.0.0.1:")
        await relay.close()

    run(main)
