"""What an agent reports of members that it cannot connect to, over real sockets."""

import asyncio
import contextlib
import socket
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import msgspec

from resilient_jax.clock import SystemClock
from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.generation_follower import GenerationFollower
from resilient_jax.cluster.reach_watch import ReachWatch, reaches
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.config import JobConfig
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat
from resilient_jax.protocol.generation import FailedAttempts, Generation, GenerationPhase, Member, Membership
from resilient_jax.protocol.host_status import WorkerStatus
from resilient_jax.protocol.reachability import ReachReport
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.worker_report import WorkerReport
from resilient_jax.store.memory import MemoryStore
from resilient_jax.telemetry.event_log import EventLog, read_events
from tests.support.agent_parts import HOST, make_agent_settings, wait_until

NUMBER = GenerationNumber(3)
OTHER = HostName("host-1")


@contextlib.contextmanager
def listening() -> Iterator[str]:
    """Give the address of a port that accepts, as the kernel does for a process that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def dropping() -> Iterator[str]:
    """Give the address of a listener whose queue is full: the kernel drops what arrives, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


class Knowledge:
    """What the agent of host-0 knows: a generation, and its worker, which has failed to form a world."""

    def __init__(self, endpoint: str) -> None:
        members = tuple(
            Member(host=host, incarnation=Incarnation(1), seat=Seat(seat), endpoint=endpoint)
            for seat, host in enumerate((HOST, OTHER))
        )
        self.generation = Generation(
            number=NUMBER,
            phase=GenerationPhase.QUIESCE,
            membership=Membership(members=members),
            failures=FailedAttempts(attempts=1),
        )
        self.status = WorkerStatus(incarnation=Incarnation(1), pid=1, report=WorkerReport(generation=NUMBER))


@contextlib.asynccontextmanager
async def watching(work: Path, known: Knowledge, *, lease_ttl_s: float = 100.0) -> AsyncIterator[ReachWatch]:
    settings = make_agent_settings(work / "script.py", JobConfig(lease_ttl_s=lease_ttl_s))
    log = EventLog(work / "events", HOST)
    context = AgentContext(
        settings=settings, store=MemoryStore(), clock=SystemClock(), log=log, print_line=print
    )
    view = cast(GenerationFollower, known), cast(WorkerSupervisor, types.SimpleNamespace(status=known.status))
    watch = ReachWatch(context, *view, on_change=lambda: None)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        log.close()


def test_only_a_port_that_accepts_is_reached() -> None:
    with listening() as live:
        assert asyncio.run(reaches(live))
    assert not asyncio.run(reaches(live)), "nobody listens there any more"
    with dropping() as silent:
        assert not asyncio.run(reaches(silent))


def test_members_that_are_reached_are_reported_too_as_others_wait_for_the_answer(tmp_path: Path) -> None:
    async def run() -> None:
        with listening() as live:
            async with watching(tmp_path, Knowledge(live)) as watch:
                await wait_until(lambda: watch.report == ReachReport(generation=NUMBER))

    asyncio.run(run())


def test_a_host_that_is_not_reached_is_reported_until_it_is_or_the_members_go_on(tmp_path: Path) -> None:
    async def run() -> None:
        known = Knowledge("127.0.0.1:1")
        async with watching(tmp_path, known, lease_ttl_s=0.5) as watch:
            await wait_until(lambda: watch.report == ReachReport(generation=NUMBER, unreached=(OTHER,)))
            # For longer than its status would be in the store if it were dead.
            lasting = ReachReport(generation=NUMBER, unreached=(OTHER,), lasting=(OTHER,))
            await wait_until(lambda: watch.report == lasting)
            # The same members in the next phase.
            known.generation = change_fields(known.generation, number=GenerationNumber(4))
            watch.wake()
            await wait_until(lambda: watch.report is not None and watch.report.generation == 4)
            assert watch.report == msgspec.structs.replace(lasting, generation=GenerationNumber(4))
            known.generation = change_fields(known.generation, attempts=0)
            watch.wake()
            await wait_until(lambda: watch.report is None)
        (event,) = [e for e in read_events(tmp_path / "events") if e.kind is EventKind.HOSTS_UNREACHED]
        assert event.detail["hosts"] == OTHER

    asyncio.run(run())
