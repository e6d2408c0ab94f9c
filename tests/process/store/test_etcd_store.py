"""An etcd cluster whose members are killed, stopped and started again under a client."""

import asyncio
import contextlib
import signal
import time

import pytest

from resilient_jax.clock import SystemClock
from resilient_jax.cluster.name_holder import NameHolder
from resilient_jax.cluster.store_session import LEAVING_S, StoreSession
from resilient_jax.errors import (
    CallerError,
    CompactedRevision,
    PeerError,
    PeerUnreachable,
    StoreUnreachable,
    Unauthenticated,
)
from resilient_jax.ids import HostName, JobName, Revision
from resilient_jax.protocol.host_status import AgentStatus, HostStatus
from resilient_jax.protocol.store_keys import make_host_key
from resilient_jax.protocol.versions import Versions
from resilient_jax.store.etcd_address import EtcdAddress
from resilient_jax.store.etcd_connection import EtcdUser
from resilient_jax.store.etcd_store import EtcdStore, check_lease_ttl
from resilient_jax.store.interface import PutEvent, PutOp, require_unchanged
from resilient_jax.transport import TlsFiles
from tests.chaos.etcd_cluster import LOOPBACK_SITES, EtcdCluster
from tests.support.authority import Authority
from tests.support.etcd_needed import needs_etcd
from tests.support.patience import patience

