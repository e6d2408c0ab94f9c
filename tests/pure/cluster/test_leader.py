"""The leader in virtual time: two agents that both take themselves for it, and a store that listens to one."""

import asyncio
import contextlib
from typing import Any, Final, cast

import pytest

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.leader import Leader
from resilient_jax.cluster.progress_relay import ProgressRelay
from resilient_jax.cluster.quarantine import quarantine_host, read_quarantine
from resilient_jax.cluster.stored_records import ENCODER, decode_record
from resilient_jax.config import JobConfig
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, JobName, LeaseId, Revision, WorldId
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.job_start import is_interrupted
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.generation import Generation, GenerationPhase, JobOutcomeKind
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.leader_record import LeaderRecord
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.store_keys import make_generation_key, make_host_key, make_leader_key
from resilient_jax.store.interface import NO_LEASE, DeleteOp, KeyValue, PutEvent, PutOp
from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.state_machine import FIRST_REVISION
from resilient_jax.telemetry.event_log import EventLog
from resilient_jax.transport.credentials import Credentials
from tests.support.manual_clock import ManualClock
from tests.support.stub_hosts import (
    VERSIONS,
    answer_generation,
    make_host_name,
    make_idle_status,
    serve_world,
)
from tests.support.virtual_time import run_in_virtual_time

JOB = JobName("job")
LEADER_KEY, GENERATION_KEY = make_leader_key(JOB), make_generation_key(JOB)
LONG_S = 10_000.0
"""Of virtual time: leases that no test lets expire."""
SETTLED_S = 30.0
"""Of virtual time, in which hosts that answer at once have formed a world."""
MAX_TERMS: Final = 20
"""Of one candidate. This store answers without a wait: who loses each term at once would campaign for ever."""


class Hosts:
    """Hosts in a store, whose workers do at once what each generation asks for."""

    def __init__(self, store: MemoryStore, count: int) -> None:
        self._store = store
        self._statuses = {status.host: status for status in map(make_idle_status, range(count))}

    async def run(self) -> None:
        for status in self._statuses.values():
            await self._write(status)
        async with contextlib.aclosing(
            self._store.watch(GENERATION_KEY, Revision(FIRST_REVISION + 1))
        ) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, PutEvent):
                        await self._answer(decode_record(event.key_value, Generation))

    async def serve(self, host: HostName, asked: StartCoordinationService) -> None:
        """Have a host run a coordination service."""
        await self._write(serve_world(self._statuses[host], asked))

    async def notify(self, host: HostName) -> None:
        """Have a host get a notice to leave."""
        await self._write(change_fields(self._statuses[host], is_draining=True))

    async def end(self, host: HostName) -> None:
        """Have a host be gone."""
        del self._statuses[host]
        await self._store.transaction([], [DeleteOp(make_host_key(JOB, host))])

    async def _answer(self, generation: Generation) -> None:
        for status in list(self._statuses.values()):
            await self._write(answer_generation(status, generation))

    async def _write(self, status: HostStatus) -> None:
        self._statuses[status.host] = status
        put = PutOp(make_host_key(JOB, status.host), ENCODER.encode(status), NO_LEASE)
        await self._store.transaction([], [put])


class Services:
    """Coordination services that run as soon as they are asked for."""

    def __init__(self, hosts: Hosts, host: HostName) -> None:
        self._hosts, self._host = hosts, host
        self._running: dict[WorldId, asyncio.Task[None]] = {}
        self._num_terms = 0

    def start_standby(self) -> None:
        """Start nothing; a term begins with this."""
        self._num_terms += 1
        assert self._num_terms <= MAX_TERMS, "elected again and again, each time without a result"

    def start(self, world: WorldId, num_processes: int, num_seats: int) -> None:
        if world not in self._running:
            asked = StartCoordinationService(world, num_processes, num_seats)
            self._running[world] = asyncio.create_task(self._hosts.serve(self._host, asked))


class Relay:
    """No progress is reported."""

    endpoint = "127.0.0.1:1"

    def lead(self, tree: Any, on_progress: Any) -> None:
        """Receive nothing."""

    def follow(self, leader: str, on_refused: Any) -> None:
        """Send nothing."""


