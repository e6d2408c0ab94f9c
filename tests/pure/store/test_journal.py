"""A store goes on from its journal, wherever its process was killed."""

import asyncio
import os
import random
import resource

import pytest

from resilient_jax.errors import LogUnwritable, OperatorError, PeerUnreachable
from resilient_jax.ids import LeaseId, Revision
from resilient_jax.store import journal as journal_module
from resilient_jax.store.interface import DeleteOp, PutOp
from resilient_jax.store.journal import MAGIC
from resilient_jax.store.memory import MemoryStore
from tests.support.manual_clock import ManualClock


async def read_all(store):
    revision, found = await store.range("")
    return store.store_id, revision, found


async def change_at_random(store, number_of_changes, seed):
    """Yield what the store contains after each change that it has confirmed."""
    draw = random.Random(seed)
    leases = [LeaseId(0)]
    for number in range(number_of_changes):
        match draw.randrange(6):
            case 0:
                leases.append(await store.grant(60.0))
            case 1 if len(leases) > 1:
                await store.revoke(leases.pop(1))
            case 2:
                await store.transaction(
                    [], [PutOp("a/1", bytes([number % 256])), DeleteOp("b/", is_prefix=True)]
                )
            case _:
                await store.put(
                    f"{draw.choice('ab')}/{draw.randrange(9)}", b"x" * number, draw.choice(leases)
                )
        yield await read_all(store)


async def pass_time(clock, store, seconds):
    """Advance the clock in steps that the store's expiry task would observe, so that none looks like a suspension."""
    end_s = clock.monotonic_s() + seconds
    while clock.monotonic_s() < end_s:
        clock.advance(0.1)
        await store.get("held")
        store._planned_wake_s = clock.monotonic_s()


async def collect(changes):
    return [content async for content in changes]


@pytest.mark.parametrize("rewrite_bytes", [journal_module.MIN_REWRITE_BYTES, 2000])
@pytest.mark.parametrize("seed", range(3))
def test_a_store_goes_on_from_its_journal_as_it_was(seed, rewrite_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "MIN_REWRITE_BYTES", rewrite_bytes)
    monkeypatch.setattr(journal_module, "REWRITE_FACTOR", 2)

    async def main():
        content = None
        for life in range(4):
            async with MemoryStore.from_journal(tmp_path / "journal") as store:
                if content is not None:
                    assert await read_all(store) == content
                *_, content = await collect(change_at_random(store, 60, seed * 10 + life))
        assert (tmp_path / "journal").stat().st_size < 60_000 or rewrite_bytes > 2000

    asyncio.run(main())


def test_wherever_the_file_ends_what_was_confirmed_before_is_there(tmp_path):
    path = tmp_path / "journal"

    async def main():
        confirmed = []
        async with MemoryStore.from_journal(path) as store:
            confirmed.append((path.stat().st_size, await read_all(store)))
            assert path.stat().st_size > len(MAGIC), "written before anybody can ask for its id"
            async for content in change_at_random(store, 25, seed=7):
                confirmed.append((path.stat().st_size, content))
        whole = path.read_bytes()
        assert len(whole) == confirmed[-1][0]
        for end in range(len(whole) + 1):
            path.write_bytes(whole[:end])
            async with MemoryStore.from_journal(path) as store:
                found = await read_all(store)
                last = [content for size, content in confirmed if size <= end][-1:]
                # A frame that is complete but was not confirmed may be there, too.
                assert not last or found[1] >= last[0][1]
                assert not last or found[0] == last[0][0]
                if found[1] > 1:
                    assert found in [content for _, content in confirmed]

    asyncio.run(main())


