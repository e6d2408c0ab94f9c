"""Snapshot servers as real processes: from a worker's part to a committed snapshot, with failures in every step."""

import contextlib
import errno
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import msgspec
import pytest

from resilient_jax.erasure import ReedSolomon, encode
from resilient_jax.erasure.kernels import NumpyKernel
from resilient_jax.errors import (
    ChecksumMismatch,
    InternalError,
    PeerUnreachable,
    SnapshotDropped,
    SnapshotMissing,
    SnapshotRefused,
    StaleGeneration,
    Unauthenticated,
)
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.framing import encode_frame
from resilient_jax.protocol.snapshots import ParityGroup
from resilient_jax.protocol.worker_messages import SNAPSHOT_CONNECTION_VARIABLE
from resilient_jax.snapshot import local_client
from resilient_jax.snapshot.manifest import decode_manifest
from resilient_jax.snapshot.messages import (
    COMPLETE,
    MANIFEST,
    PARITY,
    SERVICE,
    CompleteRequest,
    ManifestRequest,
    ParityPiece,
    Region,
)
from resilient_jax.snapshot.slot_memory import MEMFD_NAME
from resilient_jax.snapshot.stripes import data_members, stripe_of_row
from resilient_jax.transport import Credentials, PeerChannel
from tests.chaos.resource_limits import limit_memory
from tests.process.snapshot.served_snapshots import (
    COMMITTED,
    SIZES,
    assert_rebuilds,
    chunks_of,
    commit_all,
    held_at,
    open_all,
    part_of,
    take_all,
)
from tests.support.paths import ROOT
from tests.support.patience import wait_until
from tests.support.snapshot_servers import (
    CHECKSUM,
    CREDENTIALS,
    WAIT_S,
    make_id,
    make_layout,
    make_manifest,
    make_part,
    running,
    take,
)


@contextlib.contextmanager
def worker_process(host, layout, action, id):
    """Run a worker in a process of its own: `action` of `snapshot_worker.py` with the snapshot `id`."""
    with host.connect() as theirs:
        child = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("snapshot_worker.py")),
                msgspec.json.encode(layout).decode(),
                action,
                msgspec.json.encode(id).decode(),
                host.name,
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                SNAPSHOT_CONNECTION_VARIABLE: str(theirs.fileno()),
            },
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(theirs.fileno(),),
        )
    with child:
        try:
            yield child
        finally:
            child.kill()


