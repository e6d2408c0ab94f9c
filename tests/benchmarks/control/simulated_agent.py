"""An agent whose worker is a stub: the real registration, candidacy, reports of progress and watch, in few processes.

What an agent has beside: a worker process, a snapshot server and a coordination service, which are never started here.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Final, cast

from resilient_jax.clock import SystemClock
from resilient_jax.cluster import progress_relay
from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.generation_follower import read_generations
from resilient_jax.cluster.leader import Leader
from resilient_jax.cluster.progress_messages import HostProgress
from resilient_jax.cluster.progress_relay import ProgressRelay
from resilient_jax.cluster.progress_tree import FANOUT
from resilient_jax.cluster.status_combiner import StatusCombiner, StatusForwarder
from resilient_jax.cluster.store_session import StoreSession
from resilient_jax.config import JobConfig
from resilient_jax.errors import PeerError
from resilient_jax.ids import JobName, Revision, WorldId
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.worker_report import TrainingProgress
from resilient_jax.store.interface import KeyValue, PutEvent, Store, WatchEvent
from resilient_jax.telemetry.event_log import EventLog
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.server import Server
from resilient_jax.transport.server_address import parse_address
from tests.support.stub_hosts import (
    VERSIONS,
    answer_generation,
    make_host_name,
    make_idle_status,
    serve_world,
)

CREDENTIALS: Final = Credentials("test-token")
"""Of `tests/support/scripts/serve_store.py`."""
JOB: Final = JobName("control")
LEASE_TTL_S: Final = 60.0
"""Twenty times the default: thousands of agents of one machine would spend its cores on renewals."""
PATIENCE_S: Final = 600.0
"""Timeouts of the membership: a machine that is busy with thousands of agents must not lose one by them."""

RETRY_INTERVAL_S: Final = 0.1
"""As agents wait after a fault of the store."""

OnRead = Callable[[Generation, int], None]
"""Called with each generation that an agent has read, and the bytes of what it read."""


def count_listening(num_hosts: int) -> int:
    """Return the index of the last host to which others may report: those with the first places of the tree."""
    return max(FANOUT, (num_hosts - 2) // FANOUT)


class SimulatedAgent:
    """One host. `register` it, then `run` it until it is cancelled."""

    def __init__(
        self, index: int, num_hosts: int, store: Store, on_read: OnRead, shared_port: int | None
    ) -> None:
        """Make the agent of host `index`.

        Args:
            index: of the host.
            num_hosts: of the job.
            store: of the job.
            on_read: called for each generation that this agent reads.
            shared_port: where others listen for this agent; it then reports no progress, but asks the leader for its
                parent. None: it listens itself.
        """
        self.step = 0
        self._status = make_idle_status(index, shared_port or 0)
        self._store = store
        self._on_read = on_read
        context = _make_context(index, num_hosts, store)
        self._server = Server(credentials=CREDENTIALS)
        self._listens = shared_port is None
        make_relay = ProgressRelay if self._listens else _SilentRelay
        self._relay = make_relay(context, self._server, self.make_progress)
        self._combiner = StatusCombiner(context, self._server)
        self._forwarder = StatusForwarder(CREDENTIALS, self._relay)
        self._session = StoreSession(
            store,
            JOB,
            LEASE_TTL_S,
            context.clock,
            lambda: self._status,
            write_through=self._forwarder.write,
        )
        self._make_leader = functools.partial(
            Leader, context, _make_membership_config(num_hosts), _StubServices(context, self._serve_world)
        )

    async def register(self) -> None:
        """Put the host's status into the store."""
        if self._listens:
            await self._server.start()
            port = parse_address(self._server.address)[1]
            self._status = change_fields(self._status, port=port)
        while True:
            try:
                await self._session.open()
                return
            except PeerError:  # the store is busy; an agent registers anew
                await asyncio.sleep(RETRY_INTERVAL_S)
                with contextlib.suppress(PeerError):
                    await self._store.revoke(self._session.lease)

    async def run(self) -> None:
        """Renew the lease, write changes of the status, follow generations, lead or follow a leader, and report."""
        leader = self._make_leader(self._relay)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._session.keep_alive())
            tasks.create_task(self._session.publish_changes())
            tasks.create_task(_retry_after_faults(self._follow))
            tasks.create_task(_retry_after_faults(lambda: leader.campaign(self._session.lease)))
            tasks.create_task(self._relay.run())

    async def leave(self) -> None:
        """Have the others see at once that the host is gone; `run` must have ended."""
        await self._store.revoke(self._session.lease)  # `close` waits for a second only

    def change_status(self, status: HostStatus) -> None:
        """Have another status written."""
        self._status = status
        self._session.mark_changed()

    @property
    def status(self) -> HostStatus:
        """The present status."""
        return self._status

    async def _follow(self) -> None:
        async with contextlib.aclosing(follow_generations(self._store)) as generations:
            async for generation, nbytes in generations:
                self._on_read(generation, nbytes)
                status = answer_generation(self._status, generation)
                is_changed = status.worker != self._status.worker
                self._status = status
                if is_changed:
                    self._session.mark_changed()

    @property
    def parent(self) -> str:
        """The endpoint of the agent that writes this one's status; empty: it does that itself."""
        return self._relay.parent

    async def stop_listening(self) -> None:
        """Refuse the messages of other agents."""
        await self._server.stop()
        await self._combiner.close()

    def _serve_world(self, asked: StartCoordinationService) -> None:
        self.change_status(serve_world(self._status, asked))

    def make_progress(self) -> HostProgress:
        """Return how far the host is."""
        status = self._status
        return HostProgress(
            host=status.host,
            agent_id=status.agent.id,
            sequence=self.step,
            progress=TrainingProgress(step=max(self.step, status.progress.step)),
        )


