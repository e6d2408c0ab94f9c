"""Kill the leader of a real etcd cluster while a job's leader decides all the time.

    control_etcd.py FOUND WORK KILLS

Three hosts; whenever the second has read a generation, it gains or loses its copy of the state, which the leader
publishes. It writes `EtcdMeasurements` to FOUND.
"""

import asyncio
import sys
import time
from pathlib import Path

import msgspec

from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.store.store_access import StoreAccess
from tests.benchmarks.control.decision_gaps import EtcdMeasurements
from tests.benchmarks.control.simulated_agent import CREDENTIALS, PATIENCE_S, SimulatedAgent
from tests.chaos.etcd_cluster import EtcdCluster
from tests.support.stub_hosts import change_report

HOSTS = 3
START_LIMIT_S = 60.0
WATCHED_S = 4.0
"""After each kill; eight times the election time-out."""


class DecidingJob:
    """Hosts of which one changes something that the leader publishes, again and again."""

    def __init__(self) -> None:
        self.published_s: list[float] = []
        self._agents: list[SimulatedAgent] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, address: str) -> None:
        for index in range(HOSTS):
            store = await StoreAccess(address, CREDENTIALS).connect(PATIENCE_S)
            on_read = self._flip if index == 1 else _ignore
            agent = SimulatedAgent(index, HOSTS, store, on_read, None)
            self._agents.append(agent)
            await agent.register()
            self._tasks.append(asyncio.create_task(agent.run()))
        async with asyncio.timeout(START_LIMIT_S):
            while len(self.published_s) < HOSTS:  # noqa: ASYNC110 - no event announces what is waited for
                await asyncio.sleep(0.1)

    def check(self) -> None:
        """Raise the error that ended an agent, if there is one."""
        for task in self._tasks:
            if task.done():
                task.result()

    def _flip(self, generation: Generation, nbytes: int) -> None:
        self.published_s.append(time.monotonic())
        asyncio.get_running_loop().call_soon(self._flip_copy, generation)

    def _flip_copy(self, generation: Generation) -> None:
        agent = self._agents[1]
        report = agent.status.worker.report if agent.status.worker is not None else None
        if (
            generation.phase is GenerationPhase.ACTIVE
            and report is not None
            and report.place.has_finished_step
        ):
            agent.change_status(change_report(agent.status, holds_state=not report.held.holds_state))


def _ignore(generation: Generation, nbytes: int) -> None:
    pass


async def measure(cluster: EtcdCluster, kills: int) -> EtcdMeasurements:
    job, killed_s = DecidingJob(), []
    await job.start(str(cluster.address))
    await asyncio.sleep(WATCHED_S)
    for _ in range(kills):
        leader = await asyncio.to_thread(cluster.find_leader)
        killed_s.append(time.monotonic())
        await asyncio.to_thread(cluster.kill, leader)
        await asyncio.sleep(WATCHED_S)
        job.check()
        await asyncio.to_thread(cluster.restore)
        await asyncio.sleep(WATCHED_S / 2)
    return EtcdMeasurements(published_s=job.published_s, killed_s=killed_s, watched_s=WATCHED_S)


def main() -> None:
    found, work, kills = sys.argv[1:]
    Path(work).mkdir(parents=True, exist_ok=True)
    with EtcdCluster(Path(work)) as cluster:
        measured = asyncio.run(measure(cluster, int(kills)))
    Path(found).write_bytes(msgspec.json.encode(measured))


if __name__ == "__main__":
    main()