def said(child):
    """Return the next line that a worker process prints."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_server_that_can_no_longer_serve_its_worker_ends():
    """Its agent then starts another one; see `cluster/snapshot_server_process`."""
    with running(1) as (host,), host.connect() as worker:
        worker.sendall(encode_frame(b"no request"))
        assert host.process.wait(WAIT_S) is not None


# Committed.


@pytest.mark.parametrize(("n", "m"), [(4, 1), (4, 2), (6, 2), (3, 0)])
def test_parts_are_committed_on_all_hosts_with_the_parity_of_their_padded_chunks(n, m):
    with running(n) as hosts:
        layout, workers = open_all(hosts, m)
        for step in (1, 2, 3):
            commit_all(layout, hosts, workers, make_id(step))
        for step in (2, 3):
            id = make_id(step)
            length, chunks = chunks_of(layout, hosts, id, m)
            for member, host in enumerate(hosts):
                part = part_of(layout, host, id)
                assert host.read(id, Region.PART, len(part)) == part
                for row in range(m):
                    stripe = stripe_of_row(member, row, n, m)
                    data = [chunks[i][shard] for shard, i in enumerate(data_members(stripe, n, m))]
                    expected = [bytearray(length) for _ in range(m)]
                    encode(ReedSolomon(n - m, m), NumpyKernel(), data, expected)
                    assert host.read(id, Region.PARITY, length, row=row) == expected[row]
                with PeerChannel(host.endpoint, CREDENTIALS, SERVICE) as channel:
                    for other in hosts:
                        request = ManifestRequest(id=id, host=other.name)
                        reply = channel.call(MANIFEST, request, timeout_s=WAIT_S)
                        assert decode_manifest(reply.data) == make_manifest(
                            layout, id, other.name, part_of(layout, other, id)
                        )
        for host in hosts:
            host.wait(lambda host=host: [status.id.step for status in host.holding] == [2, 3])
            assert host.holding[0].group == layout.find_group(host.name)
            kernel = host.wait_event(EventKind.SNAPSHOT_ERASURE_KERNEL).detail
            assert kernel["kernel"]
            assert kernel["reason"]
            assert kernel["checksum"]


def test_parts_of_several_pieces_and_an_empty_one_are_committed():
    sizes = (5 * 2**20 + 3, 0, 7 * 2**20)
    with running(3) as hosts:
        layout, workers = open_all(hosts, 1, sizes=sizes)
        commit_all(layout, hosts, workers, make_id(1))
        for lost in range(3):
            assert_rebuilds(layout, hosts, hosts, make_id(1), 1, {lost})


def test_a_server_loads_neither_jax_nor_numpy_and_runs_at_low_priority():
    with running(1) as (host,):
        maps = Path(f"/proc/{host.process.pid}/maps").read_text()
        assert "numpy" not in maps
        assert "jax" not in maps
        assert "libisal" in maps
        assert os.getpriority(os.PRIO_PROCESS, host.process.pid) > os.getpriority(os.PRIO_PROCESS, 0)


# The worker.


def test_a_worker_killed_during_a_copy_drops_that_snapshot_on_all_hosts_and_keeps_the_previous_one():
    with running(4) as hosts:
        layout, workers = open_all(hosts, 1)
        commit_all(layout, hosts, workers, make_id(1))
        with worker_process(hosts[2], layout, "copy", make_id(2)) as child:
            assert said(child) == "half"
            for host, worker in zip(hosts, workers, strict=True):
                if host is not hosts[2]:
                    take(worker, make_id(2), host.name, part_of(layout, host, make_id(2)))
            child.kill()
        for host in hosts:
            dropped = host.wait_event(EventKind.SNAPSHOT_DROPPED, make_id(2))
            assert "worker ended" in str(dropped.detail["reason"])
            assert [status.id.step for status in host.holding] == [1]
        assert_rebuilds(layout, hosts, hosts, make_id(1), 1, {0})
        # No slot stays blocked: the next two snapshots are committed.
        workers[2] = hosts[2].worker()
        workers[2].open_layout(layout)
        for step in (3, 4):
            commit_all(layout, hosts, workers, make_id(step))


def test_a_restarted_worker_reads_its_part_and_is_notified_of_committed_snapshots():
    with running(3) as hosts:
        layout, workers = open_all(hosts, 1)
        id = make_id(1)
        with worker_process(hosts[0], layout, "take", id) as child:
            assert said(child) == "taken"
            child.kill()
        for host, worker in list(zip(hosts, workers, strict=True))[1:]:
            take(worker, id, host.name, part_of(layout, host, id))
        for host in hosts:
            host.wait_phase(id, COMMITTED)
        part = part_of(layout, hosts[0], id)
        with worker_process(hosts[0], layout, "held", id) as child:
            assert said(child) == f"{len(part)} {zlib.crc32(part)}"
        restarted = hosts[0].worker()
        assert restarted.wait_committed(id, WAIT_S)
        held = restarted.open_own_part(id)
        assert held is not None
        manifest, view = held
        assert manifest == make_manifest(layout, id, hosts[0].name, part)
        assert view == part
        assert view.readonly
        assert restarted.open_own_part(make_id(2)) is None


def test_abandoning_a_part_frees_its_slot():
    with running(2) as hosts:
        layout, workers = open_all(hosts, 1)
        commit_all(layout, hosts, workers, make_id(1))
        view = workers[0].begin(make_id(2))
        workers[0].abandon(make_id(2))
        with pytest.raises(ValueError, match="released"):
            view[:1] = b"x"  # a late write must not reach the snapshot that takes the slot next
        take(workers[1], make_id(2), hosts[1].name, part_of(layout, hosts[1], make_id(2)))
        assert not workers[1].wait_committed(make_id(2), WAIT_S)  # at once: it was dropped
        commit_all(layout, hosts, workers, make_id(3))


def test_a_slot_that_a_worker_cannot_map_is_freed(monkeypatch):
    with running(2) as hosts:
        layout, workers = open_all(hosts, 1)
        commit_all(layout, hosts, workers, make_id(1))
        layout = make_layout(hosts, 1, [4 * size for size in SIZES[:2]], 2)
        for worker in workers:
            worker.open_layout(layout, restored=make_id(1))
        commit_all(layout, hosts, workers, make_id(2, 2))
        # The slot of the first snapshot is allocated again, larger, when the next snapshot needs it.
        take(workers[1], make_id(3, 2), hosts[1].name, part_of(layout, hosts[1], make_id(3, 2)))
        with monkeypatch.context() as patched:
            patched.setattr(local_client.mmap, "mmap", refuse_to_map)
            with pytest.raises(OSError, match="Cannot allocate memory"):
                workers[0].begin(make_id(3, 2))
        assert not workers[1].wait_committed(make_id(3, 2), WAIT_S)  # at once: it was dropped
        commit_all(layout, hosts, workers, make_id(4, 2))


def refuse_to_map(*_, **__):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize("who", [0, 3], ids=["the root", "another"])
def test_a_snapshot_that_one_host_abandons_is_dropped_in_all_groups(who):
    with running(4) as hosts:
        layout = make_layout(hosts, 1, SIZES[:4])
        names = [host.name for host in hosts]
        pairs = tuple(ParityGroup(hosts=tuple(pair), parity=1) for pair in (names[:2], names[2:]))
        layout = msgspec.structs.replace(layout, groups=pairs)
        workers = [host.worker() for host in hosts]
        for worker in workers:
            worker.open_layout(layout)
        commit_all(layout, hosts, workers, make_id(1))
        others = [(h, w) for i, (h, w) in enumerate(zip(hosts, workers, strict=True)) if i != who]
        for host, worker in others:
            take(worker, make_id(2), host.name, part_of(layout, host, make_id(2)))
        workers[who].begin(make_id(2))
        workers[who].abandon(make_id(2))
        for host, worker in others:
            assert "abandoned it" in str(
                host.wait_event(EventKind.SNAPSHOT_DROPPED, make_id(2)).detail["reason"]
            )
            assert not worker.wait_committed(make_id(2), WAIT_S)
            host.wait(lambda host=host: [status.id.step for status in host.holding] == [1])
        commit_all(layout, hosts, workers, make_id(3))


def test_a_new_worker_ends_the_session_of_the_previous_one():
    with running(1) as (host,):
        _, (first,) = open_all([host], 0)
        first.begin(make_id(1))
        second = host.worker()
        assert "replaced" in str(host.wait_event(EventKind.SNAPSHOT_DROPPED, make_id(1)).detail["reason"])
        with pytest.raises(PeerUnreachable, match="has ended"):
            first.wait_committed(make_id(9), WAIT_S)
        second.open_layout(make_layout([host], 0, SIZES[:1]))
        take(second, make_id(2), host.name, make_part(make_id(2), host.name, SIZES[0]))
        assert second.wait_committed(make_id(2), WAIT_S)


def may_commit(layout, hosts, workers, id, timeout_s):
    """Take a snapshot that any host may abandon; return whether it is committed on all hosts."""
    for host, worker in zip(hosts, workers, strict=True):
        try:
            take(worker, id, host.name, part_of(layout, host, id))
        except (SnapshotDropped, InternalError):
            with contextlib.suppress(InternalError):
                worker.abandon(id)
    return all(worker.wait_committed(id, timeout_s) for worker in workers)


def test_a_server_commits_again_after_a_shortage_of_memory():
    with running(2) as hosts:
        layout, workers = open_all(hosts, 1)
        commit_all(layout, hosts, workers, make_id(1))
        steps = itertools.count(2)
        end_shortage = limit_memory(hosts[1].process.pid)
        for step in itertools.islice(steps, 30):
            may_commit(layout, hosts, workers, make_id(step), 0.1)
        end_shortage()
        wait_until(
            "a snapshot", lambda: may_commit(layout, hosts, workers, make_id(next(steps)), 1.0), WAIT_S
        )


def test_a_third_snapshot_while_two_are_in_progress_is_dropped_on_all_hosts_with_a_reason(tmp_path):
    with held_at(tmp_path, 3) as (hosts, controller):
        layout, workers = open_all(hosts, 1)
        commit_all(layout, hosts, workers, make_id(1))
        controller.hold(FailPoint.BEFORE_PARITY, [hosts[1].name], step=2)
        take_all(layout, hosts, workers, make_id(2))
        with pytest.raises(SnapshotDropped, match=r"no slot is free.*step 1.*committed.*step 2"):
            workers[1].begin(make_id(3))
        controller.release()
        for host in hosts:
            host.wait_phase(make_id(2), COMMITTED)
        for host, worker in zip(hosts, workers, strict=True):
            if (
                host is not hosts[1]
            ):  # these take snapshot 3 although host 1 dropped it: a slot is free by now
                take(worker, make_id(3), host.name, part_of(layout, host, make_id(3)))
                assert "no slot is free" in str(
                    host.wait_event(EventKind.SNAPSHOT_DROPPED, make_id(3)).detail["reason"]
                )
        commit_all(layout, hosts, workers, make_id(4))


# Damage.


def slot_of(host, offset, expected):
    """Return the path of the memfd of a server that has these bytes at that offset, so that a test can damage it."""
    for path in Path(f"/proc/{host.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if MEMFD_NAME in os.readlink(path):
                with path.open("r+b") as file:
                    file.seek(offset)
                    if file.read(len(expected)) == expected:
                        return path
    raise AssertionError("no slot has them")


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def test_damaged_memory_is_never_sent():
    with running(2) as hosts:
        layout, workers = open_all(hosts, 1)
        id, host = make_id(1), hosts[0]
        commit_all(layout, hosts, workers, id)
        part = part_of(layout, host, id)
        path = slot_of(host, 4096, part)
        flip(path, 4096 + 5)
        with pytest.raises(ChecksumMismatch, match="block 0 of the part"):
            host.read(id, Region.PART, 10)
        assert host.read(id, Region.PART, 10, offset=len(part) - 10) == part[-10:]
        parity_offset = 4096 + -(-len(part) // 4096) * 4096
        flip(path, parity_offset + 7)
        with pytest.raises(ChecksumMismatch, match="block 0 of parity row 0"):
            host.read(id, Region.PARITY, 10, row=0)
        flip(path, 20)
        with pytest.raises(ChecksumMismatch, match="header"):
            host.read(id, Region.PART, 10, offset=len(part) - 10)
        assert workers[0].open_own_part(id) is None
        assert host.wait_event(EventKind.SNAPSHOT_CORRUPT, id)


@pytest.mark.parametrize(("n", "m"), [(3, 1), (4, 2)])
def test_a_part_that_is_damaged_before_its_parity_is_encoded_is_dropped_and_blocks_no_slot(n, m, tmp_path):
    with held_at(tmp_path, n) as (hosts, controller):
        layout, workers = open_all(hosts, m)
        controller.hold(FailPoint.BEFORE_PARITY, [host.name for host in hosts], step=1)
        take_all(layout, hosts, workers, make_id(1))
        wait_until("hosts at the place", lambda: len(controller.list_held_hosts()) == n)
        part = part_of(layout, hosts[1], make_id(1))
        flip(slot_of(hosts[1], 4096, part), 4096 + 5)
        controller.release()
        for host in hosts:
            host.wait_event(EventKind.SNAPSHOT_DROPPED, make_id(1))
        for step in (2, 3, 4):
            commit_all(layout, hosts, workers, make_id(step))


# Refused.


def test_a_layout_that_needs_too_much_memory_is_refused_with_both_amounts():
    with running(1) as (host,):
        worker = host.worker()
        with pytest.raises(SnapshotRefused, match=r"need [\d.]+ GiB of memory .* available"):
            worker.open_layout(make_layout([host], 0, [2**50]))
        layout = make_layout([host], 0, SIZES[:1])
        worker.open_layout(layout)
        commit_all(layout, [host], [worker], make_id(1))


def test_an_older_generation_is_refused_but_its_snapshots_are_still_read():
    with running(3) as hosts:
        layout, workers = open_all(hosts, 1)
        commit_all(layout, hosts, workers, make_id(1))
        for worker in workers:
            worker.open_layout(make_layout(hosts, 1, SIZES[:3], generation=2), restored=make_id(1))
        with pytest.raises(StaleGeneration):
            workers[0].open_layout(layout)
        with pytest.raises(StaleGeneration):
            workers[0].begin(make_id(2))
        with PeerChannel(hosts[0].endpoint, CREDENTIALS, SERVICE) as channel:
            complete = CompleteRequest(id=make_id(2), host=hosts[1].name)
            with pytest.raises(StaleGeneration):
                channel.call(COMPLETE, complete, timeout_s=WAIT_S)
            piece = ParityPiece(
                id=make_id(2), stripe=0, row=0, offset=0, data=b"", checksum=CHECKSUM.name, checksums=()
            )
            with pytest.raises(StaleGeneration):
                channel.call(PARITY, piece, timeout_s=WAIT_S)
        part = part_of(layout, hosts[0], make_id(1))
        assert hosts[0].read(make_id(1), Region.PART, len(part)) == part


def test_an_absent_or_unfinished_snapshot_cannot_be_read(tmp_path):
    with held_at(tmp_path, 2) as (hosts, _):
        _, workers = open_all(hosts, 1)
        view = workers[0].begin(make_id(1))
        view[:4] = b"half"
        for id, region in ((make_id(1), Region.PART), (make_id(1), Region.PARITY), (make_id(7), Region.PART)):
            with pytest.raises(SnapshotMissing):
                hosts[0].read(id, region, 4)


def test_a_client_with_another_token_is_refused():
    with running(1) as (host,), PeerChannel(host.endpoint, Credentials("another-token"), SERVICE) as channel:
        request = ManifestRequest(id=make_id(1), host=host.name)
        with pytest.raises(Unauthenticated):
            channel.call(MANIFEST, request, timeout_s=WAIT_S)
        host.wait_event(EventKind.REQUEST_UNAUTHENTICATED)


# The end.


def test_slots_grow_with_the_state_and_the_worker_unmaps_retired_ones():
    with running(2) as hosts:
        layout, workers = open_all(hosts, 1)
        for step in (1, 2):
            commit_all(layout, hosts, workers, make_id(step))
        larger = make_layout(hosts, 1, [2_000_000, 3_000_001], generation=2)
        for worker in workers:
            worker.open_layout(larger, restored=make_id(2))
        assert_rebuilds(layout, hosts, hosts, make_id(2), 1, {0})
        for step in (3, 4, 5):
            commit_all(larger, hosts, workers, make_id(step, 2))
        assert_rebuilds(larger, hosts, hosts, make_id(5, 2), 1, {1})
        of_servers = [memfds_of(host.process.pid) for host in hosts]
        assert [len(slots) for slots in of_servers] == [2, 2]
        # The worker, which is this process, does not keep the memory of retired slots either.
        wait_until(
            "the end of the memory of others", lambda: memfds_of(os.getpid()) <= set().union(*of_servers)
        )


def memfds_of(pid):
    """Return the inodes of the slots' memory that a process has open; mmap keeps a second descriptor of each."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if MEMFD_NAME in os.readlink(path):
                found.add(os.stat(path).st_ino)
    return found