pytestmark = needs_etcd
WAIT_S = patience(2)
TOKEN_END_S = 3.0
"""etcd looks for tokens of more than a second every second."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@contextlib.asynccontextmanager
async def connect(cluster, name, first=0, **options):
    """Yield a store in a namespace of this name that asks a certain member first."""
    members = cluster.address.endpoints
    address = EtcdAddress((*members[first:], *members[:first]), f"/{name}")
    async with EtcdStore(address, resume_timeout_s=WAIT_S, **options) as store:
        await store.connect(WAIT_S)
        yield store


async def put_until_done(store, key, value):
    while True:
        with contextlib.suppress(PeerUnreachable):
            return await store.put(key, value)


def run(main):
    async def bounded():
        async with asyncio.timeout(patience(6)):
            await main()

    asyncio.run(bounded())


@pytest.fixture(autouse=True)
def restored(cluster):
    yield
    cluster.restore()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_the_leader_interrupts_neither_leases_nor_watches(fault, cluster):
    async def main():
        leader = cluster.find_leader()
        async with connect(cluster, f"leader-{fault.name}", first=leader) as store:
            lease = await store.grant(3.0)
            start = await store.put("held", b"", lease)
            async with contextlib.aclosing(store.watch("w/", Revision(start + 1))) as batches:
                seen, last = [], start
                cluster.signal(leader, fault)
                for number in range(5):
                    last = await put_until_done(store, f"w/{number}", b"")
                    assert await store.keep_alive(lease) >= 1.0
                while not seen or seen[-1].mod_revision < last:
                    seen += await anext(batches)
            revisions = [event.mod_revision for event in seen]
            assert revisions == sorted(set(revisions)), "seen twice, or out of order"
            assert sorted({event.key for event in seen}) == [f"w/{number}" for number in range(5)]
            assert await store.get("held") is not None

    run(main)


def test_an_agent_waits_for_a_ghost_whose_lease_elections_prolong(cluster):
    ttl_s = 3.0

    def session(store, pid):
        async def ask(holder):
            return NameHolder.SILENT  # its machine is gone, too

        versions = Versions(python="3", resilient_jax="1.0", jax="0.10.0", jaxlib="0.10.0")
        status = HostStatus(
            host=HostName("a"),
            agent=AgentStatus(id=f"a-{pid}", pid=pid, address="10.0.0.7", versions=versions),
        )
        return StoreSession(store, JobName("job"), ttl_s, SystemClock(), lambda: status, ask_holder=ask)

    async def main():
        async with connect(cluster, "ghost") as store:
            await session(store, 7).open()  # never renewed
            began_s = time.monotonic()
            second = session(store, 8)
            waiting = asyncio.create_task(open_until_done(second))
            while time.monotonic() - began_s < ttl_s + LEAVING_S + 1.0:
                leader = await asyncio.to_thread(cluster.find_leader)
                cluster.signal(leader, signal.SIGKILL)
                await asyncio.sleep(ttl_s / 2)
                await asyncio.to_thread(cluster.restore)
            await waiting
            found = await store.get(make_host_key(JobName("job"), HostName("a")))
            assert found is not None
            assert found.lease == second.lease

    run(main)


async def open_until_done(session):
    while True:
        with contextlib.suppress(PeerError):
            return await session.open()


@pytest.mark.parametrize("member", range(3))
def test_a_client_finds_the_members_that_live(member, cluster):
    async def main():
        cluster.kill(member)
        async with connect(cluster, f"finds-{member}", first=member) as store:
            assert await store.get("a") is None

    run(main)


def test_without_a_majority_nothing_is_written_and_all_goes_on_once_it_is_back(cluster):
    async def main():
        async with connect(cluster, "majority", call_timeout_s=1.0) as store:
            start = await put_until_done(store, "a", b"1")
            async with contextlib.aclosing(store.watch("a", Revision(start + 1))) as batches:
                waiting = asyncio.ensure_future(anext(batches))
                cluster.kill(0)
                cluster.kill(1)
                for call in (store.get("a"), store.put("a", b"2"), store.grant(3.0)):
                    with pytest.raises(PeerUnreachable):
                        await call
                assert not waiting.done()
                cluster.restore()
                found = await store.get("a")
                assert found is not None
                assert found.value in (b"1", b"2")  # a put that failed may have been made
                await put_until_done(store, "a", b"3")
                events = await waiting
                while not (isinstance(events[-1], PutEvent) and events[-1].key_value.value == b"3"):
                    events += await anext(batches)

    run(main)


def test_all_members_restart_and_the_store_is_the_same(cluster):
    async def main():
        async with connect(cluster, "restart") as store:
            revision = await store.put("a", b"1")
            for member in range(3):
                cluster.kill(member)
            cluster.restore()
            found = await store.get("a")
            assert found is not None
            assert (found.value, found.mod_revision) == (b"1", revision)

    run(main)


def test_a_put_that_names_what_it_replaces_cannot_win_over_a_newer_one(cluster):
    """A member that was stopped with a request in it carries the request out when it goes on."""

    async def main():
        leader = cluster.find_leader()
        follower = (leader + 1) % 3
        async with connect(cluster, "late", first=follower) as slow, connect(cluster, "late") as fast:
            await put_until_done(fast, "a", b"0")
            old = await fast.get("a")
            assert old is not None
            cluster.signal(leader, signal.SIGSTOP)
            late = asyncio.ensure_future(slow.transaction([require_unchanged(old)], [PutOp("a", b"late")]))
            await asyncio.wait([late])
            newest = await fast.get("a")
            assert newest is not None
            await fast.transaction([require_unchanged(newest)], [PutOp("a", b"newest")])
            cluster.restore()
            for _ in range(20):
                found = await fast.get("a")
                assert found is not None
                assert found.value == b"newest"

    run(main)


def test_old_revisions_are_forgotten_by_who_writes(cluster):
    async def main():
        async with connect(cluster, "compact", keep_revisions=50) as store:
            start = await put_until_done(store, "a", b"")
            for _ in range(120):
                await put_until_done(store, "a", b"")
            async with contextlib.aclosing(store.watch("a", start)) as batches:
                with pytest.raises(CompactedRevision, match="history begins with"):
                    await anext(batches)

    run(main)


def test_a_lease_that_the_cluster_does_not_give_is_refused_with_what_to_do(cluster):
    async def main():
        async with connect(cluster, "lease") as store:
            assert store.min_lease_ttl_s == 1.0  # one and a half times 0.5 s, rounded up
            check_lease_ttl(store, 1.0)
            with pytest.raises(CallerError, match=r"found 0.5, but the shortest lease of etcd://.* is 1 s"):
                check_lease_ttl(store, 0.5)

    run(main)


def test_the_error_names_an_unreachable_cluster_and_the_time_tried():
    async def main():
        async with EtcdStore(EtcdAddress(("127.0.0.1:9",)), call_timeout_s=0.2) as store:
            told = []
            with pytest.raises(
                StoreUnreachable, match=r"no member of etcd://127.0.0.1:9 answered for 0\.\d s"
            ):
                await store.connect(0.5, lambda tried_s, error: told.append(error.is_refused))
            assert told[0]

    run(main)


@pytest.mark.full
def test_a_cluster_with_tls_and_users(tmp_path):
    authority = Authority(tmp_path / "certificates", "authority")
    served, ours = authority.sign("member"), authority.sign("client")
    stranger = Authority(tmp_path / "others", "stranger").sign("client")
    (tmp_path / "etcd").mkdir()
    # Tokens are forgotten after a second without a call.
    with EtcdCluster(
        tmp_path / "etcd", sites=LOOPBACK_SITES[:1], options=("--auth-token-ttl=1",), tls=served
    ) as cluster:
        for path, body in (
            ("auth/user/add", {"name": "root", "password": "secret"}),
            ("auth/role/add", {"name": "root"}),
            ("auth/user/grant", {"user": "root", "role": "root"}),
            ("auth/enable", {}),
        ):
            cluster.request(0, path, body)

        async def main():
            root = EtcdUser("root", "secret")
            async with connect(cluster, "secure", tls=ours, user=root) as store:
                revision = await store.put("a", b"1")
                async with contextlib.aclosing(store.watch("a", Revision(revision + 1))) as batches:
                    cluster.kill(0)
                    cluster.start(0)
                    async with connect(cluster, "secure", tls=ours, user=root) as other:
                        last = await put_until_done(other, "a", b"2")
                    await asyncio.sleep(TOKEN_END_S)
                    assert (await anext(batches))[0].mod_revision <= last
                await asyncio.sleep(TOKEN_END_S)
                found = await store.get("a")
                assert found is not None
                assert found.value == b"2"
            for user in (None, EtcdUser("root", "wrong")):
                with pytest.raises(Unauthenticated, match=r"etcd refused us: .*RESILIENT_JAX_ETCD_USER"):
                    async with connect(cluster, "secure", tls=ours, user=user) as store:
                        await store.get("a")
            for tls in (None, TlsFiles(stranger.certificate, stranger.key, served.authority)):
                async with EtcdStore(cluster.address, tls=tls, user=root, call_timeout_s=0.3) as store:
                    with pytest.raises(StoreUnreachable, match="whether they expect TLS"):
                        await store.connect(0.5)

        run(main)
