"""What brings redundancy back yields to training, unless the others have the last copy of the state."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from resilient_jax.clock import SystemClock
from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.generation_follower import GenerationFollower
from resilient_jax.cluster.snapshot_server_process import SnapshotServerProcess
from resilient_jax.cluster.stored_records import ENCODER
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.config import JobConfig
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat
from resilient_jax.protocol.generation import Generation, GenerationPhase, LeaderNotes, Member, Membership
from resilient_jax.protocol.generation_change import describe_change
from resilient_jax.protocol.store_keys import make_change_key, make_generation_key
from resilient_jax.snapshot.process_priority import NICENESS
from resilient_jax.store.interface import PutOp
from resilient_jax.store.memory import MemoryStore
from resilient_jax.telemetry.event_log import EventLog
from tests.support.agent_parts import HOST, JOB, make_agent_settings, wait_until

OTHER = HostName("host-1")


class Agent:
    """The parts of an agent that follow the generation, and run a worker that never comes to `rj.run`."""

    def __init__(self, work: Path, store: MemoryStore) -> None:
        self._store = store
        script = work / "script.py"
        script.write_text("import time; time.sleep(600)")
        settings = make_agent_settings(script, JobConfig(restart_backoff_s=0.0, standby="off"), num_hosts=2)
        log = EventLog(None, HOST)
        context = AgentContext(settings=settings, store=store, clock=SystemClock(), log=log, print_line=print)
        self.snapshots = SnapshotServerProcess(settings, log, on_change=lambda: None, on_end=lambda: None)
        self.supervisor = WorkerSupervisor(
            context,
            snapshots=self.snapshots,
            on_change=lambda: None,
            is_start_urgent=lambda: self.follower.is_start_urgent(),
            is_over=lambda: False,
        )
        self.follower = GenerationFollower(
            context,
            self.supervisor,
            CoordinationServices(lambda: "127.0.0.1:1", log, lambda: None),
            on_end=lambda outcome: None,
            on_leave=lambda: None,
            on_generation=lambda generation: None,
        )

    async def publish(self, losses_left: int | None) -> None:
        """Publish a generation of which the other host is a member, and wait until this host has seen it."""
        generation = await self.write_generation(losses_left)
        await wait_until(lambda: self.follower.generation == generation)

    async def write_generation(self, losses_left: int | None) -> Generation:
        """Write a generation without members, in which nothing is to be lost yet, or with the other host."""
        member = Member(host=OTHER, incarnation=Incarnation(1), seat=Seat(0))
        generation = Generation(
            number=GenerationNumber(1),
            phase=GenerationPhase.ACTIVE,
            membership=Membership(members=() if losses_left is None else (member,)),
            record=LeaderNotes(losses_left=losses_left),
        )
        change = ENCODER.encode(describe_change(None, generation))
        puts = [
            PutOp(make_generation_key(JOB), ENCODER.encode(generation)),
            PutOp(make_change_key(JOB), change),
        ]
        await self._store.transaction([], puts, [])
        return generation

    async def restart_worker(self) -> int:
        """Kill the worker; return the process of the next one."""
        before = self.worker_pid
        os.kill(before, signal.SIGKILL)
        await wait_until(lambda: self.worker_pid != before)
        return self.worker_pid

    @property
    def worker_pid(self) -> int:
        assert self.supervisor.worker is not None
        return self.supervisor.worker.child.pid


@contextlib.asynccontextmanager
async def running_agent(work: Path) -> AsyncIterator[Agent]:
    async with contextlib.AsyncExitStack() as stack:
        agent = Agent(work, await stack.enter_async_context(MemoryStore()))
        await agent.write_generation(None)
        tasks = [
            asyncio.create_task(agent.supervisor.supervise()),
            asyncio.create_task(agent.follower.watch()),
        ]
        await wait_until(lambda: agent.supervisor.worker is not None)
        try:
            yield agent
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await agent.supervisor.close()
            await agent.snapshots.close()
            await agent.follower.close()


def test_a_worker_that_is_restarted_yields_to_training_unless_the_others_have_the_last_copy(tmp_path: Path):
    async def run() -> None:
        async with running_agent(tmp_path) as agent:
            assert os.sched_getscheduler(agent.worker_pid) == os.SCHED_OTHER, "no host trains"
            await agent.publish(losses_left=2)
            assert os.sched_getscheduler(await agent.restart_worker()) == os.SCHED_IDLE
            await agent.publish(losses_left=0)
            assert os.sched_getscheduler(agent.worker_pid) == os.SCHED_OTHER, "it was starting already"
            assert os.sched_getscheduler(await agent.restart_worker()) == os.SCHED_OTHER
            await agent.publish(losses_left=1)
            assert os.sched_getscheduler(await agent.restart_worker()) == os.SCHED_IDLE

    asyncio.run(run())


def test_a_snapshot_server_yields_to_training_unless_the_last_copy_waits_for_its_parity(tmp_path: Path):
    async def run() -> None:
        async with running_agent(tmp_path) as agent:
            agent.snapshots.start()
            await wait_until(lambda: agent.snapshots.server is not None)
            assert agent.snapshots.server is not None
            pid = agent.snapshots.server.pid
            for losses_left, policy, niceness in (
                (1, os.SCHED_BATCH, NICENESS),
                (0, os.SCHED_OTHER, 0),
                (1, os.SCHED_BATCH, NICENESS),
            ):
                await agent.publish(losses_left)
                threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
                assert len(threads) > 1
                assert {os.sched_getscheduler(thread) for thread in threads} == {policy}
                if niceness or os.geteuid() == 0:  # without the privilege niceness only grows
                    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {niceness}

    asyncio.run(run())
