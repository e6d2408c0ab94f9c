"""The store in another process, which is killed, stopped, and replaced."""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import time

import pytest

from resilient_jax.errors import PeerUnreachable, StoreReplaced, StoreUnreachable, Unauthenticated
from resilient_jax.ids import Revision
from resilient_jax.store.interface import PutEvent
from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.remote import RemoteStore
from resilient_jax.store.service import PROGRESS_INTERVAL_REVISIONS, serve_store
from resilient_jax.transport import Channel, Credentials, Server
from tests.support.paths import SCRIPTS
from tests.support.patience import NEVER_S, patience

CREDENTIALS = Credentials("test-token")
SCRIPT = SCRIPTS / "serve_store.py"
WAIT_S = patience(2)


@contextlib.contextmanager
def store_process(address="127.0.0.1:0", *journal):
    """Yield (process, address) of a store in its own process."""
    command = [sys.executable, str(SCRIPT), address, *map(str, journal)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def run(main):
    async def bounded():
        async with asyncio.timeout(patience(6)):
            await main()

    asyncio.run(bounded())


def test_the_error_names_an_unreachable_store_and_the_time_tried():
    async def main():
        told = []
        started_s = time.monotonic()
        with pytest.raises(StoreUnreachable) as missing:
            await RemoteStore.connect(
                "127.0.0.1:9",
                CREDENTIALS,
                0.5,
                lambda tried_s, error: told.append((tried_s, error.is_refused)),
            )
        assert time.monotonic() - started_s >= 0.5
        text = str(missing.value)
        assert re.match(r"no store answered at 127\.0\.0\.1:9 for \d+\.\d s ", text)
        assert (
            "(last: 127.0.0.1:9 refused the connection for /rj.store/status: no process listens there)"
            in text
        )
        assert "Check the address, that the process that serves the store runs there" in text
        assert len(told) >= 2
        assert told[0] < told[1]
        assert told[0][1]

    run(main)


def test_connect_waits_for_a_store_that_starts_later():
    async def main():
        with store_process() as (_, address):
            pass
        connecting = asyncio.create_task(RemoteStore.connect(address, CREDENTIALS, WAIT_S))
        await asyncio.sleep(0.3)
        assert not connecting.done()
        async with MemoryStore() as memory:
            server = Server(address, credentials=CREDENTIALS)
            serve_store(server, memory)
            async with server, await connecting as store:
                assert await store.put("a", b"") == 2

    run(main)


def test_a_wrong_token_is_refused_at_once():
    async def main():
        with store_process() as (_, address), pytest.raises(Unauthenticated):
            await RemoteStore.connect(address, Credentials("wrong"), NEVER_S)

    run(main)


def test_a_killed_store_fails_calls_at_once_and_watches_after_the_resume_timeout():
    async def main():
        with store_process() as (process, address):
            connecting = RemoteStore.connect(
                address, CREDENTIALS, WAIT_S, resume_timeout_s=0.5, call_timeout_s=NEVER_S
            )
            async with await connecting as store:
                revision = await store.put("a", b"")
                async with contextlib.aclosing(store.watch("", revision)) as batches:
                    await anext(batches)
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    killed_s = time.monotonic()
                    with pytest.raises(
                        PeerUnreachable, match=r"a watch of '' at .* broke at revision 3, and"
                    ) as lost:
                        await anext(batches)
                    assert time.monotonic() - killed_s > 0.4
                    assert lost.value.is_refused
                with pytest.raises(PeerUnreachable) as refused:
                    await store.get("a")
                assert refused.value.is_refused

    run(main)


def test_a_watch_resumes_without_gaps_or_duplicates_when_its_connection_breaks():
    async def main():
        async with MemoryStore() as memory:
            server = Server(credentials=CREDENTIALS)
            serve_store(server, memory)
            await server.start()
            async with await RemoteStore.connect(server.address, CREDENTIALS, WAIT_S) as store:
                revision = await store.put("a", b"0")
                seen = []
                async with contextlib.aclosing(store.watch("a", revision)) as batches:
                    seen += await anext(batches)
                    for round_ in range(3):
                        await server.stop()
                        for index in range(2):
                            await memory.put("a", f"{round_}{index}".encode())
                        server = Server(server.address, credentials=CREDENTIALS)
                        serve_store(server, memory)
                        await server.start()
                        while len(seen) < 3 + 2 * round_:
                            seen += await anext(batches)
            await server.stop()
        assert [event.mod_revision for event in seen] == list(range(revision, revision + 7))

    run(main)


def test_a_killed_store_with_a_journal_goes_on_and_nobody_notices_but_by_the_time(tmp_path):
    async def main():
        async def put_all(store):
            confirmed = 0
            while confirmed < 300:
                with contextlib.suppress(PeerUnreachable):
                    await store.put("a", str(confirmed).encode())
                    confirmed += 1

        with contextlib.ExitStack() as lives:
            process, address = lives.enter_context(store_process("127.0.0.1:0", tmp_path / "journal"))
            async with await RemoteStore.connect(
                address, CREDENTIALS, WAIT_S, resume_timeout_s=WAIT_S
            ) as store:
                lease = await store.grant(5.0)
                start = await store.put("held", b"", lease)
                async with contextlib.aclosing(store.watch("a", Revision(start + 1))) as batches:
                    writing = asyncio.ensure_future(put_all(store))
                    seen = await anext(batches)
                    for _ in range(3):
                        process.kill()
                        process.wait()
                        process, _ = lives.enter_context(store_process(address, tmp_path / "journal"))
                        seen += await anext(batches)
                    await writing
                    last, _ = await store.range("")
                    while seen[-1].mod_revision < last:
                        seen += await anext(batches)
                # A put that was not confirmed may have been made, and is then made twice.
                assert [event.mod_revision for event in seen] == list(range(start + 1, start + 1 + len(seen)))
                values = {int(event.key_value.value) for event in seen if isinstance(event, PutEvent)}
                assert values == set(range(300))
                assert await store.keep_alive(lease) == 5.0

    run(main)


def test_a_watch_detects_that_the_store_was_replaced():
    async def main():
        with store_process() as (_, address):
            store = await RemoteStore.connect(address, CREDENTIALS, WAIT_S, resume_timeout_s=WAIT_S)
            revision = await store.put("a", b"")
            batches = store.watch("", revision)
            await anext(batches)
        with store_process(address) as (_, again):
            assert again == address
            with pytest.raises(StoreReplaced, match="is gone with all its keys"):
                await anext(batches)
        await store.close()

    run(main)


def test_pings_detect_a_suspended_store_and_no_lease_expires():
    async def main():
        with store_process() as (process, address):
            connecting = RemoteStore.connect(
                address, CREDENTIALS, WAIT_S, resume_timeout_s=WAIT_S, call_timeout_s=NEVER_S
            )
            async with await connecting as store:
                lease = await store.grant(1.0)
                revision = await store.put("a", b"", lease)
                async with contextlib.aclosing(store.watch("a", revision)) as batches:
                    await anext(batches)
                    process.send_signal(signal.SIGSTOP)
                    with pytest.raises(PeerUnreachable):
                        await store.get("a")  # ended by a ping: it has no deadline
                    process.send_signal(signal.SIGCONT)
                    while True:
                        with contextlib.suppress(PeerUnreachable):
                            assert await store.keep_alive(lease) == 1.0
                            break
                    await store.put("a", b"2", lease)
                    (event,) = await anext(batches)
                    assert event.mod_revision == revision + 1

    run(main)


def test_a_watch_of_a_quiet_prefix_follows_the_revision_of_the_store():
    async def main():
        keep = PROGRESS_INTERVAL_REVISIONS + 100
        async with MemoryStore(keep_revisions=keep) as memory:
            server = Server(credentials=CREDENTIALS)
            serve_store(server, memory)
            await server.start()
            async with await RemoteStore.connect(server.address, CREDENTIALS, WAIT_S) as store:
                start, _ = await store.range("")
                async with contextlib.aclosing(store.watch("quiet", Revision(start + 1))) as batches:
                    waiting = asyncio.ensure_future(anext(batches))
                    for _ in range(3 * keep // 10):
                        for _ in range(10):
                            await memory.put("busy", b"")
                        await store.get("busy")  # a call takes as long as a report of the revision
                    await server.stop()
                    server = Server(server.address, credentials=CREDENTIALS)
                    serve_store(server, memory)
                    await server.start()
                    await memory.put("quiet", b"")
                    assert [event.key for event in await waiting] == ["quiet"]
            await server.stop()

    run(main)


def test_a_store_call_without_the_token_is_refused():
    async def main():
        with store_process() as (_, address):
            async with Channel(address, Credentials("wrong")) as channel:
                store = RemoteStore(address, Credentials("wrong"))
                with pytest.raises(Unauthenticated):
                    await store.range("")
                batches = store.watch("", Revision(2))
                with pytest.raises(Unauthenticated):
                    await anext(batches)
                await store.close()
                await channel.close()

    run(main)
