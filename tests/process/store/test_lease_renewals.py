"""Leases are renewed whatever else comes to the store: strangers, calls of others, a loop that does not run."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Coroutine
from typing import TypeVar

import pytest

from resilient_jax.clock import SystemClock
from resilient_jax.cluster.store_session import StoreSession
from resilient_jax.errors import LeaseExpired
from resilient_jax.ids import HostName, JobName, LeaseId
from resilient_jax.protocol.host_status import AgentStatus, HostStatus
from resilient_jax.protocol.versions import Versions
from resilient_jax.store import lease_renewals
from resilient_jax.store.lease_renewals import RenewalServer
from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.remote import RemoteStore
from resilient_jax.store.service import serve_store
from resilient_jax.transport import Credentials, Server
from tests.chaos.strangers import find_listening_ports
from tests.support.paths import SCRIPTS
from tests.support.patience import patience

Result = TypeVar("Result")

CREDENTIALS = Credentials("test-token")
WAIT_S = patience(6)
LONG_TTL_S = patience(60)
FLOODED_TTL_S = patience(0.3)
NUM_HOSTS = 3
NUM_STRANGERS = 3
NUM_RENEWALS = 10


class Service:
    """A store, served on an event loop of its own.

    Attributes:
        calls: how many renewals came as calls.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.calls = 0
        self.store = MemoryStore()
        self.renewals = RenewalServer("127.0.0.1:0", CREDENTIALS, self.store)
        self._server = Server(credentials=CREDENTIALS)
        self._thread = threading.Thread(target=self.loop.run_forever)

    async def open(self) -> str:
        """Serve the store; return where."""
        keep_alive = self.store.keep_alive

        async def count(lease: LeaseId) -> float:
            self.calls += 1
            return await keep_alive(lease)

        self.store.keep_alive = count
        serve_store(self._server, self.store, self.renewals)
        for part in (self.store, self._server, self.renewals):
            await part.__aenter__()
        return self._server.address

    async def close(self) -> None:
        for part in (self.renewals, self._server, self.store):
            await part.__aexit__(None, None, None)

    def run(self, work: Coroutine[None, None, Result]) -> Result:
        """Run a coroutine on the store's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def __enter__(self) -> "Service":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def run_with_store(main) -> None:
    """Run `main(service, client)`, bounded."""

    async def bounded(service: Service) -> None:
        async with asyncio.timeout(WAIT_S):
            async with await RemoteStore.connect(service.run(service.open()), CREDENTIALS, WAIT_S) as client:
                await main(service, client)

    with Service() as service:
        asyncio.run(bounded(service))


def test_a_lease_is_renewed_while_the_loop_of_the_store_does_something_else():
    async def main(service, client):
        lease = await client.grant(LONG_TTL_S)
        is_over = threading.Event()
        service.loop.call_soon_threadsafe(is_over.wait, WAIT_S)
        try:
            assert await client.keep_alive(lease) == LONG_TTL_S
        finally:
            is_over.set()

    run_with_store(main)


def test_a_lease_that_has_ended_is_refused_without_a_call():
    async def main(service, client):
        lease = await client.grant(LONG_TTL_S)
        await client.revoke(lease)
        with pytest.raises(LeaseExpired, match="does not exist"):
            await client.keep_alive(lease)
        assert service.calls == 0

    run_with_store(main)


def test_a_client_whose_connection_for_renewals_breaks_renews_by_a_call_and_gets_another():
    async def main(service, client):
        lease = await client.grant(LONG_TTL_S)
        assert await client.keep_alive(lease) == LONG_TTL_S
        assert service.calls == 0
        service.run(service.renewals.__aexit__(None, None, None))
        service.run(service.renewals.__aenter__())
        for _ in range(3):
            assert await client.keep_alive(lease) == LONG_TTL_S
        assert service.calls == 1

    run_with_store(main)


def test_one_client_too_many_renews_by_calls(monkeypatch):
    monkeypatch.setattr(lease_renewals, "MAX_CLIENTS", 1)

    async def main(service, client):
        address = client.address
        await client.keep_alive(await client.grant(LONG_TTL_S))
        async with await RemoteStore.connect(address, CREDENTIALS, WAIT_S) as other:
            assert await other.keep_alive(await other.grant(LONG_TTL_S)) == LONG_TTL_S
        assert service.calls == 1

    run_with_store(main)


@contextlib.contextmanager
def run_scripts(*commands):
    """Run a script for each command, and yield the processes."""
    with contextlib.ExitStack() as ended:
        processes = []
        for script, *arguments in commands:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPTS / script), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ended.callback(process.communicate)
            ended.callback(process.kill)
            processes.append(process)
        yield processes


class Host:
    """A host that keeps itself registered, and counts."""

    def __init__(self, store: RemoteStore, name: str) -> None:
        versions = Versions(python="3", resilient_jax="1.0", jax="0.10.0", jaxlib="0.10.0")
        status = HostStatus(
            host=HostName(name), agent=AgentStatus(id=name, pid=7, address="10.0.0.7", versions=versions)
        )
        job = JobName("job")
        self.session = StoreSession(store, job, FLOODED_TTL_S, SystemClock(), lambda: status, self.count)
        self._left = 0
        self._is_enough = asyncio.Event()

    def count(self, _: float) -> None:
        self._left -= 1
        if self._left <= 0:
            self._is_enough.set()

    async def renew(self, begun: asyncio.Event) -> None:
        """Keep the lease until it has been renewed so often since what has then `begun`.

        Raises:
            SessionLost: it was not renewed in time, or ended.
        """
        renewing = asyncio.create_task(self.session.keep_alive())
        await begun.wait()
        self._left = NUM_RENEWALS
        self._is_enough.clear()
        counting = asyncio.create_task(self._is_enough.wait())
        await asyncio.wait([renewing, counting], return_when=asyncio.FIRST_COMPLETED)
        counting.cancel()
        if not renewing.cancel():
            renewing.result()


@pytest.mark.full
def test_strangers_at_all_ports_of_the_store_take_no_lease():
    async def main(address, begin):
        begun = asyncio.Event()
        async with contextlib.AsyncExitStack() as stores, asyncio.TaskGroup() as renewals:
            for number in range(NUM_HOSTS):
                connecting = RemoteStore.connect(address, CREDENTIALS, WAIT_S)
                host = Host(await stores.enter_async_context(await connecting), f"host-{number}")
                await host.session.open()
                renewals.create_task(host.renew(begun))
            await asyncio.to_thread(begin)
            begun.set()

    with run_scripts(("serve_store.py", "127.0.0.1:0")) as (store,), contextlib.ExitStack() as flood:
        address = store.stdout.readline().strip()

        def begin() -> None:
            called = int(address.rpartition(":")[2])
            ports = [called, *(port for port in find_listening_ports(store.pid) if port != called)]
            strangers = flood.enter_context(
                run_scripts(*[("strangers.py", *ports) for _ in range(NUM_STRANGERS)])
            )
            for stranger in strangers:
                assert stranger.stdout.readline()

        asyncio.run(main(address, begin))