async def follow_generations(store: Store) -> AsyncGenerator[tuple[Generation, int], None]:
    """Yield the stored generation and each later one, with the bytes of the records that were read for it."""
    counting = _CountingStore(store)
    async with contextlib.aclosing(read_generations(cast(Store, counting), JOB)) as generations:
        async for generation in generations:
            nbytes, counting.bytes_read = counting.bytes_read, 0
            yield generation, nbytes


class _CountingStore:
    """The part of a store that reads generations; counts the bytes of keys and values."""

    def __init__(self, store: Store) -> None:
        self.bytes_read = 0
        self._store = store

    async def range(self, prefix: str) -> tuple[Revision, list[KeyValue]]:
        revision, records = await self._store.range(prefix)
        self.bytes_read += sum(map(_count_bytes, records))
        return revision, records

    async def get(self, key: str) -> KeyValue | None:
        record = await self._store.get(key)
        self.bytes_read += _count_bytes(record) if record is not None else 0
        return record

    async def watch(self, prefix: str, from_revision: Revision) -> AsyncGenerator[list[WatchEvent], None]:
        async with contextlib.aclosing(self._store.watch(prefix, from_revision)) as batches:
            async for batch in batches:
                records = [event.key_value for event in batch if isinstance(event, PutEvent)]
                self.bytes_read += sum(map(_count_bytes, records))
                yield batch


async def _retry_after_faults(work: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run `work` again after a fault of the store, as `host_registration` does."""
    while True:
        try:
            await work()
        except PeerError:
            await asyncio.sleep(RETRY_INTERVAL_S)


def _count_bytes(record: KeyValue) -> int:
    return len(record.key) + len(record.value)


class _SilentRelay(ProgressRelay):
    """The relay of an agent that does not listen, and reports only until the leader has named its parent."""

    @property
    def endpoint(self) -> str:
        return "127.0.0.1:1"

    async def run(self) -> None:
        while not self.parent:
            await self._wait_due()
            if self._leader:
                await self._report(progress_relay.Channel(self._leader, CREDENTIALS))


class _StubServices(CoordinationServices):
    """Coordination services that run as soon as they are asked for."""

    def __init__(self, context: AgentContext, on_start: Callable[[StartCoordinationService], None]) -> None:
        super().__init__(lambda: context.settings.address, context.log, lambda: None)
        self._on_start = on_start
        self._started: set[tuple[WorldId, int]] = set()

    def start_standby(self) -> None:
        """Start nothing."""

    def start(self, world: WorldId, num_processes: int, num_seats: int) -> None:
        """Report that the service runs."""
        if (world, num_processes) not in self._started:
            self._started.add((world, num_processes))
            self._on_start(StartCoordinationService(world, num_processes, num_seats))


def _make_context(index: int, num_hosts: int, store: Store) -> AgentContext:
    host = make_host_name(index)
    return AgentContext(
        settings=AgentSettings(
            job=JOB,
            host=host,
            address="127.0.0.1",
            command=("stub",),
            environment={"JAX_PLATFORMS": "cpu"},
            devices_per_host=None,
            num_hosts=num_hosts,
            versions=VERSIONS,
            credentials=CREDENTIALS,
            config=JobConfig(),
            run_directory=None,
        ),
        store=store,
        clock=SystemClock(),
        log=EventLog(None, host),
        print_line=lambda line: None,
        agent_id=make_idle_status(index).agent.id,
    )


def _make_membership_config(num_hosts: int) -> MembershipConfig:
    return MembershipConfig(
        num_hosts=num_hosts,
        start_timeout_s=PATIENCE_S,
        quiesce_timeout_s=PATIENCE_S,
        forming_timeout_s=PATIENCE_S,
    )
