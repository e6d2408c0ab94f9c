"""Who reaches JAX's coordination service from another machine: processes with the job's token, and nobody else."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.relay import PREFACE, Relay, serve_services
from resilient_jax.ids import Seat, WorldId
from resilient_jax.jax_runtime.jaxlib_types import RuntimeClient
from resilient_jax.jax_runtime.world_forming import new_client
from resilient_jax.protocol.host_status import CoordinationServiceStatus
from resilient_jax.telemetry.event_log import EventLog
from resilient_jax.transport import Credentials, Server, TlsFiles
from tests.support.authority import Authority
from tests.support.paths import ROOT
from tests.support.patience import patience

HOST = "127.0.2.2"
"""Of the host with the service, as other hosts see it."""
TOKEN = "the-token-of-this-job"
CONNECT_TIMEOUT_S = round(patience(5))
OUTSIDER_TIMEOUT_S = 2
STOPPED_S = 10.0
"""Longer than other connections of ours wait for a peer that is silent."""


@contextlib.asynccontextmanager
async def serving(credentials: Credentials) -> AsyncIterator[CoordinationServiceStatus]:
    """Yield the service of a world of one process, on a host whose agent has these credentials."""
    agent = Server(f"{HOST}:0", credentials=credentials)
    services = CoordinationServices(lambda: agent.address, EventLog(None, "host-0"), lambda: None)
    serve_services(agent, lambda: services.running)
    async with agent, asyncio.timeout(patience(30)):
        try:
            services.start(WorldId(1), 1, 1)
            while not services.running:  # noqa: ASYNC110 - a deadline and a condition, no event
                await asyncio.sleep(0.01)
            yield services.running[0]
        finally:
            await services.close()


@contextlib.asynccontextmanager
async def relayed(service: CoordinationServiceStatus, credentials: Credentials) -> AsyncIterator[Relay]:
    relay = Relay(service.address, credentials)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.close()


def join(address: str, timeout_s: int) -> RuntimeClient:
    client, _ = new_client(address, Seat(0), timeout_s, tells_service=True)
    client.connect()
    return client


async def check_cannot_join(service: CoordinationServiceStatus, credentials: Credentials) -> None:
    async with relayed(service, credentials) as relay:
        with pytest.raises(RuntimeError):
            await asyncio.to_thread(join, relay.address, OUTSIDER_TIMEOUT_S)


def give_tls(authority: Authority, name: str) -> TlsFiles:
    return authority.sign(name, host=HOST)


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
def test_a_worker_joins_through_the_agents_and_an_outsider_does_not(
    tmp_path: Path, is_encrypted: bool
) -> None:
    job, other = Authority(tmp_path / "job", "job"), Authority(tmp_path / "other", "other")
    tls = {name: give_tls(job, name) if is_encrypted else None for name in ("host-0", "host-1")}
    outsiders = [Credentials("another-token", tls["host-1"]), Credentials(TOKEN + "x", tls["host-1"])]
    if is_encrypted:  # the token alone is not enough, nor is a certificate of somebody else
        outsiders += [Credentials(TOKEN), Credentials(TOKEN, give_tls(other, "stranger"))]

    async def main() -> None:
        async with serving(Credentials(TOKEN, tls["host-0"])) as service:
            # At once: JAX's client gives up some seconds after its deadline.
            await asyncio.gather(*(check_cannot_join(service, credentials) for credentials in outsiders))
            async with relayed(service, Credentials(TOKEN, tls["host-1"])) as relay:
                client = await asyncio.to_thread(join, relay.address, CONNECT_TIMEOUT_S)
                await asyncio.to_thread(client.key_value_set, "key", "value")
                assert await asyncio.to_thread(client.blocking_key_value_get, "key", 1000) == "value"
                await asyncio.to_thread(client.shutdown)
                del client

    asyncio.run(main())


def test_the_service_and_its_relays_listen_on_loopback_alone() -> None:
    async def main() -> None:
        async with serving(Credentials(TOKEN)) as service, relayed(service, Credentials(TOKEN)) as relay:
            listening = [
                connection.laddr.ip.removeprefix("::ffff:")
                for connection in psutil.Process(service.pid).net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
            assert listening == ["127.0.0.1"]
            assert relay.address.startswith("127.0.0.1:")
            port = int(service.address.rpartition("/")[2])
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(HOST, port)

    asyncio.run(main())


AGENT = """
import asyncio, os, sys
from resilient_jax.cluster.relay import serve_services
from resilient_jax.ids import WorldId
from resilient_jax.protocol.host_status import CoordinationServiceStatus
from resilient_jax.protocol.service_address import format_service_address
from resilient_jax.transport import Credentials, Server

async def main():
    running = []
    agent = Server(credentials=Credentials(sys.argv[1]))
    serve_services(agent, lambda: running)
    async with agent:
        address = format_service_address(agent.address, int(sys.argv[2]))
        running.append(
            CoordinationServiceStatus(
                world=WorldId(1), num_processes=1, num_seats=1, address=address, pid=os.getpid()
            )
        )
        print(address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line)
    writer.close()


@pytest.mark.full
def test_the_connection_of_a_worker_outlives_an_agent_that_is_stopped_for_seconds() -> None:
    """A job whose leases are long forgives that, so it must not cost the world its service."""

    async def ask(service: CoordinationServiceStatus, agent: asyncio.subprocess.Process) -> None:
        async with relayed(service, Credentials(TOKEN)) as relay:
            host, _, port = relay.address.partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(PREFACE)
            assert await reader.readline() == PREFACE
            agent.send_signal(signal.SIGSTOP)
            writer.write(b"meanwhile\n")
            await asyncio.sleep(STOPPED_S)
            agent.send_signal(signal.SIGCONT)
            assert await reader.readline() == b"meanwhile\n"
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", AGENT, TOKEN, str(port)),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        try:
            assert agent.stdout is not None
            async with asyncio.timeout(patience(20) + STOPPED_S):
                address = (await agent.stdout.readline()).decode().strip()
                status = CoordinationServiceStatus(
                    world=WorldId(1), num_processes=1, num_seats=1, address=address, pid=0
                )
                await ask(status, agent)
        finally:
            agent.kill()
            await agent.wait()
            server.close()

    asyncio.run(main())