PARENT = """
import signal, sys
from tests.support.snapshot_servers import Host, make_id, make_layout, make_part, take
hosts = [Host(f"h{i}") for i in range(2)]
for host in hosts:
    host.wait(lambda host=host: host.endpoint != "")
workers = [host.worker() for host in hosts]
layout = make_layout(hosts, 1, [300_000, 5])
for worker in workers:
    worker.open_layout(layout)
# One host finishes, the other never does: its server asks again and again when the parent dies.
take(workers[0], make_id(1), hosts[0].name, make_part(make_id(1), hosts[0].name, 300_000))
print(*(host.process.pid for host in hosts), flush=True)
signal.pause()
"""


def test_processes_and_memory_are_released_when_the_agent_is_killed():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        servers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(servers) == 2
        assert [len(memfds_of(pid)) for pid in servers] == [2, 2]
        pidfds = [os.pidfd_open(pid) for pid in servers]
        parent.kill()
    try:
        wait_until("their end", lambda: all(map(has_ended, pidfds)))
    finally:
        for pidfd in pidfds:
            with os.fdopen(pidfd, "rb"), contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    wait_until(
        "the end of their memory",
        lambda: not any(Path(f"/proc/{pid}").exists() and memfds_of(pid) for pid in servers),
    )


def has_ended(pidfd):
    return bool(select.select([pidfd], [], [], 0)[0])


def test_a_waiting_worker_gets_an_error_when_its_server_dies():
    with running(1) as (host,):
        _, (worker,) = open_all([host], 0)
        failures = []

        def wait():
            try:
                worker.wait_committed(make_id(1), WAIT_S)
            except PeerUnreachable as error:
                failures.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        host.kill()
        waiting.join(WAIT_S)
        assert "has ended" in str(failures[0])
        with pytest.raises(PeerUnreachable):
            worker.begin(make_id(1))


def test_a_server_without_settings_exits_with_a_message():
    result = subprocess.run(
        [sys.executable, "-m", "resilient_jax.snapshot.server"],
        env={k: v for k, v in os.environ.items() if not k.startswith("RESILIENT_JAX")},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert result.returncode == 2
    assert "RESILIENT_JAX_SNAPSHOT_SERVER" in result.stderr
    assert "Traceback" not in result.stderr
