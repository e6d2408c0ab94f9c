"""The shell around the store's core: suspension, slow readers, closing. Time is turned by hand."""

import asyncio
import contextlib

import pytest

from resilient_jax.clock import ManualClock
from resilient_jax.errors import CompactedRevision, LeaseExpired, PeerUnreachable
from resilient_jax.store.memory import EXPIRY_CHECK_INTERVAL_S, SUSPENSION_THRESHOLD_S, MemoryStore


async def pass_time(clock, store, seconds):
    """Time passes while the store is awake: in steps that it sees one by one."""
    for _ in range(round(seconds / EXPIRY_CHECK_INTERVAL_S)):
        clock.advance(EXPIRY_CHECK_INTERVAL_S)
        await asyncio.sleep(0)
        store._planned_wake_s = clock.monotonic_s()  # what its ticking task would plan, without the wait


def test_a_lease_expires_when_time_passes():
    async def main():
        clock = ManualClock()
        async with MemoryStore(clock) as store:
            lease = await store.grant(1.0)
            await store.put("a", b"", lease)
            await pass_time(clock, store, 0.9)
            assert await store.get("a") is not None
            await pass_time(clock, store, 0.2)
            assert await store.get("a") is None

    asyncio.run(main())


def test_a_store_that_was_suspended_lets_no_lease_die_for_it():
    async def main():
        clock = ManualClock()
        async with MemoryStore(clock) as store:
            lease = await store.grant(1.0)
            await store.put("a", b"", lease)
            clock.advance(3600.0)
            assert await store.get("a") is not None
            assert await store.keep_alive(lease) == 1.0

    asyncio.run(main())


def test_a_suspension_is_paid_for_once():
    async def main():
        clock = ManualClock()
        async with MemoryStore(clock) as store:
            lease = await store.grant(1.0)
            clock.advance(3600.0)
            await store.get("a")
            await store.get("a")
            await pass_time(clock, store, 1.2)
            with pytest.raises(LeaseExpired):
                await store.keep_alive(lease)

    asyncio.run(main())


def test_a_lag_below_the_threshold_is_no_suspension():
    async def main():
        clock = ManualClock()
        async with MemoryStore(clock) as store:
            lease = await store.grant(0.25)
            clock.advance(EXPIRY_CHECK_INTERVAL_S + SUSPENSION_THRESHOLD_S * 0.9)
            with pytest.raises(LeaseExpired):
                await store.keep_alive(lease)

    asyncio.run(main())


def test_a_sleeping_loop_expires_leases_without_a_request():
    async def main():
        async with MemoryStore() as store:
            revision = await store.put("a", b"", await store.grant(0.05))
            async with contextlib.aclosing(store.watch("a", revision)) as batches, asyncio.timeout(5):
                assert len(await anext(batches)) == 1
                assert (await anext(batches))[0].mod_revision == revision + 1

    asyncio.run(main())


def test_a_watcher_that_reads_too_slowly_is_told():
    async def main():
        async with MemoryStore(keep_revisions=10) as store:
            start = await store.put("a", b"")
            async with contextlib.aclosing(store.watch("", start)) as batches:
                await anext(batches)
                for _ in range(11):
                    await store.put("a", b"")
                with pytest.raises(
                    CompactedRevision, match=r"revision 3 is compacted: the history begins with 4"
                ):
                    await anext(batches)

    asyncio.run(main())


def test_a_closed_store_answers_nothing():
    async def main():
        store = MemoryStore()
        await store.close()
        await store.close()
        with pytest.raises(PeerUnreachable, match="the store is closed"):
            await store.put("a", b"")

    asyncio.run(main())


def test_two_stores_have_different_names_and_leases():
    async def main():
        one, two = MemoryStore(), MemoryStore()
        assert one.store_id != two.store_id
        assert await one.grant(1.0) != await two.grant(1.0)
        await one.close()
        await two.close()

    asyncio.run(main())
