"""An agent whose worker dies has its standby for a worker at once, before the kernel has freed what the dead one had.

Workers and standbys are processes that speak the protocol and compute nothing.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.generation_follower import GenerationFollower
from resilient_jax.cluster.snapshot_server_process import SnapshotServerProcess
from resilient_jax.cluster.standby_schedule import SETTLING_S
from resilient_jax.cluster.worker_process import WorkerProcess
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.config import JobConfig
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, Incarnation
from resilient_jax.protocol.generation import (
    FailedAttempts,
    Generation,
    GenerationPhase,
    JobOutcome,
    JobOutcomeKind,
)
from resilient_jax.protocol.host_status import StandbyState
from resilient_jax.protocol.raised_error import RaisedError
from resilient_jax.protocol.worker_messages import Pause, Quiesce, RunToBoundary
from resilient_jax.protocol.worker_report import WorkerState
from resilient_jax.store.memory import MemoryStore
from resilient_jax.telemetry.event_log import EventLog, read_events
from tests.support.agent_parts import HOST, WAIT_S, make_agent_settings, wait_until
from tests.support.manual_clock import ManualClock

GENERATION = GenerationNumber(1)
MAX_RESTARTS = 2
SCRIPT = """
import os
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.worker_report import TrainingProgress, WorkerReport, WorkerState, WorldPlace
from resilient_jax.protocol.worker_messages import *

connection = Connection(int(os.environ[AGENT_CONNECTION_VARIABLE]), WORKER_ORDER_DECODER, send_timeout_s=None)
connection.send(WorkerReported(report=WorkerReport(state=WorkerState.IDLE, place=WorldPlace(world=1), generation=1)))
while True:
    for received in connection.receive():
        match received.message:
            case Pause():
                connection.send(StepCommitted(progress=TrainingProgress(step=1)))
            case Quiesce():  # its threads have ended
                os.close(int(os.environ[DEATH_PIPE_VARIABLE]))
            case RunToBoundary():
                os._exit(received.message.boundary_step)
