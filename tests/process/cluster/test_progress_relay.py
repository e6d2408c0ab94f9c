"""Reports of all hosts reach the leader through a tree of agents, also when an agent or the leader is lost."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from resilient_jax.clock import SystemClock
from resilient_jax.cluster import progress_relay, progress_tree
from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.progress_messages import HostProgress
from resilient_jax.cluster.progress_reader import read_progress
from resilient_jax.cluster.progress_relay import ProgressRelay
from resilient_jax.cluster.progress_tree import ProgressTree
from resilient_jax.config import JobConfig
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.worker_report import TrainingProgress
from resilient_jax.store.memory import MemoryStore
from resilient_jax.telemetry.event_log import EventLog
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.server import Server
from tests.support.agent_parts import make_agent_settings, wait_until

NUM_HOSTS = 9


class RelayHost:
    """A host with the part of an agent that this is about."""

    def __init__(self, name: str, context: AgentContext) -> None:
        self.name = HostName(name)
        self.step = 0
        self.server = Server(credentials=context.settings.credentials)
        settings = dataclasses.replace(context.settings, host=self.name)
        self.relay = ProgressRelay(
            dataclasses.replace(context, settings=settings),
            self.server,
            lambda: HostProgress(host=self.name, agent_id=name, progress=TrainingProgress(step=self.step)),
        )
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.server.start()
        self.task = asyncio.create_task(self.relay.run())

    async def end(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.server.stop()


class Tree:
    """Hosts of which one leads; `steps` is what it has been told."""

    def __init__(self, context: AgentContext) -> None:
        self.hosts = [RelayHost(f"h{index}", context) for index in range(NUM_HOSTS)]
        self.steps: dict[str, int] = {}
        self.refused: list[str] = []

    def lead(self, leader: RelayHost) -> None:
        tree = ProgressTree()
        self.steps = {}
        for host in self.hosts:
            if host is not leader:
                tree.add(host.name, host.relay.endpoint)
        leader.relay.lead(tree, lambda report: self.steps.update({report.host: report.progress.step}))
        for host in self.hosts:
            if host is not leader:
                host.relay.follow(
                    leader.relay.endpoint, on_refused=functools.partial(self.refused.append, host.name)
                )

    async def wait_step(self, step: int, without: tuple[str, ...] = ()) -> None:
        for host in self.hosts:
            host.step = step
        expected = {host.name for host in self.hosts} - set(without)
        await wait_until(lambda: all(self.steps.get(name) == step for name in expected))


@contextlib.asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Tree]:
    context = AgentContext(
        settings=make_agent_settings(tmp_path / "script.py", JobConfig()),
        store=MemoryStore(),
        clock=SystemClock(),
        log=EventLog(None, HostName("h")),
        print_line=print,
    )
    tree = Tree(context)
    for host in tree.hosts:
        await host.start()
    try:
        tree.lead(tree.hosts[0])
        yield tree
    finally:
        for host in tree.hosts:
            await host.end()


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two hosts report to one agent, so that a few make a tree of three levels."""
    monkeypatch.setattr(progress_tree, "FANOUT", 2)
    monkeypatch.setattr(progress_relay, "FANOUT", 2)
    monkeypatch.setattr(progress_relay, "INTERVAL_S", 0.05)
    monkeypatch.setattr(progress_relay, "SMALL_JOB_INTERVAL_S", 0.05)


def test_the_leader_learns_of_all_hosts_through_a_tree(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as tree:
            await tree.wait_step(1)
            parents = [host.relay._parent for host in tree.hosts[1:]]
            assert parents[:2] == ["", ""]
            assert len(set(parents[2:])) > 1, "the others report to different agents"
            await tree.wait_step(2)
            leader = tree.hosts[0].relay.endpoint
            found = await read_progress(leader, tree.hosts[0].relay._context.settings.credentials)
            assert {report.host: report.progress.step for report in found} == tree.steps

    asyncio.run(run())


def test_hosts_whose_agent_in_the_tree_is_lost_report_to_another(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as tree:
            await tree.wait_step(1)
            lost = tree.hosts[1]
            assert any(host.relay._parent == lost.relay.endpoint for host in tree.hosts)
            await lost.end()
            await tree.wait_step(2, without=("h1",))

    asyncio.run(run())


def test_a_new_leader_is_told_all_at_once_what_agents_know(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as tree:
            await tree.wait_step(1)
            await tree.hosts[0].end()
            await wait_until(lambda: bool(tree.refused))
            tree.lead(tree.hosts[1])
            # Nothing has changed on the hosts since.
            await wait_until(lambda: len(tree.steps) == NUM_HOSTS - 1)
            assert set(tree.steps.values()) == {1}
            assert tree.refused, "without news, too"
            assert "h0" not in tree.steps

    asyncio.run(run())


def test_progress_is_never_a_reason_to_fail_whatever_the_leader_answers(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as tree:
            host, refused = tree.hosts[3], []
            stranger = Server(
                credentials=Credentials("another token"), on_event=lambda kind, _: refused.append(kind)
            )
            ProgressRelay(host.relay._context, stranger, host.relay._make_own)
            async with stranger:
                host.relay.follow(stranger.address, on_refused=lambda: None)
                await wait_until(lambda: refused == [EventKind.REQUEST_UNAUTHENTICATED])
                assert await read_progress(stranger.address, Credentials("token")) == ()
            host.relay.follow(tree.hosts[0].relay.endpoint, on_refused=lambda: None)
            await tree.wait_step(1)

    asyncio.run(run())
