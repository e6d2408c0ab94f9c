"""The exchange of compiled programs between hosts, over real sockets and into real folders."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from resilient_jax.compile.program_exchange import (
    FETCH_PROGRAM,
    MAX_WAITING_REQUESTS,
    PROGRAM_SERVICE,
    ProgramChunk,
    ProgramDirectory,
    ProgramFetcher,
    ProgramPeer,
    find_owner,
)
from resilient_jax.errors import MessageError
from resilient_jax.ids import HostName
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.sync_server import SyncServer

CREDENTIALS = Credentials("secret", None)
NAMES = tuple(HostName(f"host-{i}") for i in range(3))
SUFFIX = "-cache"
THREADS = 2 * MAX_WAITING_REQUESTS


class Host:
    """A host that serves a folder of programs, and fetches from the others."""

    def __init__(self, name: HostName, folder: Path, handler=None):
        folder.mkdir()
        self.folder, self.failures, self.may_wait = folder, [], False
        programs = ProgramDirectory(folder, SUFFIX)
        self.server = SyncServer("127.0.0.1:0", credentials=CREDENTIALS, num_threads=THREADS)
        self.server.add(PROGRAM_SERVICE, {FETCH_PROGRAM: handler or programs.serve})
        self.server.start()
        self.peer = ProgramPeer(host=name, endpoint=self.server.address)
        self.programs = ProgramFetcher(
            name, CREDENTIALS, lambda: self.may_wait, lambda *words: self.failures.append(words)
        )

    def keep(self, key: str, data: bytes) -> None:
        (self.folder / f"{key}{SUFFIX}").write_bytes(data)


@pytest.fixture
def hosts(tmp_path):
    found = [Host(name, tmp_path / name) for name in NAMES]
    for host in found:
        host.programs.set_peers([other.peer for other in found])
    yield found
    for host in found:
        host.server.stop()


def key_of(owner: Host, hosts) -> str:
    """A key that a host owns."""
    peers = tuple(host.peer for host in hosts)
    return next(key for i in range(99) if find_owner(key := f"jit_step-{i:02}", peers) == owner.peer)


def test_a_program_of_any_size_arrives_complete_from_its_owner(hosts):
    owner, other, _ = hosts
    key, data = key_of(owner, hosts), bytes(range(256)) * 40_000
    owner.keep(key, data)
    assert other.programs.fetch(key) == data


def test_the_owner_asks_no_other_host(hosts):
    owner, other, _ = hosts
    key = key_of(owner, hosts)
    other.keep(key, b"program")
    assert owner.programs.fetch(key) is None
    assert not owner.failures


def test_a_training_thread_does_not_wait_for_an_owner_that_lacks_the_program(hosts):
    owner, other, _ = hosts
    assert other.programs.fetch(key_of(owner, hosts)) is None
    assert not other.failures


def test_a_background_thread_waits_for_an_owner_that_is_compiling(hosts):
    owner, other, _ = hosts
    key, found = key_of(owner, hosts), []
    other.may_wait = True
    asking = threading.Thread(target=lambda: found.append(other.programs.fetch(key)))
    asking.start()
    asking.join(0.3)
    assert asking.is_alive()
    owner.keep(key, b"program")
    asking.join(30)
    assert found == [b"program"]


def test_a_wait_for_an_owner_can_be_canceled(hosts):
    owner, other, _ = hosts
    key, calls = key_of(owner, hosts), []

    class Canceled(Exception):
        pass

    def may_wait() -> bool:
        calls.append(key)
        if len(calls) == 3:
            raise Canceled
        return True

    asking = ProgramFetcher(other.peer.host, CREDENTIALS, may_wait, lambda *_: None)
    asking.set_peers([host.peer for host in hosts])
    with pytest.raises(Canceled):
        asking.fetch(key)


def test_waiting_requests_leave_threads_for_others(hosts):
    owner, waits, asks = hosts
    peers = tuple(host.peer for host in hosts)
    key, other = (
        next(k for i in range(99) if find_owner(k := f"{n}-{i}", peers) == owner.peer) for n in "ab"
    )
    owner.keep(other, b"at once")
    waits.may_wait = True
    with ThreadPoolExecutor(2 * THREADS) as pool:
        waiting = [pool.submit(waits.programs.fetch, key) for _ in range(2 * THREADS)]
        wait(waiting, 0.3)
        assert asks.programs.fetch(other) == b"at once"
        owner.keep(key, b"program")
    assert {one.result() for one in waiting} == {b"program"}
    assert not asks.failures


def test_an_owner_that_is_gone_is_reported_and_the_program_is_compiled_here(hosts):
    owner, other, _ = hosts
    owner.server.stop()
    assert other.programs.fetch(key_of(owner, hosts)) is None
    assert [host for host, _ in other.failures] == [owner.peer.host]


def test_changed_bytes_are_refused(tmp_path):
    def send_damaged(request):
        yield ProgramChunk(size=7, crc32=1)
        yield ProgramChunk(data=b"program")

    owner, other = Host(NAMES[0], tmp_path / "owner", send_damaged), Host(NAMES[1], tmp_path / "other")
    both = [owner, other]
    other.programs.set_peers([host.peer for host in both])
    assert other.programs.fetch(key_of(owner, both)) is None
    assert "CRC-32" in other.failures[0][1]
    for host in both:
        host.server.stop()


@pytest.mark.parametrize("key", ["", "../secret", "a/b", ".hidden", "a\x00b"])
def test_a_key_that_is_no_digest_reads_no_file(tmp_path, key):
    (tmp_path / f"secret{SUFFIX}").write_bytes(b"no")
    (tmp_path / "folder").mkdir()
    with pytest.raises(MessageError, match="found the key"):
        ProgramDirectory(tmp_path / "folder", SUFFIX).read(key)


def test_every_key_has_one_owner_on_all_hosts(hosts):
    peers = tuple(host.peer for host in hosts)
    owners = {find_owner(f"jit_step-{i}", peers) for i in range(60)}
    assert owners == set(peers)
    assert find_owner("jit_step-0", ()) is None
