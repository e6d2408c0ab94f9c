"""A host reads every generation that a leader publishes, as changes where it can, and misses none for good."""

import asyncio
import contextlib

import msgspec

from resilient_jax.cluster.generation_reader import read_generations
from resilient_jax.cluster.stored_records import ENCODER
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, JobName, Seat
from resilient_jax.protocol.generation_change import describe_change
from resilient_jax.protocol.records import Generation, GenerationPhase, Member
from resilient_jax.protocol.store_keys import make_change_key, make_generation_key
from resilient_jax.store.interface import KeyValue, PutOp
from resilient_jax.store.memory import MemoryStore

JOB = JobName("job")
LARGE = 600
"""Hosts whose generation is not its own change."""


class CountingStore(MemoryStore):
    """A store that counts how often the record is read."""

    num_reads = 0

    async def get(self, key: str) -> KeyValue | None:
        self.num_reads += key == make_generation_key(JOB)
        return await super().get(key)


def make_generation(num_hosts: int, number: int) -> Generation:
    members = tuple(
        Member(host=HostName(f"host-{index}"), incarnation=Incarnation(1), seat=Seat(index))
        for index in range(num_hosts)
    )
    return Generation(
        number=GenerationNumber(number), phase=GenerationPhase.FORM, members=members, reason=f"{number}"
    )


async def publish(store: MemoryStore, before: Generation | None, after: Generation) -> None:
    puts = [
        PutOp(make_generation_key(JOB), ENCODER.encode(after)),
        PutOp(make_change_key(JOB), ENCODER.encode(describe_change(before, after))),
    ]
    await store.transaction([], puts, [])


async def check_reading(num_hosts: int, expected_reads: int) -> None:
    first = make_generation(num_hosts, 1)
    second = msgspec.structs.replace(first, phase=GenerationPhase.ACTIVE)
    third = make_generation(num_hosts - 1, 2)
    async with CountingStore() as store, asyncio.timeout(20):
        await publish(store, None, first)
        async with contextlib.aclosing(read_generations(store, JOB)) as generations:
            assert await anext(generations) == first
            await publish(store, first, second)
            assert await anext(generations) == second
            await publish(store, second, third)
            assert await anext(generations) == third
            # A new leader has read the record, and describes its first change by it; one that could not says so.
            await publish(store, None, second)
            assert await anext(generations) == second
            assert store.num_reads == expected_reads


def test_a_large_generation_is_read_as_changes_unless_there_is_none() -> None:
    asyncio.run(check_reading(LARGE, expected_reads=1))


def test_a_small_generation_is_never_read_again() -> None:
    asyncio.run(check_reading(4, expected_reads=0))


def test_a_host_that_begins_before_the_first_generation_waits_for_it() -> None:
    async def run() -> None:
        store = MemoryStore()
        generations = read_generations(store, JOB)
        async with store, contextlib.aclosing(generations), asyncio.timeout(20):
            reading = asyncio.ensure_future(anext(generations))
            await asyncio.sleep(0)
            await publish(store, None, make_generation(LARGE, 1))
            assert await reading == make_generation(LARGE, 1)

    asyncio.run(run())
