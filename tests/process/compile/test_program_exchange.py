"""The exchange of compiled programs between hosts, over real sockets and into real folders."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from resilient_jax.compile import compile_claims, program_fetcher
from resilient_jax.compile.compilation_monitor import CompilationMonitor
from resilient_jax.compile.program_exchange import (
    FETCH_PROGRAM,
    MAX_WAITING_REQUESTS,
    PROGRAM_SERVICE,
    ProgramAnswer,
    ProgramDirectory,
)
from resilient_jax.compile.program_fetcher import Patience, ProgramFetcher, ProgramPeer, find_owner
from resilient_jax.compile.training_threads import mark_training_thread
from resilient_jax.errors import MessageError
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat
from resilient_jax.protocol.generation import Generation, GenerationPhase, Member, Membership
from resilient_jax.transport import Credentials, PeerServer
from resilient_jax.transport.peer_calls import CallService
from tests.support.patience import NEVER_S, patience

CREDENTIALS = Credentials("secret", None)
NAMES = tuple(HostName(f"host-{i}") for i in range(3))
FIRST = GenerationNumber(1)
SUFFIX = "-cache"
THREADS = 2 * MAX_WAITING_REQUESTS
TIMEOUT_S = patience(3)
QUIET_S = 0.3
"""Asking takes some milliseconds: what has not ended after this time waits."""


@pytest.fixture(autouse=True)
def endless_claims(monkeypatch):
    """A host that waited for the end of a claim would wait until the test's time-out."""
    monkeypatch.setattr(compile_claims, "LEASE_S", NEVER_S)


def make_generation(number: GenerationNumber, hosts: Sequence["Host"]) -> Generation:
    members = tuple(
        Member(host=host.name, incarnation=Incarnation(1), seat=Seat(n), endpoint=host.peer.endpoint)
        for n, host in enumerate(hosts)
    )
    return Generation(number=number, phase=GenerationPhase.ACTIVE, membership=Membership(members=members))


class Host:
    """A host that serves a folder of programs, and fetches from the others."""

    def __init__(self, name: HostName, folder: Path, handler=None):
        folder.mkdir(exist_ok=True)
        self.name, self.folder, self.failures = name, folder, []
        self.patience: Patience | None = Patience(is_ahead=False, check=lambda: None)
        self.directory = ProgramDirectory(folder, SUFFIX)
        handlers = {**self.directory.handlers, **({FETCH_PROGRAM: handler} if handler else {})}
        services = {PROGRAM_SERVICE: CallService(handlers)}
        self.server = PeerServer("127.0.0.1", CREDENTIALS, services, name="rj-programs")
        self.peer = ProgramPeer(host=name, endpoint=self.server.address)
        self.programs = ProgramFetcher(
            name,
            CREDENTIALS,
            self.directory,
            lambda: self.patience,
            lambda *words: self.failures.append(words),
        )

    def close(self) -> None:
        self.programs.end()
        self.server.shut_down()

    def begin_generation(self, number: GenerationNumber, hosts: Sequence["Host"]) -> None:
        for part in (self.programs, self.directory):
            part.begin_generation(make_generation(number, hosts))

    def keep(self, key: str, data: bytes) -> None:
        # Atomically, as JAX's cache does: hosts that share the folder read it at any time.
        written = self.folder / f"{key}.written"
        written.write_bytes(data)
        written.rename(self.folder / f"{key}{SUFFIX}")


def start_hosts(tmp_path: Path, folders: tuple[str, ...]) -> list[Host]:
    found = [Host(name, tmp_path / folder) for name, folder in zip(NAMES, folders, strict=True)]
    for host in found:
        host.begin_generation(FIRST, found)
    return found


@pytest.fixture(params=[NAMES, ("shared",) * 3], ids=["own folders", "one folder"])
def hosts(tmp_path, request):
    found = start_hosts(tmp_path, request.param)
    yield found
    for host in found:
        host.close()


def key_of(owner: Host, hosts) -> str:
    """A key that a host owns."""
    peers = tuple(host.peer for host in hosts)
    return next(key for i in range(99) if find_owner(key := f"jit_step-{i:02}", peers) == owner.peer)


def test_a_program_of_any_size_arrives_complete_from_its_owner(hosts):
    owner, other, _ = hosts
    key, data = key_of(owner, hosts), bytes(range(256)) * 40_000
    owner.keep(key, data)
    assert other.programs.fetch(key) == data


@pytest.mark.parametrize("compiles", [0, 1], ids=["the owner compiles", "another host compiles"])
def test_one_host_compiles_and_all_others_get_its_program(hosts, compiles):
    key, first = key_of(hosts[0], hosts), hosts[compiles]
    assert first.programs.fetch(key) is None
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(host.programs.fetch, key) for host in hosts if host is not first]
        done, _ = wait(asking, QUIET_S)
        assert not done
        first.keep(key, b"program")
        assert first.programs.finish()
    assert [one.result() for one in asking] == [b"program"] * 2
    assert not first.programs.finish(), "there is no other claim"
    assert not any(host.failures for host in hosts)


@pytest.mark.parametrize("mark", [mark_training_thread, None], ids=["of a replica", "of the script"])
def test_a_thread_that_training_waits_for_waits_for_the_host_that_compiles(hosts, mark):
    compiles, owner, _ = hosts
    monitor = CompilationMonitor(
        owner.name,
        CREDENTIALS,
        owner.directory,
        record_event=lambda *_, **__: pytest.fail("nothing is compiled here"),
        raise_if_ended=lambda: None,
        hit_failpoint=lambda _: None,
    )
    key = key_of(owner, hosts)
    monitor.fetcher.begin_generation(make_generation(FIRST, hosts))
    assert compiles.programs.fetch(key) is None
    with ThreadPoolExecutor(1, initializer=mark) as pool:
        asking = pool.submit(monitor.fetch, key)
        done, _ = wait([asking], QUIET_S if mark else TIMEOUT_S)
        assert bool(done) == (mark is None)
        compiles.keep(key, b"program")
        compiles.programs.finish()
        assert asking.result() == (b"program" if mark else None)
    monitor.end()


