"""Agents write the statuses of others together: each once or not at all, and never over a newer one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilient_jax.clock import SystemClock
from resilient_jax.cluster import progress_relay, progress_tree, status_combiner
from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.status_combiner import MAX_STATUSES, StatusCombiner
from resilient_jax.cluster.status_messages import NOT_WRITTEN, SERVICE, WRITE, StatusWrite
from resilient_jax.cluster.store_session import StoreSession
from resilient_jax.cluster.stored_records import decode_record
from resilient_jax.config import JobConfig
from resilient_jax.errors import MessageError, PeerUnreachable, Unauthenticated
from resilient_jax.ids import HostName, LeaseId, Revision
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.host_status import AgentStatus, HostStatus
from resilient_jax.protocol.store_keys import make_generation_key, make_host_key
from resilient_jax.protocol.versions import Versions
from resilient_jax.protocol.worker_report import TrainingProgress
from resilient_jax.store.interface import Compare, Operation, PutEvent, PutOp, TransactionResult
from resilient_jax.store.memory import MemoryStore
from resilient_jax.telemetry.event_log import EventLog
from resilient_jax.transport.channel import Channel
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.server import Server
from resilient_jax.transport.server_address import parse_address
from tests.benchmarks.control import simulated_agent
from tests.benchmarks.control.simulated_agent import SimulatedAgent
from tests.support.agent_parts import JOB, make_agent_settings, wait_until
from tests.support.patience import patience

VERSIONS = Versions(python="3", resilient_jax="1", jax="1", jaxlib="1")
TTL_S = 60.0


class GatedStore(MemoryStore):
    """A store whose transactions wait while `gate` is closed; `sizes` has the number of puts of each that succeeded."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_waiting = 0
        self.sizes: list[int] = []
        self.error: Exception | None = None

    async def transaction(
        self,
        compares: Sequence[Compare],
        success_ops: Sequence[Operation],
        failure_ops: Sequence[Operation] = (),
    ) -> TransactionResult:
        self.num_waiting += 1
        await self.gate.wait()
        self.num_waiting -= 1
        result = await super().transaction(compares, success_ops, failure_ops)
        if result.succeeded and (num_puts := sum(isinstance(operation, PutOp) for operation in success_ops)):
            self.sizes.append(num_puts)
        if self.error is not None:
            raise self.error
        return result


class Parent:
    """An agent that writes statuses of others, and a connection to it."""

    def __init__(self, tmp_path: Path) -> None:
        self.store = GatedStore()
        agent_settings = make_agent_settings(tmp_path / "script.py", JobConfig())
        self.context = AgentContext(
            settings=agent_settings,
            store=self.store,
            clock=SystemClock(),
            log=EventLog(None, HostName("h")),
            print_line=print,
        )
        self.server = Server(credentials=agent_settings.credentials)
        self.combiner = StatusCombiner(self.context, self.server)

    async def write(self, request: StatusWrite, token: str = "token") -> Revision:
        async with Channel(self.server.address, Credentials(token)) as channel:
            return (await channel.call(SERVICE, WRITE, request, timeout_s=patience(2))).revision

    async def write_together(self, requests: Sequence[StatusWrite]) -> list[asyncio.Task[Revision]]:
        """Hand over statuses, the first in a transaction that waits for the gate, the others in the next."""
        self.store.gate.clear()
        writes = [asyncio.create_task(self.write(requests[0]))]
        await wait_until(lambda: self.store.num_waiting == 1)
        writes += [asyncio.create_task(self.write(request)) for request in requests[1:]]
        await wait_until(lambda: len(self.combiner._waiting) == len(requests) - 1)
        return writes

    async def register(self, name: str) -> StatusWrite:
        """Register a host, and return what it would hand over after its first step."""
        lease = await self.store.grant(TTL_S)
        status = make_status(name, 0)
        revision = await self.store.put(
            make_host_key(JOB, status.host), msgspec.msgpack.encode(status), lease
        )
        return StatusWrite(status=make_status(name, 1), lease=lease, replaced=revision)

    async def read_step(self, name: str) -> int:
        record = await self.store.get(make_host_key(JOB, HostName(name)))
        assert record is not None
        return decode_record(record, HostStatus).progress.step


def make_status(name: str, step: int) -> HostStatus:
    return HostStatus(
        host=HostName(name),
        agent=AgentStatus(id=name, pid=1, address="127.0.0.1", versions=VERSIONS),
        progress=TrainingProgress(step=step),
    )


@contextlib.asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Parent]:
    parent = Parent(tmp_path)
    async with asyncio.timeout(patience(6)), parent.store, parent.server:
        try:
            yield parent
        finally:
            await parent.combiner.close()


