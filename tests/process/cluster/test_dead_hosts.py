"""The lease of an agent that died ends at once where its machine answers for it, and that of no other."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from resilient_jax.clock import SystemClock
from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.dead_hosts import DeadHostFinder, refuses_connections
from resilient_jax.cluster.stored_records import ENCODER
from resilient_jax.config import JobConfig
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.host_status import AgentStatus, HostStatus
from resilient_jax.protocol.store_keys import make_host_key
from resilient_jax.protocol.versions import Versions
from resilient_jax.store.interface import PutOp
from resilient_jax.store.memory import MemoryStore
from resilient_jax.telemetry.event_log import EventLog, read_events
from tests.support.agent_parts import JOB, make_agent_settings, wait_until

OTHER = HostName("host-1")


@contextlib.contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def closed_port() -> int:
    """Return a port at which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.asynccontextmanager
async def running(work: Path, port: int) -> "AsyncIterator[tuple[DeadHostFinder, MemoryStore]]":
    """Run a finder on host-0; another host has a lease of a minute, and its agent has this port."""
    status = HostStatus(
        host=OTHER,
        agent=AgentStatus(
            id="one",
            pid=1,
            address="127.0.0.1",
            versions=Versions(python="", resilient_jax="", jax="", jaxlib=""),
            port=port,
        ),
    )
    store, log = MemoryStore(), EventLog(work / "events", HostName("host-0"))
    settings = make_agent_settings(work / "script.py", JobConfig())
    context = AgentContext(settings=settings, store=store, clock=SystemClock(), log=log, print_line=print)
    async with store:
        lease = await store.grant(60.0)
        await store.transaction([], [PutOp(make_host_key(JOB, OTHER), ENCODER.encode(status), lease)], [])
        finder = DeadHostFinder(context)
        try:
            yield finder, store
        finally:
            await finder.close()
            log.close()


def test_a_port_that_no_process_has_ends_the_lease(tmp_path: Path) -> None:
    async def run() -> None:
        port = closed_port()
        async with running(tmp_path, port) as (finder, store):
            key = make_host_key(JOB, OTHER)
            finder.look_at([(OTHER, "one", f"127.0.0.1:{port}")])
            await wait_until(lambda: not finder._looks)
            assert await store.get(key) is None
        assert [e.kind for e in read_events(tmp_path / "events")] == [EventKind.HOST_FOUND_DEAD]

    asyncio.run(run())


def test_an_agent_that_was_taken_for_dead_and_is_back_keeps_its_lease(tmp_path: Path) -> None:
    """A firewall that refuses connections costs a host its lease once, not again and again."""

    async def run() -> None:
        port = closed_port()
        async with running(tmp_path, port) as (finder, store):
            key = make_host_key(JOB, OTHER)
            record = await store.get(key)
            assert record is not None
            finder.look_at([(OTHER, "one", f"127.0.0.1:{port}")])
            await wait_until(lambda: not finder._looks)
            assert await store.get(key) is None
            await store.transaction([], [PutOp(key, record.value, await store.grant(60.0))], [])
            finder.look_at([(OTHER, "one", f"127.0.0.1:{port}")])
            await wait_until(lambda: not finder._looks)
            assert await store.get(key) is not None

    asyncio.run(run())


@pytest.mark.parametrize("agent_id", ["one", "another"])
def test_neither_an_agent_that_lives_nor_one_that_was_started_since_loses_its_lease(
    tmp_path: Path, agent_id: str
) -> None:
    async def run() -> None:
        with listening() as live:
            port = live if agent_id == "one" else closed_port()
            async with running(tmp_path, port) as (finder, store):
                finder.look_at([(OTHER, agent_id, f"127.0.0.1:{port}")])
                await wait_until(lambda: not finder._looks)
                assert await store.get(make_host_key(JOB, OTHER)) is not None

    asyncio.run(run())


def test_a_machine_that_answers_nothing_is_not_taken_for_one_without_the_process() -> None:
    """A listener whose queue is full lets the kernel drop what arrives, as a dead machine does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(server.getsockname())
        assert not asyncio.run(refuses_connections(f"127.0.0.1:{server.getsockname()[1]}"))
