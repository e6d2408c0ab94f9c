"""The contract of a `Store`, as functions: every implementation passes all of CHECKS.

Each check gets a factory and opens a store of its own, with no other client. Lease times are real and short, and
every wait has a timeout: a check that hangs fails.

Example:
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_memory_store_keeps_the_contract(check):
        asyncio.run(check(open_memory_store))
"""

# The name of a check is its sentence.

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, cast

from resilient_jax.errors import CallerError, CompactedRevision, LeaseExpired, PeerUnreachable
from resilient_jax.ids import LeaseId, Revision
from resilient_jax.store.interface import (
    Compare,
    CompareOperator,
    CompareTarget,
    DeleteEvent,
    DeleteOp,
    DeleteResponse,
    PutEvent,
    PutOp,
    PutResponse,
    RangeOp,
    RangeResponse,
    Store,
    WatchEvent,
    require_absent,
    require_unchanged,
)

WAIT_S = 10.0
"""The timeout of each wait: far above what a store needs, even on a busy machine."""
SHORT_TTL_S = 0.3
"""The time to live of a lease that is to expire during a check."""
LONG_TTL_S = 60.0
"""The time to live of a lease that outlasts a check."""


class OpenStore(Protocol):
    """Opens an empty store that keeps at least the last `keep_revisions` revisions, and at most twice as many."""

    def __call__(self, *, keep_revisions: int = 10_000) -> AbstractAsyncContextManager[Store]: ...


StoreCheck = Callable[[OpenStore], Awaitable[None]]


async def check_a_put_is_read_back_with_its_revisions(open_store: OpenStore) -> None:
    async with open_store() as store:
        first = await store.put("a", b"1")
        second = await store.put("a", b"2")
        found = await store.get("a")
        assert second == first + 1
        assert found is not None
        assert (found.key, found.value) == ("a", b"2")
        assert (found.create_revision, found.mod_revision, found.version) == (first, second, 2)


async def check_an_absent_key_reads_as_none(open_store: OpenStore) -> None:
    async with open_store() as store:
        assert await store.get("a") is None
        assert not await store.delete("a")


