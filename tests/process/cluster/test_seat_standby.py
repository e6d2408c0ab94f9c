"""An agent's standby in a seat: a worker with a connection of its own, whose output waits until it is the worker."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.seat_standby import SeatStandby
from resilient_jax.cluster.standby_schedule import MAX_RETRY_S, RETRY_S, SETTLING_S
from resilient_jax.cluster.worker_output import WorkerOutput
from resilient_jax.cluster.worker_process import WorkerProcess, launch_script
from resilient_jax.config import JobConfig
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, Incarnation
from resilient_jax.protocol.worker_messages import WorkerSettings
from resilient_jax.store.memory import MemoryStore
from resilient_jax.telemetry.event_log import EventLog, read_events
from tests.support.agent_parts import HOST, make_agent_settings
from tests.support.manual_clock import ManualClock
from tests.support.open_descriptors import count_descriptors, wait_for_descriptors
from tests.support.patience import patience

WAIT_S = patience(3)
GENERATION = GenerationNumber(1)
SETTINGS = WorkerSettings(job="job", host=HOST, address="127.0.0.1", token="token", is_standby=True)
WAITS = "import sys, time; print('ready', flush=True); time.sleep(60)"


class Agent:
    """What an agent has of its standby, with a clock that stands still."""

    def __init__(self, work: Path, store: MemoryStore, script: str) -> None:
        self.clock = ManualClock(1000.0)
        self.changed = asyncio.Event()
        self.worker_changes: list[WorkerProcess] = []
        self._events = work / "events.jsonl"
        self._script = work / "script.py"
        self._script.write_text(script)
        self.output_path = work / "host.log"
        self.output = WorkerOutput(HOST, self.output_path)
        self.log = EventLog(self._events, HOST)
        settings = make_agent_settings(self._script, JobConfig(standby="seat"))
        context = AgentContext(
            settings=settings, store=store, clock=self.clock, log=self.log, print_line=print
        )
        self.standby = SeatStandby(
            context,
            self._start,
            self.output,
            on_change=self.changed.set,
            on_message=lambda worker, message: None,
            on_worker_change=self.worker_changes.append,
        )

    async def _start(self) -> tuple[WorkerProcess, socket.socket]:
        async def launch(descriptors):
            return launch_script((str(self._script),), dict(os.environ), SETTINGS, descriptors)

        ours, theirs = socket.socketpair()
        return await WorkerProcess.start(Incarnation(2), launch, self.clock, theirs), ours

    async def start(self) -> int:
        """Commit in a world that has trained for long enough; return the process of the standby that starts."""
        self.standby.commit(GENERATION)
        self.clock.advance(SETTLING_S)
        self.standby.commit(GENERATION)
        await self.wait(is_there=True)
        assert self.standby.process is not None
        return self.standby.process.child.pid

    async def wait(self, *, is_there: bool) -> None:
        while (self.standby.status is not None) is not is_there:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), WAIT_S)

    def list_events(self, kind: EventKind) -> list[Event]:
        return [event for event in read_events(self._events) if event.kind is kind]


@contextlib.asynccontextmanager
async def agent(work: Path, script: str = WAITS) -> AsyncIterator[Agent]:
    """Yield an agent; check that its standby leaves no descriptor and no child."""
    async with MemoryStore() as store:
        found = Agent(work, store, script)
        before = count_descriptors()
        yield found
        await found.standby.close()
        await wait_for_descriptors(before)
        assert list_children() == []
        found.output.close()
        found.log.close()


def list_children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_standby_that_takes_over_is_the_worker_with_its_process_and_its_output(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def main() -> None:
        script = f"print('before', flush=True); open({str(fifo)!r}).read(); print('after', flush=True)"
        async with agent(tmp_path, script) as found:
            pid = await found.start()
            (await asyncio.to_thread(open, fifo, "w")).close()  # blocks until the script has come there
            taken = found.standby.take_over()
            assert taken is not None
            assert found.standby.status is None
            assert taken.process.child.pid == pid
            assert found.output_path.read_text() == ""
            taken.output.release()
            taken.snapshots.close()
            assert await asyncio.wait_for(taken.watching, WAIT_S) == 0
            assert found.output_path.read_text() == "before\nafter\n"
            assert found.worker_changes[-1] is taken.process, "its changes are the worker's"
            assert found.list_events(EventKind.STANDBY_FAILED) == []

    asyncio.run(main())


def test_a_standby_that_is_killed_is_started_again_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent(tmp_path) as found:
            first = await found.start()
            os.kill(first, signal.SIGKILL)
            await found.wait(is_there=False)
            found.clock.advance(RETRY_S - 1.0)
            found.standby.commit(GENERATION)
            assert found.standby.status is None
            found.clock.advance(2.0)
            found.standby.commit(GENERATION)
            await found.wait(is_there=True)
            (failed,) = found.list_events(EventKind.STANDBY_FAILED)
            assert failed.detail == {"pid": first, "reason": "it was ended by SIGKILL", "retried": True}

    asyncio.run(main())


def test_a_standby_whose_script_fails_is_not_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent(tmp_path, "raise OSError('the port is taken')") as found:
            pid = await found.start()
            await found.wait(is_there=False)
            (failed,) = found.list_events(EventKind.STANDBY_FAILED)
            reason = "it exited with code 1: OSError: the port is taken"
            assert failed.detail == {"pid": pid, "reason": reason, "retried": False}
            assert not found.standby.is_possible
            found.clock.advance(MAX_RETRY_S)
            found.standby.commit(GENERATION)
            assert found.standby.status is None

    asyncio.run(main())


def test_a_standby_ends_where_a_process_is_started_in_place_of_the_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent(tmp_path) as found:
            first = await found.start()
            found.standby.replace_worker()
            assert found.standby.status is None
            assert await found.start() != first, "in the new worker's time"
            assert found.list_events(EventKind.STANDBY_FAILED) == []

    asyncio.run(main())


def test_a_standby_that_prints_without_end_waits_until_it_is_the_worker(tmp_path: Path) -> None:
    script = "for number in range(100_000): print('line', number)\nprint('ready', flush=True)"

    async def main() -> None:
        async with agent(tmp_path, script) as found:
            await found.start()
            taken = found.standby.take_over()
            assert taken is not None
            taken.snapshots.close()
            taken.output.release()
            assert await asyncio.wait_for(taken.watching, WAIT_S) == 0
            lines = found.output_path.read_text().splitlines()
            assert lines == [*(f"line {number}" for number in range(100_000)), "ready"]

    asyncio.run(main())