def test_what_comes_while_a_transaction_is_under_way_is_written_by_the_next(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as parent:
            requests = [await parent.register(f"h{index}") for index in range(MAX_STATUSES + 3)]
            parent.store.sizes.clear()
            writes = await parent.write_together(requests)
            parent.store.gate.set()
            revisions = await asyncio.gather(*writes)
            assert parent.store.sizes == [1, MAX_STATUSES, 2]
            for request, revision in zip(requests, revisions, strict=True):
                record = await parent.store.get(make_host_key(JOB, request.status.host))
                assert record is not None
                assert (record.mod_revision, record.lease) == (revision, request.lease)
                assert decode_record(record, HostStatus) == request.status

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["older", "lease"])
def test_a_status_that_does_not_fit_holds_up_no_other(tmp_path: Path, fault: str) -> None:
    async def run() -> None:
        async with running(tmp_path) as parent:
            requests = [await parent.register(f"h{index}") for index in range(9)]
            bad = requests[4]
            if fault == "older":
                newer = msgspec.msgpack.encode(make_status("h4", 5))
                await parent.store.put(make_host_key(JOB, bad.status.host), newer, bad.lease)
            else:
                await parent.store.revoke(bad.lease)
            writes = await parent.write_together(requests)
            parent.store.gate.set()
            revisions = await asyncio.gather(*writes)
            assert [revision == NOT_WRITTEN for revision in revisions] == [index == 4 for index in range(9)]
            assert [await parent.read_step(f"h{index}") for index in (0, 3, 5, 8)] == [1, 1, 1, 1]
            if fault == "older":
                assert await parent.read_step("h4") == 5

    asyncio.run(run())


def test_a_store_that_does_not_answer_sends_every_caller_to_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as parent:
            requests = [await parent.register(f"h{index}") for index in range(3)]
            parent.store.error = PeerUnreachable("no leader")
            assert await asyncio.gather(*map(parent.write, requests)) == [NOT_WRITTEN] * 3
            parent.store.error = None
            assert await parent.write(await parent.register("h9"))

    asyncio.run(run())