"""


class Agent:
    """The parts of an agent that keep a worker, and a clock that stands still."""

    def __init__(self, work: Path, store: MemoryStore) -> None:
        script = work / "script.py"
        script.write_text(SCRIPT)
        self.clock = ManualClock(1000.0)
        config = JobConfig(restart_backoff_s=0.0, standby="seat", max_restarts=MAX_RESTARTS)
        settings = make_agent_settings(script, config, num_hosts=2)
        self._events = work / "events.jsonl"
        self.log = EventLog(self._events, HOST)
        context = AgentContext(
            settings=settings, store=store, clock=self.clock, log=self.log, print_line=print
        )
        self.snapshots = SnapshotServerProcess(
            settings, self.log, on_change=lambda: None, on_end=lambda: None
        )
        self.supervisor = WorkerSupervisor(
            context,
            snapshots=self.snapshots,
            on_change=lambda: self.follower.on_worker_changed(),
            is_start_urgent=lambda: False,
            is_over=lambda: False,
        )
        self.follower = GenerationFollower(
            context,
            self.supervisor,
            CoordinationServices(lambda: "127.0.0.1:1", self.log, lambda: None),
            on_end=lambda outcome: None,
            on_leave=lambda: None,
            on_generation=lambda generation: None,
        )

    @property
    def worker(self) -> WorkerProcess:
        assert self.supervisor.worker is not None
        return self.supervisor.worker

    async def wait_idle(self) -> None:
        """Wait until the worker is past the top of its script."""
        await wait_until(
            lambda: (w := self.supervisor.worker) is not None and w.report.state is WorkerState.IDLE
        )

    async def stand_by(self) -> WorkerProcess:
        """Let the worker train until it has a standby that is ready; return that."""
        await self.wait_idle()

        def is_ready() -> bool:
            self.worker.send_order(Pause(generation=GENERATION))
            self.clock.advance(SETTLING_S / 10)
            status = self.supervisor.standby.status
            return status is not None and status.state is StandbyState.READY

        await wait_until(is_ready)
        assert self.supervisor.standby.process is not None
        return self.supervisor.standby.process

    def count_events(self, kind: EventKind) -> int:
        return sum(event.kind is kind for event in read_events(self._events))


@contextlib.asynccontextmanager
async def running_agent(work: Path) -> "AsyncIterator[tuple[Agent, asyncio.Task[JobOutcome | None]]]":
    async with MemoryStore() as store:
        agent = Agent(work, store)
        supervising = asyncio.create_task(agent.supervisor.supervise())
        try:
            yield agent, supervising
        finally:
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)
            await agent.supervisor.close()
            await agent.snapshots.close()
            agent.log.close()


def make_generation(raised: RaisedError) -> Generation:
    return Generation(
        number=GenerationNumber(2), phase=GenerationPhase.QUIESCE, failures=FailedAttempts(raised=(raised,))
    )


def test_a_standby_is_the_worker_as_soon_as_the_threads_of_its_predecessor_have_ended(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_agent(tmp_path) as (agent, _):
            standby = await agent.stand_by()
            died = agent.worker
            died.send_order(Quiesce(generation=GENERATION))
            await wait_until(lambda: agent.worker is standby)
            assert died.child.exit_code is None, "it is still there"
            status = agent.supervisor.status
            assert status is not None
            assert (status.incarnation, status.is_alive) == (standby.incarnation, True)
            assert agent.supervisor.standby.status is None
            died.child.kill()
            await wait_until(lambda: agent.count_events(EventKind.WORKER_EXITED) == 1)
            assert agent.worker is standby, "the end of the other is not the worker's"
            # The next standby, and the next death.
            second = await agent.stand_by()
            os.kill(standby.child.pid, signal.SIGKILL)
            await wait_until(lambda: agent.worker is second)

    asyncio.run(main())


def test_takeovers_count_as_restarts(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_agent(tmp_path) as (agent, supervising):
            for _ in range(MAX_RESTARTS + 1):
                standby = await agent.stand_by()
                os.kill(agent.worker.child.pid, signal.SIGKILL)
                await wait_until(lambda s=standby: agent.worker is s)
            outcome = await asyncio.wait_for(supervising, WAIT_S)
            assert outcome is not None
            assert outcome.kind is JobOutcomeKind.TOO_FEW_HOSTS

    asyncio.run(main())


def test_the_error_of_a_script_stays_the_hosts_status_until_the_leader_has_noted_it(tmp_path: Path) -> None:
    """Threads end before the exit code is known."""

    async def main() -> None:
        async with running_agent(tmp_path) as (agent, supervising):
            standby = await agent.stand_by()
            failed = agent.worker
            failed.send_order(Quiesce(generation=GENERATION))
            await wait_until(lambda: agent.worker is standby)
            failed.send_order(RunToBoundary(generation=GENERATION, boundary_step=5))
            await wait_until(lambda: standby.child.exit_code == -signal.SIGKILL)
            status = agent.supervisor.status
            assert status is not None
            assert (status.incarnation, status.exit_code) == (failed.incarnation, 5)
            earlier = RaisedError(
                host=HOST, incarnation=Incarnation(failed.incarnation - 1), step=1, what="exit code 5"
            )
            agent.supervisor.errors.read(make_generation(earlier))
            assert agent.worker is failed
            assert not supervising.done()
            noted = msgspec.structs.replace(earlier, incarnation=failed.incarnation)
            agent.supervisor.errors.read(make_generation(noted))
            await wait_until(lambda: agent.worker is not failed)

    asyncio.run(main())


def test_a_stopped_standby_is_no_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_agent(tmp_path) as (agent, _):
            standby = await agent.stand_by()
            os.kill(standby.child.pid, signal.SIGSTOP)
            await wait_until(standby.child.is_stopped)
            died = agent.worker
            os.kill(died.child.pid, signal.SIGKILL)
            await wait_until(lambda: agent.worker is not died)
            assert agent.worker is not standby
            await wait_until(lambda: standby.child.exit_code is not None)
            assert agent.count_events(EventKind.WORKER_PROMOTED) == 0

    asyncio.run(main())
