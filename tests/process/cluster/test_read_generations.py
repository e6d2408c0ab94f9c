"""A host reads every generation that a leader publishes, as changes where it can, and misses none for good."""

import asyncio
import contextlib
import itertools

import pytest

from resilient_jax.cluster.generation_follower import read_generations
from resilient_jax.cluster.stored_records import ENCODER
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, JobName, Seat
from resilient_jax.protocol.generation import Generation, GenerationPhase, Member, Membership
from resilient_jax.protocol.generation_change import describe_change
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.store_keys import make_change_key, make_generation_key
from resilient_jax.store.interface import KeyValue, PutOp
from resilient_jax.store.memory import MemoryStore
from tests.support.patience import patience

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
        number=GenerationNumber(number),
        phase=GenerationPhase.FORM,
        membership=Membership(members=members),
        reason=f"{number}",
    )


async def publish(store: MemoryStore, before: Generation | None, after: Generation) -> None:
    puts = [
        PutOp(make_generation_key(JOB), ENCODER.encode(after)),
        PutOp(make_change_key(JOB), ENCODER.encode(describe_change(before, after))),
    ]
    await store.transaction([], puts, [])


async def check_reading(num_hosts: int) -> None:
    first = make_generation(num_hosts, 1)
    second = change_fields(first, phase=GenerationPhase.ACTIVE)
    third = make_generation(num_hosts - 1, 2)
    async with CountingStore() as store, asyncio.timeout(patience(2)):
        await publish(store, None, first)
        async with contextlib.aclosing(read_generations(store, JOB)) as generations:
            assert await anext(generations) == first
            await publish(store, first, second)
            assert await anext(generations) == second
            await publish(store, second, third)
            assert await anext(generations) == third
            # A new leader has read the record, and describes its first change by it; one that could not sends all.
            await publish(store, None, second)
            assert await anext(generations) == second
            assert store.num_reads == 0


@pytest.mark.parametrize("num_hosts", [LARGE, 4])
def test_the_record_is_not_read_again(num_hosts: int) -> None:
    asyncio.run(check_reading(num_hosts))


def test_a_host_that_read_the_record_because_it_missed_changes_skips_those_that_are_in_it() -> None:
    async def run() -> None:
        first = make_generation(LARGE, 1)
        published = [first] + [make_generation(LARGE - number, number) for number in range(2, 6)]
        async with CountingStore() as store, asyncio.timeout(patience(2)):
            await publish(store, None, first)
            async with contextlib.aclosing(read_generations(store, JOB)) as generations:
                assert await anext(generations) == first
                await publish(
                    store, make_generation(LARGE + 1, 9), published[1]
                )  # a change of what it does not have
                for before, after in itertools.pairwise(published[1:]):
                    await publish(store, before, after)
                assert await anext(generations) == published[-1]
                last = make_generation(LARGE, 6)
                await publish(store, published[-1], last)
                assert await anext(generations) == last
            assert store.num_reads == 1

    asyncio.run(run())


def test_a_host_that_begins_before_the_first_generation_waits_for_it() -> None:
    async def run() -> None:
        store = MemoryStore()
        generations = read_generations(store, JOB)
        async with store, contextlib.aclosing(generations), asyncio.timeout(patience(2)):
            reading = asyncio.ensure_future(anext(generations))
            await asyncio.sleep(0)
            await publish(store, None, make_generation(LARGE, 1))
            assert await reading == make_generation(LARGE, 1)

    asyncio.run(run())