def test_a_status_for_which_no_caller_waits_any_more_is_not_written(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as parent:
            requests = [await parent.register(f"h{index}") for index in range(3)]
            writes = await parent.write_together(requests)
            waiting = next(iter(parent.combiner._waiting))
            index = [request.status.host for request in requests].index(waiting)
            writes[index].cancel()
            await wait_until(lambda: not parent.combiner._waiting[waiting].is_wanted)
            parent.store.gate.set()
            await asyncio.gather(*writes, return_exceptions=True)
            assert await parent.read_step(waiting) == 0

    asyncio.run(run())


def test_a_wrong_token_and_what_makes_no_sense_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as parent:
            request = await parent.register("h0")
            parent.store.sizes.clear()
            with pytest.raises(Unauthenticated):
                await parent.write(request, token="another")
            for wrong in (
                {"lease": LeaseId(0)},
                {"lease": LeaseId(2**63)},
                {"replaced": Revision(0)},  # it would create the host's record
                {"replaced": Revision(-1)},
            ):
                with pytest.raises(MessageError):
                    await parent.write(msgspec.structs.replace(request, **wrong))
            assert await parent.read_step("h0") == 0
            assert parent.store.sizes == []

    asyncio.run(run())


# What becomes of a status that is handed over, and of the one before it: written in time or not, before the host
# writes itself or after.
FATES = st.lists(st.sampled_from(["in time", "too late", "much later", "lost"]), min_size=1, max_size=8)


@given(FATES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_older_status_never_replaces_a_newer_one(fates: list[str]) -> None:
    async def run() -> None:
        late: list[StatusWrite] = []

        async def write(request: StatusWrite) -> Revision:
            compare = status_combiner._Waiting(JOB, request)
            result = await store.transaction([compare.compare], [compare.put])
            return result.revision if result.succeeded else NOT_WRITTEN

        async def hand_over(request: StatusWrite) -> Revision:
            fate = fates[request.status.progress.step - 1]
            if fate == "in time":
                return await write(request)
            if fate == "too late":
                await write(request)
            elif fate == "much later":
                late.append(request)
            return NOT_WRITTEN

        def is_written() -> bool:
            return session.written is not None and session.written.progress.step == step

        step = 0
        async with MemoryStore() as store:
            session = StoreSession(
                store, JOB, TTL_S, SystemClock(), lambda: make_status("h", step), write_through=hand_over
            )
            await session.open()
            publishing = asyncio.create_task(session.publish_changes())
            for _ in fates:
                step += 1
                session.mark_changed()
                await wait_until(is_written)
            for request in late:
                assert await write(request) == NOT_WRITTEN
            publishing.cancel()
            steps: list[int] = []
            async with contextlib.aclosing(
                store.watch(make_host_key(JOB, HostName("h")), Revision(2))
            ) as batches:
                async for batch in batches:
                    steps += [
                        decode_record(e.key_value, HostStatus).progress.step
                        for e in batch
                        if isinstance(e, PutEvent)
                    ]
                    if steps[-1] == len(fates):
                        break
            assert steps == sorted(steps)
            record = await store.get(make_host_key(JOB, HostName("h")))
            assert record is not None
            assert decode_record(record, HostStatus).progress.step == len(fates)

    asyncio.run(run())


# Hosts that form a job, with real registrations, candidacies, reports and watches, and stubs for workers.

NUM_HOSTS = 7


class Job:
    """Hosts in a tree of two levels below the leader."""

    def __init__(self) -> None:
        self.store = GatedStore()
        self.generations: list[Generation] = []
        self.agents = [
            SimulatedAgent(index, NUM_HOSTS, self.store, lambda generation, _: self._note(generation), None)
            for index in range(NUM_HOSTS)
        ]
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, agents: Sequence[SimulatedAgent]) -> None:
        for agent in agents:
            await agent.register()
            self.tasks.append(asyncio.create_task(agent.run()))

    async def read_generation(self) -> Generation | None:
        record = await self.store.get(make_generation_key(simulated_agent.JOB))
        return decode_record(record, Generation) if record is not None else None

    async def wait_trains(self) -> Generation:
        def is_active() -> bool:
            for task in self.tasks:
                assert not task.done(), task.exception()
            done = [agent.status.worker for agent in self.agents]
            return all(worker is not None and worker.report.place.has_finished_step for worker in done)

        await wait_until(is_active)
        generation = await self.read_generation()
        assert generation is not None
        return generation

    def list_children(self, parent: SimulatedAgent) -> list[SimulatedAgent]:
        return [agent for agent in self.agents if agent.parent == parent._relay.endpoint]

    def _note(self, generation: Generation) -> None:
        if generation not in self.generations:
            self.generations.append(generation)


@contextlib.asynccontextmanager
async def job_of_all_but_one(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Job]:
    """Yield a job that forms as soon as its last host registers; the others know their parents."""
    monkeypatch.setattr(progress_tree, "FANOUT", 2)
    monkeypatch.setattr(progress_relay, "FANOUT", 2)
    monkeypatch.setattr(progress_relay, "INTERVAL_S", 0.05)
    monkeypatch.setattr(progress_relay, "SMALL_JOB_INTERVAL_S", 0.05)
    job = Job()
    async with asyncio.timeout(patience(6)), job.store:
        try:
            await job.start(job.agents[:-1])
            await wait_until(lambda: all(agent.parent for agent in job.agents[3:-1]))
            yield job
        finally:
            for task in job.tasks:
                task.cancel()
            await asyncio.gather(*job.tasks, return_exceptions=True)
            for agent in job.agents:
                with contextlib.suppress(Exception):
                    await agent.stop_listening()


def note_handed(monkeypatch: pytest.MonkeyPatch, agent: SimulatedAgent, handed: list[HostName]) -> None:
    """Note whose statuses an agent writes for others."""
    write = agent._combiner._write

    async def note_and_write(batch: Sequence[status_combiner._Waiting]) -> None:
        handed.extend(HostName(status.put.key.rpartition("/")[2]) for status in batch)
        await write(batch)

    monkeypatch.setattr(agent._combiner, "_write", note_and_write)


def test_a_job_forms_through_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with job_of_all_but_one(monkeypatch) as job:
            assert len(job.list_children(job.agents[1])) == 2
            handed: list[HostName] = []
            for agent in job.agents:
                note_handed(monkeypatch, agent, handed)
            await job.start(job.agents[-1:])
            generation = await job.wait_trains()
            assert len(generation.membership.members) == NUM_HOSTS
            assert {found.number for found in job.generations} == {generation.number}
            assert {agent.status.host for agent in job.agents[3:-1]} <= set(handed)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def connections_closed(endpoint: str) -> AsyncIterator[None]:
    """Close each connection to a port on which nobody listens; a host that refused them would count as dead."""
    host, port = parse_address(endpoint)
    async with await asyncio.start_server(lambda _, writer: writer.close(), host, port):
        yield


@pytest.mark.parametrize("fault", ["closes", "silent"])
def test_a_parent_that_is_lost_while_a_job_forms_costs_no_generation(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    async def write_for_ever(_: object) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        async with job_of_all_but_one(monkeypatch) as job, contextlib.AsyncExitStack() as stack:
            parent = job.agents[1]
            endpoint = parent._relay.endpoint
            children = job.list_children(parent)
            assert children
            if fault == "closes":
                await parent.stop_listening()
                await stack.enter_async_context(connections_closed(endpoint))
            else:
                monkeypatch.setattr(parent._combiner, "_write", write_for_ever)
            await job.start(job.agents[-1:])
            generation = await job.wait_trains()
            assert len(generation.membership.members) == NUM_HOSTS
            assert {found.number for found in job.generations} == {generation.number}
            assert all(child.parent != endpoint for child in children)

    monkeypatch.setattr(status_combiner, "ANSWER_TIMEOUT_S", 0.2)
    asyncio.run(run())
