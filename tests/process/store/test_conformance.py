"""Every implementation of `Store` passes the conformance suite."""

import asyncio
import contextlib
import itertools
import tempfile
from pathlib import Path

import pytest

from resilient_jax.store.etcd_address import EtcdAddress
from resilient_jax.store.etcd_store import EtcdStore
from resilient_jax.store.lease_renewals import RenewalServer
from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.remote import RemoteStore
from resilient_jax.store.service import serve_store
from resilient_jax.transport import Credentials, Server
from tests.chaos.etcd_cluster import EtcdCluster
from tests.conformance.store_conformance import CHECKS
from tests.support.etcd_needed import needs_etcd

CREDENTIALS = Credentials("test-token")


@contextlib.asynccontextmanager
async def open_memory_store(*, keep_revisions=10_000):
    async with MemoryStore(keep_revisions=keep_revisions) as store:
        yield store


@contextlib.asynccontextmanager
async def open_embedded_store(*, keep_revisions=10_000):
    server = Server(credentials=CREDENTIALS)
    async with MemoryStore(keep_revisions=keep_revisions) as memory:
        renewals = RenewalServer("127.0.0.1:0", CREDENTIALS, memory)
        serve_store(server, memory, renewals)
        async with server, renewals, await RemoteStore.connect(server.address, CREDENTIALS, 10.0) as store:
            yield store


@contextlib.asynccontextmanager
async def open_journaled_store(*, keep_revisions=10_000):
    with tempfile.TemporaryDirectory() as folder:
        async with MemoryStore.from_journal(Path(folder, "journal"), keep_revisions=keep_revisions) as store:
            yield store


STORES = {"memory": open_memory_store, "journaled": open_journaled_store, "embedded": open_embedded_store}


@pytest.mark.parametrize("open_store", STORES.values(), ids=STORES.keys())
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_store_keeps_the_contract(check, open_store):
    asyncio.run(check(open_store))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as running:
        yield running


NAMESPACES = itertools.count()


@needs_etcd
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_an_etcd_cluster_keeps_the_contract(check, cluster):
    @contextlib.asynccontextmanager
    async def open_store(*, keep_revisions=10_000):
        address = EtcdAddress(cluster.address.endpoints, f"/check-{next(NAMESPACES):03}/")
        async with EtcdStore(address, keep_revisions=keep_revisions) as store:
            await store.connect(10.0)
            yield store

    asyncio.run(check(open_store))


def test_the_table_has_every_check():
    assert len(CHECKS) == 24
