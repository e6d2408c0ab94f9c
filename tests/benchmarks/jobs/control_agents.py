"""Simulated agents, many in one process, at the embedded store of another process.

    control_agents.py STORE NUM_HOSTS FIRST LAST STEP

Of NUM_HOSTS hosts each STEP after the one before, from FIRST to LAST - 1 at most. Orders are lines of JSON on standard
input, messages lines of JSON on standard output (`agent_messages`). Ends with its standard input.
"""

import asyncio
import collections
import gc
import os
import sys
import time
from collections.abc import Sequence
from unittest import mock

import msgspec

from resilient_jax.cluster.progress_messages import REPORT, SERVICE, ProgressReports
from resilient_jax.cluster.progress_tree import FANOUT
from resilient_jax.cluster.stored_records import decode_record
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.store_keys import make_hosts_prefix
from resilient_jax.store import etcd_connection
from resilient_jax.store.interface import Store
from resilient_jax.store.remote import RemoteStore
from resilient_jax.store.store_access import StoreAccess
from resilient_jax.transport.channel import Channel
from tests.benchmarks.control.agent_messages import (
    AgentsMessage,
    AgentsOrder,
    AllRead,
    LoseLast,
    Lost,
    Register,
    Registered,
    Train,
)
from tests.benchmarks.control.shared_connections import share_connections
from tests.benchmarks.control.shared_decoding import share_decoding
from tests.benchmarks.control.simulated_agent import (
    CREDENTIALS,
    JOB,
    PATIENCE_S,
    SimulatedAgent,
    count_listening,
)
from tests.support.stub_hosts import make_host_name

AGENTS_PER_CONNECTION = 16
REGISTRATIONS_AT_ONCE = 64
STEP_S = 1.0
PARENT_INTERVAL_S = 0.05
# The time-outs of calls are the patience of the benchmark: where other work keeps both cores busy, such a process is
# slower than those of agents, and lost its leases by them.
SIGN_OF_LIFE_INTERVAL_S = 10.0
"""Of a watch at etcd. With 0.5 s, as agents have it, the two watches of each of 4,096 hosts ask 16,000 times a second,
which costs each host little, but two processes that stand for all of them more than there is."""