class Candidate:
    """An agent that leads, or would."""

    def __init__(self, store: MemoryStore, clock: ManualClock, hosts: Hosts, index: int) -> None:
        host = make_host_name(index)
        self.log = EventLog(None, host)
        settings = AgentSettings(
            job=JOB,
            host=host,
            address="127.0.0.1",
            command=("stub",),
            environment={"JAX_PLATFORMS": "cpu"},
            devices_per_host=None,
            num_hosts=3,
            versions=VERSIONS,
            credentials=Credentials("token"),
            config=JobConfig(),
            run_directory=None,
        )
        self.context = AgentContext(
            settings=settings, store=store, clock=clock, log=self.log, print_line=lambda line: None
        )
        self._leader = Leader(
            self.context,
            MembershipConfig(num_hosts=3),
            cast(CoordinationServices, Services(hosts, host)),
            cast(ProgressRelay, Relay()),
            is_leaving=lambda: self.is_leaving,
            is_past=is_interrupted,
        )
        self.is_leaving = False

    def campaign(self, lease: LeaseId) -> "asyncio.Task[None]":
        return asyncio.create_task(self._leader.campaign(lease))

    def count(self, kind: EventKind) -> int:
        return sum(event.kind is kind for event in self.log.recent)


async def read_record(store: MemoryStore, key: str) -> KeyValue:
    found = await store.get(key)
    assert found is not None
    return found


async def depose(store: MemoryStore, lease: LeaseId) -> None:
    """Have another lease hold the leader's key; who led before is not told."""
    await store.transaction([], [DeleteOp(LEADER_KEY)])
    await store.transaction([], [PutOp(LEADER_KEY, b"\x80", lease)])


@pytest.mark.parametrize("is_deposed", [True, False])
def test_a_leader_that_was_deposed_without_notice_writes_nothing(is_deposed: bool) -> None:
    """Nothing but the leader's key has changed: no other record says that another leads."""

    async def main(clock: ManualClock) -> None:
        async with MemoryStore(clock) as store, asyncio.TaskGroup() as tasks:
            hosts = Hosts(store, 3)
            answering = tasks.create_task(hosts.run())
            old = Candidate(store, clock, hosts, 0)
            lease, other = await store.grant(LONG_S), await store.grant(LONG_S)
            leading = old.campaign(lease)
            await asyncio.sleep(SETTLED_S)
            before = await read_record(store, GENERATION_KEY)
            assert decode_record(before, Generation).phase is GenerationPhase.ACTIVE
            if is_deposed:
                await depose(store, other)
            await hosts.end(make_host_name(2))
            await asyncio.sleep(SETTLED_S)
            after = await read_record(store, GENERATION_KEY)
            assert (after == before) == is_deposed
            assert old.count(EventKind.LEADER_RESIGNED) == is_deposed
            leading.cancel()
            answering.cancel()

    run_in_virtual_time(main)


def test_the_next_leader_goes_on_from_what_is_stored_and_no_number_is_given_twice() -> None:
    async def main(clock: ManualClock) -> None:
        async with MemoryStore(clock) as store, asyncio.TaskGroup() as tasks:
            hosts = Hosts(store, 3)
            answering = tasks.create_task(hosts.run())
            old, new = Candidate(store, clock, hosts, 0), Candidate(store, clock, hosts, 1)
            lease, other = await store.grant(LONG_S), await store.grant(LONG_S)
            leading = [old.campaign(lease), new.campaign(other)]
            await asyncio.sleep(SETTLED_S)
            assert (old.count(EventKind.LEADER_ELECTED), new.count(EventKind.LEADER_ELECTED)) == (1, 0)
            before = decode_record(await read_record(store, GENERATION_KEY), Generation)
            leading[0].cancel()
            await store.revoke(lease)
            await hosts.end(make_host_name(0))
            await asyncio.sleep(SETTLED_S)
            after = decode_record(await read_record(store, GENERATION_KEY), Generation)
            assert new.count(EventKind.LEADER_ELECTED) == 1
            assert after.phase is GenerationPhase.ACTIVE
            assert after.number > before.number
            assert {member.host for member in after.membership.members} == {
                make_host_name(1),
                make_host_name(2),
            }
            leading[1].cancel()
            answering.cancel()

    run_in_virtual_time(main)


def test_a_quarantine_by_a_leader_that_was_deposed_is_not_written() -> None:
    async def main(clock: ManualClock) -> None:
        async with MemoryStore(clock) as store:
            old = Candidate(store, clock, Hosts(store, 0), 0)
            lease, other = await store.grant(LONG_S), await store.grant(LONG_S)
            put = PutOp(LEADER_KEY, b"\x80", lease)
            token = (await store.transaction([], [put])).revision
            for host, is_written in (("host-a", True), ("host-b", False)):
                await quarantine_host(old.context, HostName(host), "slow", leader_token=token)
                found = await read_quarantine(store, JOB)
                assert (host in {record.host for record in found}) == is_written
                await depose(store, other)

    run_in_virtual_time(main)