def test_a_frame_whose_pages_were_not_written_is_dropped(tmp_path):
    path = tmp_path / "journal"

    async def main():
        async with MemoryStore.from_journal(path) as store:
            await store.put("a", b"1")
            before = await read_all(store)
            size = path.stat().st_size
            await store.put("a", b"2" * 2000)
        whole = bytearray(path.read_bytes())
        for lost in (slice(size, None), slice(len(whole) // 512 * 512, None), slice(1024, 1536)):
            torn = whole.copy()
            torn[lost] = bytes(len(torn[lost]))
            path.write_bytes(torn)
            async with MemoryStore.from_journal(path) as store:
                assert await read_all(store) == before
                await store.put("b", b"")
            async with MemoryStore.from_journal(path) as store:
                assert await store.get("b") is not None

    asyncio.run(main())


def test_a_bit_that_flips_anywhere_is_an_error_and_never_a_shorter_history(tmp_path):
    path = tmp_path / "journal"

    async def main():
        async with MemoryStore.from_journal(path) as store:
            for number in range(4):
                await store.put("a", bytes([number]))

    asyncio.run(main())
    whole = path.read_bytes()
    for position in range(8 * len(whole)):
        content = bytearray(whole)
        content[position // 8] ^= 1 << position % 8
        path.write_bytes(content)
        with pytest.raises(OperatorError, match=r"is damaged: found .* at byte \d+, expected a frame"):
            MemoryStore.from_journal(path)
        assert path.read_bytes() == content, "nothing was cut"


def test_a_header_that_was_not_written_is_torn_only_at_the_end(tmp_path):
    """It begins in the last bytes of a sector."""
    path = tmp_path / "journal"

    async def write(room):
        """Return where the second frame begins, and the last one's."""
        path.unlink(missing_ok=True)
        async with MemoryStore.from_journal(path) as store:
            await store.put("a", b"1" * room)
            first = path.stat().st_size
            await store.put("b", b"2" * 700)
            second = path.stat().st_size
            await store.put("c", b"3")
            return first, second

    first, _ = asyncio.run(write(300))
    first, second = asyncio.run(write(300 + (508 - first) % 512))
    assert first % 512 == 508
    whole = bytearray(path.read_bytes())
    whole[first + 4 : first + 4 + 512] = bytes(512)
    path.write_bytes(whole)
    with pytest.raises(OperatorError, match=f"a wrong checksum of a length at byte {first},"):
        MemoryStore.from_journal(path)
    path.write_bytes(whole[:second])

    async def read():
        async with MemoryStore.from_journal(path) as store:
            return await store.get("a") is not None, await store.get("b")

    assert asyncio.run(read()) == (True, None)


def test_one_process_at_a_time_has_a_journal(tmp_path):
    """The second one changes nothing, whatever it finds; the file may be replaced meanwhile."""
    path = tmp_path / "journal"

    async def main():
        async with MemoryStore.from_journal(path) as store:
            with pytest.raises(OperatorError, match=r"belongs to another process .* without --serve-store"):
                MemoryStore.from_journal(path)
            await store.put("a", b"1")
            assert store._journal is not None
            store._journal.begin(store._make_image())
            with pytest.raises(OperatorError, match="belongs to another process"):
                MemoryStore.from_journal(path)
            await store.put("a", b"2")
            content = await read_all(store)
        async with MemoryStore.from_journal(path) as store:
            assert await read_all(store) == content

    asyncio.run(main())


def test_damage_and_other_files_are_refused_with_the_place(tmp_path):
    path = tmp_path / "journal"

    async def main():
        async with MemoryStore.from_journal(path) as store:
            for number in range(5):
                await store.put("a", bytes([number]))

    asyncio.run(main())
    content = bytearray(path.read_bytes())
    content[len(MAGIC) + 20] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        OperatorError, match=rf"journal of the store is damaged: found a wrong checksum at byte {len(MAGIC)},"
    ):
        MemoryStore.from_journal(path)
    path.write_bytes(b"something else")
    with pytest.raises(OperatorError, match="another beginning than that of a journal at byte 0"):
        MemoryStore.from_journal(path)
    with pytest.raises(LogUnwritable, match="cannot be opened: Is a directory"):
        MemoryStore.from_journal(tmp_path)


def test_what_the_disk_does_not_take_is_told_to_nobody_and_written_later(tmp_path):
    path = tmp_path / "journal"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def main():
        told = []
        async with MemoryStore.from_journal(path, on_trouble=told.append) as store:
            revision = await store.put("a", b"1")
            watch = store.watch("", Revision(revision + 1))
            seen = asyncio.ensure_future(anext(watch))
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
            try:
                with pytest.raises(
                    PeerUnreachable, match=r"cannot write its journal .*: File too large; free space"
                ):
                    await store.put("a", b"2")
                with pytest.raises(PeerUnreachable):
                    await store.put("a", b"2")
                assert store.revision == revision
                assert told == ["File too large"], "once"
                assert not seen.done()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            await store.put("b", b"3")
            assert told == ["File too large", ""]
            assert [event.mod_revision for event in await seen] == [revision + 1, revision + 2, revision + 3]
            await watch.aclose()
            content = await read_all(store)
        async with MemoryStore.from_journal(path) as store:
            assert await read_all(store) == content

    asyncio.run(main())


def test_leases_have_all_of_their_time_again_and_then_end(tmp_path):
    async def main():
        clock = ManualClock()
        async with MemoryStore.from_journal(tmp_path / "journal", clock) as store:
            lease = await store.grant(3.0)
            await store.put("held", b"", lease)
            await pass_time(clock, store, 2.9)
        clock.advance(60.0)
        async with MemoryStore.from_journal(tmp_path / "journal", clock) as store:
            await pass_time(clock, store, 2.9)
            assert await store.get("held") is not None
            assert await store.keep_alive(lease) == 3.0
            await pass_time(clock, store, 3.1)
            assert await store.get("held") is None
            last = await store.range("")
        async with MemoryStore.from_journal(tmp_path / "journal", clock) as store:
            assert await store.range("") == last

    asyncio.run(main())


def test_a_caller_that_is_cancelled_leaves_no_half_written_frame(tmp_path):
    path = tmp_path / "journal"

    async def main():
        async with MemoryStore.from_journal(path) as store:
            for number in range(50):
                call = asyncio.ensure_future(store.put(f"{number}", os.urandom(1000)))
                await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait([call])
            await store.put("last", b"")
            content = await read_all(store)
        async with MemoryStore.from_journal(path) as store:
            assert await read_all(store) == content

    asyncio.run(main())