def test_a_host_that_is_no_member_yet_has_what_members_have_and_claims_nothing(hosts, tmp_path):
    owner, holds, _ = hosts
    newcomer = Host(HostName("newcomer"), tmp_path / "empty")
    newcomer.begin_generation(FIRST, hosts)
    key = key_of(owner, hosts)
    assert newcomer.programs.fetch(key) is None
    assert not newcomer.programs.finish(), "members do not wait for what it compiles"
    assert holds.programs.fetch(key) is None, "the first member that asks compiles it"
    assert newcomer.programs.fetch(key) is None, "it does not wait for it"
    holds.keep(key, b"program")
    assert holds.programs.finish()
    assert newcomer.programs.fetch(key) == b"program"
    newcomer.close()


def test_a_program_that_could_not_be_kept_is_compiled_by_every_host(hosts):
    key = key_of(hosts[0], hosts)
    for host in hosts:
        assert host.programs.fetch(key) is None, "it does not wait for a claim"
        host.programs.finish()


def test_when_the_host_that_compiles_is_gone_another_one_compiles_in_the_next_generation(hosts):
    owner, gone, other = hosts
    peers, left = [host.peer for host in hosts], [owner.peer, other.peer]
    keys = (f"jit_step-{i:02}" for i in range(99))
    key = next(key for key in keys if find_owner(key, peers) == find_owner(key, left) == owner.peer)
    assert gone.programs.fetch(key) is None
    gone.server.shut_down()
    for host in (owner, other):
        host.begin_generation(GenerationNumber(2), [owner, other])
    assert other.programs.fetch(key) is None, "it does not wait for the lease's end"
    assert not other.failures


def test_a_claim_lasts_as_long_as_its_host_compiles(hosts, monkeypatch):
    monkeypatch.setattr(compile_claims, "LEASE_S", 0.5)
    monkeypatch.setattr(program_fetcher, "RENEWAL_INTERVAL_S", 0.05)
    owner, compiles, waits = hosts
    key = key_of(owner, hosts)
    assert compiles.programs.fetch(key) is None
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: (waits.programs.fetch(key), waits.programs.finish()))
        done, _ = wait([asking], 1.5)
        assert not done, "the claim was renewed"
        # A host that is stopped renews nothing.
        monkeypatch.setattr(compiles.programs, "_report", lambda owner, report: None)
        assert asking.result(TIMEOUT_S) == (None, True), "the claim went to the host that waited"


def test_a_thread_without_patience_takes_what_is_there_and_claims_nothing(hosts):
    owner, other, third = hosts
    other.patience, key = None, key_of(owner, hosts)
    assert other.programs.fetch(key) is None
    assert not other.programs.finish()
    assert third.programs.fetch(key) is None
    assert other.programs.fetch(key) is None, "it does not wait"


def test_a_wait_ends_when_the_generation_of_the_waiting_thread_ends(hosts):
    owner, other, _ = hosts
    key, calls = key_of(owner, hosts), []

    class Ended(BaseException):
        pass

    def check() -> None:
        calls.append(key)
        if len(calls) == 3:
            raise Ended

    assert owner.programs.fetch(key) is None
    other.patience = Patience(is_ahead=False, check=check)
    with pytest.raises(Ended):
        other.programs.fetch(key)


def test_waiting_requests_leave_threads_for_others(hosts):
    owner, waits, asks = hosts
    peers = tuple(host.peer for host in hosts)
    key, other = (
        next(k for i in range(99) if find_owner(k := f"{n}-{i}", peers) == owner.peer) for n in "ab"
    )
    assert owner.programs.fetch(key) is None
    owner.keep(other, b"at once")
    waits.patience = Patience(is_ahead=True, check=lambda: None)
    with ThreadPoolExecutor(2 * THREADS) as pool:
        waiting = [pool.submit(waits.programs.fetch, key) for _ in range(2 * THREADS)]
        wait(waiting, 0.3)
        assert asks.programs.fetch(other) == b"at once"
        owner.keep(key, b"program")
        owner.programs.finish()
    assert {one.result() for one in waiting} == {b"program"}
    assert not asks.failures


def test_an_owner_that_is_gone_is_reported_and_the_program_is_compiled_here(hosts):
    owner, other, _ = hosts
    owner.server.shut_down()
    assert other.programs.fetch(key_of(owner, hosts)) is None
    assert [host for host, _ in other.failures] == [owner.peer.host]


def test_a_host_that_has_the_program_and_is_gone_is_reported_and_the_program_is_compiled_here(tmp_path):
    owner, had, other = hosts = start_hosts(tmp_path, NAMES)
    key = key_of(owner, hosts)
    assert had.programs.fetch(key) is None
    had.keep(key, b"program")
    had.programs.finish()
    had.close()
    assert other.programs.fetch(key) is None
    assert [host for host, _ in other.failures] == [had.peer.host]
    for host in (owner, other):
        host.close()


def test_changed_bytes_are_refused(tmp_path):
    def send_damaged(request):
        return ProgramAnswer(data=b"program", crc32=1)

    owner, other = Host(NAMES[0], tmp_path / "owner", send_damaged), Host(NAMES[1], tmp_path / "other")
    both = [owner, other]
    other.begin_generation(FIRST, both)
    assert other.programs.fetch(key_of(owner, both)) is None
    assert "CRC-32" in other.failures[0][1]
    for host in both:
        host.close()


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