def test_a_leader_with_a_notice_resigns_to_a_host_that_stays_before_it_decides_anything() -> None:
    async def main(clock: ManualClock) -> None:
        async with MemoryStore(clock) as store, asyncio.TaskGroup() as tasks:
            hosts = Hosts(store, 3)
            answering = tasks.create_task(hosts.run())
            old, new = Candidate(store, clock, hosts, 0), Candidate(store, clock, hosts, 1)
            leading = [old.campaign(await store.grant(LONG_S)), new.campaign(await store.grant(LONG_S))]
            await asyncio.sleep(SETTLED_S)
            before = await read_record(store, GENERATION_KEY)
            old.is_leaving = True
            await hosts.notify(make_host_name(0))
            await asyncio.sleep(SETTLED_S)
            assert decode_record(await read_record(store, LEADER_KEY), LeaderRecord).host == make_host_name(1)
            assert (old.count(EventKind.LEADER_ELECTED), old.count(EventKind.LEADER_RESIGNED)) == (1, 1)
            after = await read_record(store, GENERATION_KEY)
            assert after.mod_revision > before.mod_revision
            decided = [event for event in old.log.recent if event.kind is EventKind.GENERATION_PHASE]
            assert all("notice" not in str(event.detail["reason"]) for event in decided)
            # Then that one must leave, too: one of both leads to the end.
            new.is_leaving = True
            await hosts.end(make_host_name(2))
            await hosts.notify(make_host_name(1))
            await asyncio.sleep(SETTLED_S)
            assert decode_record(await read_record(store, LEADER_KEY), LeaderRecord).host
            ended = decode_record(await read_record(store, GENERATION_KEY), Generation)
            assert ended.outcome is not None
            assert ended.outcome.kind is JobOutcomeKind.INTERRUPTED
            for task in (*leading, answering):
                task.cancel()

    run_in_virtual_time(main)


def test_a_leader_in_quarantine_resigns_and_leads_again_only_after_it_or_alone() -> None:
    async def main(clock: ManualClock) -> None:
        async with MemoryStore(clock) as store, asyncio.TaskGroup() as tasks:
            hosts = Hosts(store, 3)
            answering = tasks.create_task(hosts.run())
            old, new = Candidate(store, clock, hosts, 0), Candidate(store, clock, hosts, 1)
            lease, other = await store.grant(LONG_S), await store.grant(LONG_S)
            leading = [old.campaign(lease), new.campaign(other)]
            await asyncio.sleep(SETTLED_S)

            async def find_leader() -> HostName:
                return decode_record(await read_record(store, LEADER_KEY), LeaderRecord).host

            assert await find_leader() == make_host_name(0)
            await quarantine_host(old.context, make_host_name(0), "host-0 and host-1 cannot reach each other")
            await asyncio.sleep(SETTLED_S)
            assert await find_leader() == make_host_name(1)
            assert (old.count(EventKind.LEADER_ELECTED), old.count(EventKind.LEADER_RESIGNED)) == (1, 1)
            generation = decode_record(await read_record(store, GENERATION_KEY), Generation)
            assert {member.host for member in generation.membership.members} == {
                make_host_name(1),
                make_host_name(2),
            }
            # Nobody else is there: it leads, as a job without a leader would end.
            leading[1].cancel()
            for index in (1, 2):
                await hosts.end(make_host_name(index))
            await store.transaction([], [DeleteOp(LEADER_KEY)])
            await asyncio.sleep(SETTLED_S)
            assert await find_leader() == make_host_name(0)
            for task in (leading[0], answering):
                task.cancel()

    run_in_virtual_time(main)


def test_a_job_that_was_interrupted_begins_anew_with_the_hosts_that_start_after_it() -> None:
    async def main(clock: ManualClock) -> None:
        async with MemoryStore(clock) as store, asyncio.TaskGroup() as tasks:
            numbers: list[int] = []
            for _ in range(2):
                hosts = Hosts(store, 3)
                answering = tasks.create_task(hosts.run())
                lease = await store.grant(LONG_S)
                leading = Candidate(store, clock, hosts, 0).campaign(lease)
                await asyncio.sleep(SETTLED_S)
                active = decode_record(await read_record(store, GENERATION_KEY), Generation)
                assert (active.phase, len(active.membership.members)) == (GenerationPhase.ACTIVE, 3)
                for index in range(3):
                    await hosts.notify(make_host_name(index))
                await asyncio.sleep(SETTLED_S)
                ended = decode_record(await read_record(store, GENERATION_KEY), Generation)
                assert ended.outcome is not None
                assert ended.outcome.kind is JobOutcomeKind.INTERRUPTED
                numbers += [active.number, ended.number]
                answering.cancel()
                leading.cancel()
                await store.revoke(lease)
                for index in range(3):
                    await hosts.end(make_host_name(index))
            assert numbers == sorted(numbers)
            assert numbers[2] > numbers[1], "no number is given twice"

    run_in_virtual_time(main)