async def check_a_deleted_key_is_born_anew(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.put("a", b"1")
        assert await store.delete("a")
        born = await store.put("a", b"2")
        found = await store.get("a")
        assert found is not None
        assert (found.create_revision, found.version) == (born, 1)


async def check_range_is_sorted_and_of_the_prefix_only(open_store: OpenStore) -> None:
    async with open_store() as store:
        for key in ("b/2", "a", "b/10", "b", "c", "b/1", "B/1"):
            last = await store.put(key, key.encode())
        revision, found = await store.range("b/")
        assert [entry.key for entry in found] == ["b/1", "b/10", "b/2"]
        assert revision == last
        _, everything = await store.range("")
        assert [entry.key for entry in everything] == ["B/1", "a", "b", "b/1", "b/10", "b/2", "c"]


async def check_delete_prefix_is_one_revision(open_store: OpenStore) -> None:
    async with open_store() as store:
        for key in ("a/1", "a/2", "b"):
            before = await store.put(key, b"")
        assert await store.delete_prefix("a/") == 2
        assert await store.delete_prefix("a/") == 0
        revision, found = await store.range("")
        assert revision == before + 1
        assert [entry.key for entry in found] == ["b"]


async def check_keys_are_unicode_values_may_be_empty_or_large(open_store: OpenStore) -> None:
    values = {"ключ/ö/日本/🙂": b"", "a b\n\x00c": bytes(range(256)), "large": b"\xff" * (1024 * 1024 - 100)}
    async with open_store() as store:
        start, _ = await store.range("")
        for key, value in values.items():
            await store.put(key, value)
        for key, value in values.items():
            found = await store.get(key)
            assert found is not None
            assert found.value == value
        _, in_order = await store.range("")
        assert [entry.key for entry in in_order] == sorted(values, key=str.encode)
        async with contextlib.aclosing(store.watch("large", Revision(start + 1))) as batches:
            assert (await _events(batches, 1))[0].key == "large"


async def check_bad_arguments_are_refused_and_change_nothing(open_store: OpenStore) -> None:
    async with open_store() as store:
        before, _ = await store.range("")
        bad_calls = [
            store.put("", b"x"),
            store.get(""),
            store.put("k" * 5000, b"x"),
            store.put("large", b"x" * (5 * 1024 * 1024)),
            store.grant(0.0),
            store.grant(-1.0),
            store.grant(float("inf")),
            store.grant(float("nan")),
            store.transaction([], [PutOp("a", b"1"), PutOp("a", b"2")]),
            store.transaction([], [PutOp("a", b"1"), DeleteOp("", is_prefix=True)]),
            store.transaction([], [], [PutOp("a", b"1"), DeleteOp("a")]),
            store.transaction([], [PutOp(str(n), b"") for n in range(2000)]),
        ]
        for call in bad_calls:
            await _expect(CallerError, call)
        assert await store.range("") == (before, [])


async def check_compare_operators(open_store: OpenStore) -> None:
    async with open_store() as store:
        created = await store.put("a", b"m")
        changed = await store.put("a", b"m")
        middles: dict[CompareTarget, tuple[bytes | int, bytes | int, bytes | int]] = {
            CompareTarget.VALUE: (b"l", b"m", b"ma"),
            CompareTarget.VERSION: (1, 2, 3),
            CompareTarget.CREATE_REVISION: (created - 1, created, created + 1),
            CompareTarget.MOD_REVISION: (changed - 1, changed, changed + 1),
        }
        expected = {
            CompareOperator.EQUAL: (False, True, False),
            CompareOperator.NOT_EQUAL: (True, False, True),
            CompareOperator.GREATER: (True, False, False),
            CompareOperator.LESS: (False, False, True),
        }
        for target, operands in middles.items():
            for operator, outcomes in expected.items():
                for operand, outcome in zip(operands, outcomes, strict=True):
                    result = await store.transaction([Compare("a", target, operator, operand)], [])
                    assert result.succeeded is outcome, (target, operator, operand)


async def check_an_absent_key_compares_as_zero_and_its_value_never(open_store: OpenStore) -> None:
    async with open_store() as store:
        for target in (CompareTarget.VERSION, CompareTarget.CREATE_REVISION, CompareTarget.MOD_REVISION):
            assert (await store.transaction([Compare("a", target, CompareOperator.EQUAL, 0)], [])).succeeded
            assert not (
                await store.transaction([Compare("a", target, CompareOperator.GREATER, 0)], [])
            ).succeeded
        for operator in CompareOperator:
            result = await store.transaction([Compare("a", CompareTarget.VALUE, operator, b"")], [])
            assert not result.succeeded, operator


async def check_a_transaction_is_one_revision(open_store: OpenStore) -> None:
    async with open_store() as store:
        before = await store.put("old", b"0")
        result = await store.transaction(
            [require_absent("new")],
            [PutOp("new", b"1"), DeleteOp("old"), PutOp("more", b"2"), RangeOp("", is_prefix=True)],
        )
        assert result.succeeded
        assert result.revision == before + 1
        put, deleted, _, seen = result.responses
        assert isinstance(put, PutResponse)
        assert put.key_value.mod_revision == result.revision
        assert deleted == DeleteResponse(deleted=1)
        assert isinstance(seen, RangeResponse)
        assert [entry.key for entry in seen.key_values] == ["more", "new"]
        async with contextlib.aclosing(store.watch("", result.revision)) as batches:
            first = await _next(batches)
        assert {event.mod_revision for event in first} == {result.revision}
        assert [event.key for event in first] == ["new", "old", "more"]


async def check_a_failed_compare_runs_the_other_branch_only(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.put("a", b"1")
        result = await store.transaction(
            [require_absent("b"), require_absent("a")], [PutOp("won", b"")], [PutOp("lost", b"")]
        )
        assert not result.succeeded
        assert await store.get("won") is None
        assert await store.get("lost") is not None


async def check_a_transaction_that_changes_nothing_has_no_revision(open_store: OpenStore) -> None:
    async with open_store() as store:
        before = await store.put("a", b"1")
        result = await store.transaction([], [RangeOp("a"), DeleteOp("absent")])
        assert result.revision == before
        assert result.responses[1] == DeleteResponse(deleted=0)


async def check_a_transaction_with_a_dead_lease_does_nothing(open_store: OpenStore) -> None:
    async with open_store() as store:
        lease = await store.grant(LONG_TTL_S)
        await store.revoke(lease)
        before = await store.put("a", b"1")
        operations = [PutOp("a", b"2"), PutOp("b", b"2", lease)]
        await _expect(LeaseExpired, store.transaction([], operations))
        revision, found = await store.range("")
        assert (revision, [entry.value for entry in found]) == (before, [b"1"])


async def check_of_concurrent_transactions_one_wins(open_store: OpenStore) -> None:
    async with open_store() as store:
        names = [f"host-{index}" for index in range(20)]
        results = await asyncio.gather(
            *(store.transaction([require_absent("leader")], [PutOp("leader", n.encode())]) for n in names)
        )
        winners = [name for name, result in zip(names, results, strict=True) if result.succeeded]
        leader = await store.get("leader")
        assert leader is not None
        assert [leader.value.decode()] == winners


async def check_no_concurrent_increment_is_lost(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.put("count", b"0")

        async def increment() -> None:
            while True:
                found = await store.get("count")
                assert found is not None
                more = str(int(found.value) + 1).encode()
                if (await store.transaction([require_unchanged(found)], [PutOp("count", more)])).succeeded:
                    return

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(increment() for _ in range(12)))
        final = await store.get("count")
        assert final is not None
        assert final.value == b"12"


async def check_an_expired_lease_deletes_its_keys_in_one_revision(open_store: OpenStore) -> None:
    async with open_store() as store:
        lease = await store.grant(SHORT_TTL_S)
        await store.put("other", b"")
        await store.put("held/b", b"", lease)
        last = await store.put("held/a", b"", lease)
        async with contextlib.aclosing(store.watch("held/", Revision(last + 1))) as batches:
            deleted = await _next(batches)
        assert deleted == [
            DeleteEvent(key=key, mod_revision=Revision(last + 1)) for key in ("held/a", "held/b")
        ]
        _, found = await store.range("")
        assert [entry.key for entry in found] == ["other"]
        await _expect(LeaseExpired, store.keep_alive(lease))
        await _expect(LeaseExpired, store.put("late", b"", lease))
        await _expect(LeaseExpired, store.revoke(lease))


async def check_keep_alive_keeps_a_lease_alive(open_store: OpenStore) -> None:
    ttl_s = 1.0
    async with open_store() as store:
        kept, dying = await store.grant(ttl_s), await store.grant(ttl_s)
        await store.put("kept", b"", kept)
        last = await store.put("dying", b"", dying)
        async with contextlib.aclosing(store.watch("dying", Revision(last + 1))) as batches:
            death = asyncio.ensure_future(_next(batches))
            while not death.done():  # the expiring lease is the clock: the renewed one must outlive it
                assert await store.keep_alive(kept) >= ttl_s
                await asyncio.wait([death], timeout=ttl_s / 10)
            await death
        assert await store.get("kept") is not None


async def check_a_key_belongs_to_the_last_lease_that_wrote_it(open_store: OpenStore) -> None:
    async with open_store() as store:
        first, second = await store.grant(LONG_TTL_S), await store.grant(LONG_TTL_S)
        for key in ("moved", "freed", "deleted"):
            await store.put(key, b"1", first)
        await store.put("moved", b"2", second)
        await store.put("freed", b"2")
        await store.delete("deleted")
        await store.put("deleted", b"2")
        await store.revoke(first)
        _, found = await store.range("")
        assert [(entry.key, entry.lease) for entry in found] == [
            ("deleted", 0),
            ("freed", 0),
            ("moved", second),
        ]
        await store.revoke(second)
        assert await store.get("moved") is None


async def check_an_unknown_lease_is_refused(open_store: OpenStore) -> None:
    async with open_store() as store:
        await _expect(LeaseExpired, store.put("a", b"", LeaseId(123456789)))
        await _expect(LeaseExpired, store.keep_alive(LeaseId(123456789)))
        await _expect(LeaseExpired, store.revoke(LeaseId(123456789)))


async def check_a_watch_replays_and_goes_on_without_gap_or_double(open_store: OpenStore) -> None:
    async with open_store() as store:
        start = await store.put("w/0", b"0")
        await store.put("elsewhere", b"")
        await store.put("w/1", b"1")

        async def write_more() -> None:
            for index in range(2, 60):
                await store.put(f"w/{index}", str(index).encode())
                await store.put("elsewhere", b"")

        watch = store.watch("w/", start)
        async with contextlib.aclosing(watch) as batches, asyncio.TaskGroup() as tasks:
            tasks.create_task(write_more())
            events = await _events(batches, 60)
        values = [int(event.key_value.value) for event in events if isinstance(event, PutEvent)]
        assert values == list(range(60))


async def check_a_watch_from_the_future_waits_for_it(open_store: OpenStore) -> None:
    async with open_store() as store:
        now = await store.put("a", b"now")
        async with contextlib.aclosing(store.watch("a", Revision(now + 3))) as batches:
            coming = asyncio.ensure_future(_events(batches, 1))
            revisions = [await store.put("a", value) for value in (b"1", b"2", b"3", b"4")]
            (event,) = (await coming)[:1]
        assert event.mod_revision == min(revision for revision in revisions if revision >= now + 3)


async def check_two_watchers_see_the_same(open_store: OpenStore) -> None:
    async with open_store() as store:
        start, _ = await store.range("")
        watches = [store.watch("", Revision(start + 1)) for _ in range(2)]
        async with contextlib.aclosing(watches[0]) as one, contextlib.aclosing(watches[1]) as two:
            tasks = [asyncio.ensure_future(_events(batches, 11)) for batches in (one, two)]
            for index in range(10):
                await store.put(f"{index}", b"")
            await store.delete("3")
            first, second = await asyncio.gather(*tasks)
        assert first == second
        assert first[-1] == DeleteEvent(key="3", mod_revision=Revision(start + 11))


async def check_a_forgotten_revision_is_refused_not_skipped(open_store: OpenStore) -> None:
    async with open_store(keep_revisions=10) as store:
        revisions = [await store.put("a", b"") for _ in range(41)]
        async with contextlib.aclosing(store.watch("a", revisions[0])) as batches:
            await _expect(CompactedRevision, _next(batches))
        kept = [revision for revision in revisions if revision > revisions[-1] - 10]
        async with contextlib.aclosing(store.watch("a", kept[0])) as batches:
            events = await _events(batches, len(kept))
        assert [event.mod_revision for event in events] == kept


async def check_a_closed_store_ends_its_watches_with_an_error(open_store: OpenStore) -> None:
    async with open_store() as store:
        revision = await store.put("a", b"")
        async with contextlib.aclosing(store.watch("", revision)) as batches:
            await _next(batches)
            waiting = asyncio.ensure_future(_next(batches))
            await asyncio.sleep(0)
            await store.close()
            await _expect(PeerUnreachable, waiting)
        await _expect(PeerUnreachable, store.get("a"))
        await store.close()


CHECKS: tuple[StoreCheck, ...] = tuple(
    cast(StoreCheck, value) for name, value in list(globals().items()) if name.startswith("check_")
)
"""One check for each guarantee of the interface."""


async def _next(batches: AsyncGenerator[list[WatchEvent], None]) -> list[WatchEvent]:
    async with asyncio.timeout(WAIT_S):
        return await anext(batches)


async def _events(batches: AsyncGenerator[list[WatchEvent], None], count: int) -> list[WatchEvent]:
    """Return at least `count` events; check that revisions grow and are never split."""
    events: list[WatchEvent] = []
    while len(events) < count:
        batch = await _next(batches)
        assert batch, "a batch is never empty"
        revisions = [event.mod_revision for event in [*events[-1:], *batch]]
        assert revisions == sorted(revisions), revisions
        assert not events or batch[0].mod_revision > events[-1].mod_revision, "a revision was split"
        events += batch
    return events


async def _expect(error_class: type[BaseException], call: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(WAIT_S):
            result = await call
    except error_class:
        return
    raise AssertionError(f"expected {error_class.__name__}, got the result {result!r}")