class AgentsProcess:
    """The agents of this process, and what all of them have read."""

    def __init__(self, address: str, num_hosts: int, indices: Sequence[int], shared_port: int) -> None:
        self._address = address
        self._num_hosts = num_hosts
        self._shared_port = shared_port
        self._waiting = collections.deque(indices)
        self._num_agents = len(indices)
        self._num_listening = count_listening(num_hosts)
        self._stores: list[Store] = []
        self._agents: dict[int, SimulatedAgent] = {}
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._readers: collections.Counter[tuple[int, GenerationPhase]] = collections.Counter()
        self._bytes_read = 0
        self._at_once = asyncio.Semaphore(REGISTRATIONS_AT_ONCE)

    async def register(self, up_to: int) -> None:
        began_s = time.monotonic()
        indices: list[int] = []
        while self._waiting and self._waiting[0] < up_to:
            indices.append(self._waiting.popleft())
        for index in indices:
            if len(self._agents) % AGENTS_PER_CONNECTION == 0:
                self._stores.append(await connect_store(self._address))
            self._agents[index] = self._make_agent(index)
        await asyncio.gather(*(self._register(index) for index in indices))
        # Hosts learn their parent when they register, long before the last one does.
        late = [self._agents[index] for index in indices if index > FANOUT]
        while not all(agent.parent for agent in late):  # noqa: ASYNC110 - no event announces what is waited for
            await asyncio.sleep(PARENT_INTERVAL_S)
        send(Registered(at_s=began_s))

    async def lose_last(self) -> None:
        index, lost = self._agents.popitem()
        self._num_agents -= 1
        run = self._runs.pop(index)
        run.cancel()
        await asyncio.wait([run])
        send(Lost(at_s=time.monotonic()))
        await lost.leave()

    async def train(self) -> None:
        """Make a step a second; of the hosts that do not report, the agents that they would report to are told."""
        silent = [agent for index, agent in self._agents.items() if index > self._num_listening]
        channels = await self._connect_reporting() if silent else []
        while True:
            await asyncio.sleep(STEP_S)
            for agent in self._agents.values():
                agent.step = max(agent.step, agent.status.progress.step) + 1
            shares = [silent[number :: len(channels)] for number in range(min(len(channels), len(silent)))]
            await asyncio.gather(*map(self._report, channels, shares))

    async def _connect_reporting(self) -> list[Channel]:
        """Return channels to the agents that collect the reports of others."""
        _, records = await self._stores[0].range(make_hosts_prefix(JOB))
        hosts = {make_host_name(index) for index in range(1, FANOUT + 1)}
        statuses = [decode_record(record, HostStatus) for record in records]
        return [Channel(status.agent.endpoint, CREDENTIALS) for status in statuses if status.host in hosts]

    async def _report(self, channel: Channel, agents: Sequence[SimulatedAgent]) -> None:
        reports = tuple(agent.make_progress() for agent in agents)
        request = ProgressReports(sender=agents[0].status.host, hosts=reports)
        await channel.call(SERVICE, REPORT, request, timeout_s=PATIENCE_S)

    async def _register(self, index: int) -> None:
        agent = self._agents[index]
        async with self._at_once:
            await agent.register()
        self._runs[index] = asyncio.create_task(agent.run())
        self._runs[index].add_done_callback(exit_if_failed)

    def _make_agent(self, index: int) -> SimulatedAgent:
        def on_read(generation: Generation, nbytes: int) -> None:
            self._note_read(read, generation, nbytes)

        read: set[tuple[int, GenerationPhase]] = set()
        return SimulatedAgent(
            index,
            self._num_hosts,
            self._stores[-1],
            on_read,
            None if index <= self._num_listening else self._shared_port,
        )

    def _note_read(self, read: set[tuple[int, GenerationPhase]], generation: Generation, nbytes: int) -> None:
        self._bytes_read += nbytes
        key = generation.number, generation.phase
        if key in read:
            return
        read.add(key)
        self._readers[key] += 1
        if self._readers[key] == self._num_agents:
            each = self._bytes_read / self._num_agents
            now_s = time.monotonic()
            send(AllRead(number=key[0], phase=key[1], at_s=now_s, bytes_read=each, newest_bytes=nbytes))


async def close_at_once(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def connect_store(address: str) -> Store:
    access = StoreAccess(address, CREDENTIALS)
    if access.is_etcd:
        return await access.connect(PATIENCE_S)
    # Not the default time-out of 5 s: it would end what is to be measured.
    return await RemoteStore.connect(address, CREDENTIALS, PATIENCE_S, call_timeout_s=PATIENCE_S)


def send(message: AgentsMessage) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.flush()


def exit_if_failed(run: "asyncio.Task[None]") -> None:
    if not run.cancelled() and (error := run.exception()) is not None:
        sys.stderr.write(f"an agent ended: {error!r}\n")
        sys.stderr.flush()
        os._exit(1)  # without closing thousands of connections first


async def main() -> None:
    gc.disable()  # the objects of thousands of agents take it a second, those of one a millisecond
    address, num_hosts, first, last, step = sys.argv[1], *map(int, sys.argv[2:])
    # A leader looks whether the agents that it waits for are alive.
    listener = await asyncio.start_server(close_at_once, "127.0.0.1", 0)
    shared_port = listener.sockets[0].getsockname()[1]
    agents = AgentsProcess(address, num_hosts, range(first, last, step), shared_port)
    training: asyncio.Task[None] | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        match msgspec.json.decode(line, type=AgentsOrder):
            case Register(up_to=up_to):
                await agents.register(up_to)
            case Train():
                training = training or asyncio.create_task(agents.train())
                training.add_done_callback(exit_if_failed)
            case LoseLast():
                await agents.lose_last()


if __name__ == "__main__":
    with (
        share_decoding(),
        share_connections(PATIENCE_S),
        mock.patch.object(etcd_connection, "PROGRESS_INTERVAL_S", SIGN_OF_LIFE_INTERVAL_S),
        mock.patch.object(etcd_connection, "SILENCE_LIMIT_S", PATIENCE_S),
        mock.patch.object(etcd_connection, "ATTEMPT_TIMEOUT_S", PATIENCE_S),
        mock.patch.object(etcd_connection, "REPEATABLE_ATTEMPT_TIMEOUT_S", PATIENCE_S),
    ):
        asyncio.run(main())
