"""A host's registration, over every store; what it does with time is in tests/pure/store/test_session.py."""

import asyncio
import contextlib

import pytest

from resilient_jax.clock import SystemClock
from resilient_jax.cluster.store_session import SessionLost, StoreSession
from resilient_jax.errors import JoinRefused
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.host_status import AgentStatus, HostStatus
from resilient_jax.protocol.store_keys import make_host_key
from resilient_jax.protocol.versions import Versions
from resilient_jax.protocol.worker_report import TrainingProgress
from resilient_jax.store.lease_renewals import RenewalServer
from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.remote import RemoteStore
from resilient_jax.store.service import serve_store
from resilient_jax.transport import Credentials, Server
from tests.support.patience import patience

JOB = JobName("job")
CREDENTIALS = Credentials("test-token")
TTL_S = 1.5
"""Long enough for a busy machine to renew a lease in time."""
VERSIONS = Versions(python="3", resilient_jax="1.0", jax="0.10.0", jaxlib="0.10.0")


@contextlib.asynccontextmanager
async def open_memory_store():
    async with MemoryStore() as store:
        yield store


@contextlib.asynccontextmanager
async def open_served_store():
    server = Server(credentials=CREDENTIALS)
    async with MemoryStore() as memory:
        renewals = RenewalServer("127.0.0.1:0", CREDENTIALS, memory)
        serve_store(server, memory, renewals)
        async with server, renewals, await RemoteStore.connect(server.address, CREDENTIALS, 10.0) as store:
            yield store


@pytest.fixture(params=[open_memory_store, open_served_store], ids=["memory", "served"])
def with_store(request):
    """Return a function that runs a coroutine function on a new store, with a timeout."""

    def run(main):
        async def bounded():
            async with asyncio.timeout(patience(6)), request.param() as store:
                await main(store)

        asyncio.run(bounded())

    return run


def session(store, name="a", *, versions=VERSIONS, pid=7, ttl_s=TTL_S, metrics=None) -> StoreSession:
    def status():
        return HostStatus(
            host=HostName(name),
            agent=AgentStatus(id=f"{name}-{pid}", pid=pid, address="10.0.0.7", versions=versions),
            progress=TrainingProgress(metrics=metrics if metrics is not None else {}),
        )

    return StoreSession(store, JOB, ttl_s, SystemClock(), status)


def key(name="a"):
    return make_host_key(JOB, HostName(name))


def test_a_host_is_registered_under_its_lease(with_store):
    async def main(store):
        mine = session(store)
        await mine.open()
        found = await store.get(key())
        assert found.lease == mine.lease
        await mine.close()

    with_store(main)


def test_the_name_of_an_agent_that_was_killed_is_free_after_its_time_to_live(with_store):
    async def main(store):
        await session(store).open()  # never renewed
        second = session(store, pid=8)
        await second.open()
        assert (await store.get(key())).lease == second.lease
        await second.close()

    with_store(main)


def test_other_versions_are_refused_and_the_error_names_both(with_store):
    async def main(store):
        first = session(store)
        await first.open()
        other = Versions(python="3", resilient_jax="1.0", jax="0.11.0", jaxlib="0.10.0")
        with pytest.raises(JoinRefused) as refused:
            await session(store, "b", versions=other).open()
        assert str(refused.value) == (
            "host b has jax 0.11.0, but job job (host a) runs jax 0.10.0; all hosts of a job need the same "
            "version: install jax 0.10.0 on b"
        )
        assert await store.get(key("b")) is None
        await first.close()

    with_store(main)


def test_a_live_session_outlives_its_time_to_live(with_store):
    async def main(store):
        mine = session(store)
        await mine.open()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3 * TTL_S):
                await mine.keep_alive()
        assert await store.get(key()) is not None
        await mine.close()

    with_store(main)


def test_a_revoked_lease_ends_the_session(with_store):
    async def main(store):
        for follow in (StoreSession.keep_alive, StoreSession.publish_changes):
            mine = session(store, ttl_s=3.0)
            await mine.open()
            mine.mark_changed()
            await store.revoke(mine.lease)
            with pytest.raises(SessionLost, match="the lease expired"):
                await follow(mine)

    with_store(main)


def test_concurrent_changes_are_written_once(with_store):
    async def main(store):
        metrics = {}
        mine = session(store, metrics=metrics, ttl_s=30.0)
        await mine.open()
        publishing = asyncio.create_task(mine.publish_changes())
        metrics["loss"] = 0.5
        for _ in range(10):
            mine.mark_changed()
        created = (await store.get(key())).create_revision
        async with contextlib.aclosing(store.watch(key(), created + 1)) as batches:
            async for batch in batches:
                assert len(batch) == 1
                assert b"loss" in batch[0].key_value.value
                break
        assert (await store.get(key())).version == 2
        publishing.cancel()
        await mine.close()

    with_store(main)


def test_closing_a_session_removes_its_registration_at_once(with_store):
    async def main(store):
        mine = session(store, ttl_s=30.0)
        await mine.open()
        await mine.close()
        assert await store.get(key()) is None

    with_store(main)
