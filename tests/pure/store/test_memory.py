"""`MemoryStore`, the asyncio shell of the store's core: suspension, slow readers, closing; in virtual time."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from resilient_jax.errors import CompactedRevision, LeaseExpired, PeerUnreachable
from resilient_jax.ids import LeaseId
from resilient_jax.store.memory import EXPIRY_CHECK_INTERVAL_S, SUSPENSION_THRESHOLD_S, MemoryStore
from tests.support.manual_clock import ManualClock
from tests.support.virtual_time import run_in_virtual_time


def run(main: Callable[[ManualClock, MemoryStore], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a store in virtual time. To advance the clock by hand suspends the store."""

    async def with_store(clock: ManualClock) -> None:
        async with MemoryStore(clock) as store:
            await main(clock, store)

    run_in_virtual_time(with_store)


def test_a_lease_expires_when_time_passes():
    async def main(clock, store):
        lease = await store.grant(1.0)
        await store.put("a", b"", lease)
        await asyncio.sleep(0.9)
        assert await store.get("a") is not None
        await asyncio.sleep(0.2)
        assert await store.get("a") is None

    run(main)


def test_a_renewed_lease_lasts_from_the_renewal_on():
    async def main(clock, store):
        lease = await store.grant(1.0)
        await store.put("a", b"", lease)
        await asyncio.sleep(0.9)
        await store.keep_alive(lease)
        await asyncio.sleep(0.9)
        assert await store.get("a") is not None
        await asyncio.sleep(0.2)
        assert await store.get("a") is None

    run(main)


def test_no_lease_expires_while_the_store_is_suspended():
    async def main(clock, store):
        lease = await store.grant(1.0)
        await store.put("a", b"", lease)
        clock.advance(3600.0)
        assert await store.get("a") is not None
        assert await store.keep_alive(lease) == 1.0

    run(main)


def test_a_suspension_extends_leases_only_once():
    async def main(clock, store):
        lease = await store.grant(1.0)
        clock.advance(3600.0)
        await store.get("a")
        await store.get("a")
        await asyncio.sleep(1.2)
        with pytest.raises(LeaseExpired):
            await store.keep_alive(lease)

    run(main)


def test_a_lag_below_the_threshold_is_no_suspension():
    async def main(clock, store):
        lease = await store.grant(0.25)
        clock.advance(EXPIRY_CHECK_INTERVAL_S + SUSPENSION_THRESHOLD_S * 0.9)
        with pytest.raises(LeaseExpired):
            await store.keep_alive(lease)

    run(main)


def test_a_renewal_that_comes_before_the_store_judges_counts():
    """Its time to live is over, but the store has told nobody, and could not have heard of it before."""

    async def main(clock, store):
        lease = await store.grant(0.25)
        await store.put("a", b"", lease)
        clock.advance(0.3)
        assert store.renew(lease) == 0.25
        assert await store.get("a") is not None

    run(main)


def test_no_lease_is_renewed_while_the_store_judges_which_have_expired():
    """Or one would be told that its lease goes on, which the store has found to be over."""

    async def main(clock, store):
        lease = await store.grant(0.25)
        expire, answers = store._machine.expire, []
        renewing = threading.Thread(target=lambda: answers.append(try_renew(store, lease)))

        def judge(now_s):
            renewing.start()
            renewing.join(0.05)
            return expire(now_s)

        store._machine.expire = judge
        clock.advance(0.29)
        with pytest.raises(LeaseExpired):
            await store.keep_alive(lease)
        renewing.join()
        assert answers == [None]

    run(main)


def try_renew(store, lease):
    """Return the time to live of a lease after its renewal; None: it has ended."""
    try:
        return store.renew(lease)
    except LeaseExpired:
        return None


def test_leases_expire_without_a_request():
    async def main(clock, store):
        revision = await store.put("a", b"", await store.grant(0.05))
        async with contextlib.aclosing(store.watch("a", revision)) as batches:
            assert len(await anext(batches)) == 1
            assert (await anext(batches))[0].mod_revision == revision + 1
        assert clock.monotonic_s() < 0.05 + 2 * EXPIRY_CHECK_INTERVAL_S

    run(main)


def test_a_watcher_that_reads_too_slowly_gets_an_error():
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


def test_a_closed_store_refuses_calls():
    async def main():
        store = MemoryStore()
        await store.close()
        await store.close()
        with pytest.raises(PeerUnreachable, match="the store is closed"):
            await store.put("a", b"")
        with pytest.raises(PeerUnreachable, match="the store is closed"):
            store.renew(LeaseId(1))

    asyncio.run(main())


def test_two_stores_have_different_ids_and_leases():
    async def main():
        one, two = MemoryStore(), MemoryStore()
        assert one.store_id != two.store_id
        assert await one.grant(1.0) != await two.grant(1.0)
        await one.close()
        await two.close()

    asyncio.run(main())
