"""The agents of one host: tried again with growing pauses, whatever keeps them from starting."""

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from resilient_jax.cluster import host_keeper
from resilient_jax.cluster.child_process import SpawnedProcess
from resilient_jax.cluster.host_keeper import HostCare, HostKeeper
from resilient_jax.cluster.job_view import JobView
from resilient_jax.ids import HostName
from resilient_jax.protocol.host_status import AgentStatus, HostStatus
from resilient_jax.protocol.versions import Versions
from tests.support.open_descriptors import count_descriptors, free_descriptors, wait_for_descriptors
from tests.support.own_process import in_own_process
from tests.support.patience import patience

HOST: Final = HostName("host-1")
VERSIONS = Versions(python="3", resilient_jax="1.0", jax="0.10.0", jaxlib="0.10.0")


class Kept:
    """A host with agents that run some Python, and what was said about it."""

    def __init__(self, code: str, *, start: Callable[[], SpawnedProcess] | None = None) -> None:
        self.said: list[str] = []
        self.view, self.over = JobView(), asyncio.Event()
        self.num_started = 0
        self._code, self._on_said = code, asyncio.Event()
        care = HostCare(
            view=self.view,
            over=self.over,
            end_job=self.over.set,
            on_line=self._on_line,
            restart_delay_s=0.0,
            max_restarts=100,
        )
        self.keeper = HostKeeper(HOST, start or self.start, care)

    def start(self) -> SpawnedProcess:
        self.num_started += 1
        return SpawnedProcess([sys.executable, "-u", "-c", self._code], stderr=subprocess.STDOUT)

    def let_in(self) -> None:
        """Note that the job has let the host in, and has another that trains."""
        for host in (HOST, HostName("host-0")):
            status = HostStatus(
                host=host,
                agent=AgentStatus(id=host, pid=1, address="127.0.0.1", versions=VERSIONS),
                program="p",
            )
            self.view.update_host(status)

    def _on_line(self, line: bytes) -> None:
        self.said.append(line.decode(errors="replace"))
        self._on_said.set()

    async def wait_said(self, words: str) -> None:
        while not any(words in line for line in self.said):
            self._on_said.clear()
            await self._on_said.wait()


def keep(
    code: str, check: Callable[[Kept], Awaitable[None]], **options: Callable[[], SpawnedProcess]
) -> Kept:
    """Run agents with this code until `check` has come to its end; return what was seen."""

    async def run() -> Kept:
        kept = Kept(code, **options)
        kept.let_in()
        running = asyncio.create_task(kept.keeper.run())
        async with asyncio.timeout(patience(12)):
            await check(kept)
            kept.over.set()
            await running
        return kept

    return asyncio.run(run())


def test_the_pauses_between_tries_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_keeper, "FIRST_PAUSE_S", 0.05)

    async def check(kept: Kept) -> None:
        await kept.wait_said("trying again in 0.2 s")

    kept = keep("raise SystemExit(83)", check)
    pauses = [line.rpartition(" in ")[2] for line in kept.said]
    assert pauses == ["0 s", "0.05 s", "0.1 s", "0.2 s"]
    assert kept.said[0] == (
        "[host-1] its agent ended with JOIN_REFUSED (83); its output is above. The job goes on; trying again in 0 s"
    )
    assert kept.keeper.is_out, "its code says nothing about the end of the script"


def test_a_pause_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_keeper, "FIRST_PAUSE_S", 1e6)
    monkeypatch.setattr(host_keeper, "MAX_PAUSE_S", 1e6)

    async def check(kept: Kept) -> None:
        await kept.wait_said("trying again in 1e+06 s")

    keep("raise SystemExit(2)", check)


def test_agents_are_given_up_when_no_host_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_keeper, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(host_keeper, "GIVE_UP_S", 0.05)

    async def run() -> Kept:
        kept = Kept("raise SystemExit(1)")
        async with asyncio.timeout(patience(12)):
            await kept.keeper.run()
        return kept

    kept = asyncio.run(run())
    assert kept.num_started > 1
    assert kept.keeper.exit_code == 1
    assert not kept.over.is_set()


@in_own_process
def test_an_agent_that_cannot_be_started_is_tried_again_until_it_is() -> None:
    first_words = [asyncio.run(start_with(free)) for free in range(12)]
    refused = "[host-1] its agent could not be started: [Errno 24] Too many open files"
    number = sum(words.startswith(refused) for words in first_words)
    assert 0 < number < 12
    assert first_words[number:] == ["agent runs"] * (12 - number), first_words


async def start_with(free: int) -> str:
    """Keep a host with so many free descriptors until something is said; return that, when an agent runs."""
    kept = Kept("print('agent runs', flush=True); import time; time.sleep(600)")
    kept.let_in()
    before = count_descriptors()
    async with asyncio.timeout(patience(12)):
        with free_descriptors(free):
            running = asyncio.create_task(kept.keeper.run())
            await kept.wait_said("")
        await kept.wait_said("agent runs")
        assert kept.keeper.agent is not None
        kept.over.set()
        kept.keeper.agent.kill()
        await running
        await wait_for_descriptors(before)
    return kept.said[0]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.ENOBUFS])
def test_a_refusal_of_the_kernel_is_tried_again(number: int) -> None:
    async def check(kept: Kept) -> None:
        await kept.wait_said("agent runs")

    refusals = [OSError(number, os.strerror(number))]

    def start() -> SpawnedProcess:
        if refusals:
            raise refusals.pop()
        return SpawnedProcess([sys.executable, "-u", "-c", "print('agent runs')"], stderr=subprocess.STDOUT)

    kept = keep("", check, start=start)
    assert f"its agent could not be started: [Errno {number}]" in kept.said[0]


def test_a_line_of_any_length_ends_nothing() -> None:
    code = "import sys; [print('x' * n) for n in (2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20)]; print('last')"

    async def check(kept: Kept) -> None:
        await kept.wait_said("last")

    kept = keep(code, check)
    lines = kept.said[: kept.said.index("last") + 1]
    assert sum(line.count("x") for line in lines) == 3 * 2**20 + 3 * 2**20, "all of it"
    assert "" not in lines
