"""Reads of a snapshot over real sockets, with lost hosts and damaged memory: correct, or refused with the reason."""

import contextlib
import random
import threading
from itertools import combinations

import pytest

from resilient_jax.erasure import ChecksumName
from resilient_jax.errors import ChecksumMismatch, ExitCode, OperatorError, SnapshotLost
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.snapshot import snapshot_reader, stripe_decoder
from resilient_jax.snapshot.messages import Region
from resilient_jax.snapshot.snapshot_reader import PartRead, SnapshotReader
from resilient_jax.transport.peer_calls import MemoryAnswer
from tests.process.snapshot.memory_snapshot import CREDENTIALS, Kept, keep
from tests.support.patience import patience, wait_until

A, B, C, D, E, F = (HostName(name) for name in "abcdef")
WAIT_S = patience(6)
BLOCK = 4096


class Arena:
    """Opens the part of a `Keeper` in place of `LocalServerClient`."""

    def __init__(self, kept, host):
        self.keeper = kept.keepers[host]

    def open_own_part(self, id, /):
        return self.keeper.manifest, memoryview(self.keeper.part).toreadonly()


class Notes(list):
    """Records events as (kind, detail)."""

    def __call__(self, kind, **detail):
        self.append((kind, detail))

    def of(self, kind):
        return [detail for found, detail in self if found is kind]


@contextlib.contextmanager
def reader_of(kept: Kept, plan, host=A, *, local=False, check=lambda: None, notes=None):
    arena = Arena(kept, host) if local else None
    reader = SnapshotReader(
        plan, host, arena, CREDENTIALS, check=check, record_event=notes if notes is not None else Notes()
    )
    try:
        yield reader
    finally:
        reader.close()


def read(reader, host, offset, length):
    target = bytearray(b"\xaa" * length)
    reader.read_all([PartRead(host, offset, memoryview(target))])
    return bytes(target)


@contextlib.contextmanager
def keeping(*arguments, **options):
    kept = keep(*arguments, **options)
    try:
        yield kept
    finally:
        kept.close()


def unequal(n, unit):
    """Return lengths of n parts: all different, one of them 0, none a multiple of the block size."""
    return [0 if i == 1 else unit + 3001 * i + 13 for i in range(n)]


def total(ranges, hosts):
    return sum(stop - start for host, start, stop in ranges if host in hosts)


@pytest.mark.parametrize(("n", "m"), [(4, 1), (4, 2), (6, 2), (5, 1)])
def test_every_range_is_read_correctly_with_any_m_hosts_lost(n, m, monkeypatch):
    monkeypatch.setattr(snapshot_reader, "UNIT_BYTES", 4 * BLOCK)  # a part has several units
    rng = random.Random(n * 10 + m)
    with keeping([unequal(n, 30000)], m) as kept:
        hosts = list(kept.parts)
        for count in range(m + 1):
            for lost in combinations(hosts, count):
                unaware_of = tuple(host for host in lost if rng.random() < 0.5)
                me = next(host for host in hosts if host not in lost)
                plan = kept.plan(*lost, unaware_of=unaware_of)
                with reader_of(kept, plan, me, local=True) as reader:
                    assert {h: found.host for h, found in reader.read_manifests().items()} == {
                        h: h for h in hosts
                    }
                    ranges = [(host, 0, len(kept.parts[host])) for host in hosts]
                    for _ in range(12):
                        host = rng.choice(hosts)
                        start, stop = sorted(rng.randint(0, len(kept.parts[host])) for _ in range(2))
                        ranges.append((host, start, stop))
                    for host, start, stop in ranges:
                        assert read(reader, host, start, stop - start) == kept.parts[host][start:stop]
                    assert reader.bytes_local == total(ranges, {me})
                    assert reader.bytes_decoded == total(ranges, lost)
                    assert reader.bytes_peer == total(ranges, set(hosts).difference(lost, {me}))


def test_parts_of_many_units_with_blocks_of_the_real_size_are_read():
    mib = 2**20
    lengths = [9 * mib + 5, 7 * mib, 8 * mib + 1, 9 * mib]
    with keeping([lengths], 1) as kept, reader_of(kept, kept.plan(D)) as reader:
        for host, part in kept.parts.items():
            assert read(reader, host, 0, len(part)) == part
        assert read(reader, D, 4 * mib - 3, mib) == kept.parts[D][4 * mib - 3 : 5 * mib - 3]


def test_blocks_are_verified_with_the_checksum_of_the_manifest():
    with (
        keeping([[9000] * 3], 1, checksum=ChecksumName.CRC32) as kept,
        reader_of(kept, kept.plan(C)) as reader,
    ):
        assert read(reader, C, 0, 9000) == kept.parts[C]


def test_parts_of_several_groups_are_read():
    with keeping([[5000, 6000, 7000], [8000, 9000]], 1) as kept, reader_of(kept, kept.plan(B, E)) as reader:
        assert set(reader.read_manifests()) == {A, B, C, D, E}
        for host, part in kept.parts.items():
            assert read(reader, host, 0, len(part)) == part


def test_only_the_blocks_that_are_needed_are_read():
    with keeping([[40 * BLOCK] * 4], 1) as kept, reader_of(kept, kept.plan(D)) as reader:
        assert read(reader, D, 3 * BLOCK + 5, 100) == kept.parts[D][3 * BLOCK + 5 :][:100]
        assert kept.requested() == 3 * BLOCK  # k shards of one block
        assert (reader.bytes_local, reader.bytes_peer, reader.bytes_decoded) == (0, 0, 100)
        assert read(reader, D, 3 * BLOCK + 105, 200) == kept.parts[D][3 * BLOCK + 105 :][:200]
        assert kept.requested() == 3 * BLOCK  # the same block again
        assert read(reader, B, 2 * BLOCK - 1, 2) == kept.parts[B][2 * BLOCK - 1 :][:2]
        assert kept.requested() == 3 * BLOCK + 2 * BLOCK
        assert (reader.bytes_peer, reader.bytes_decoded) == (2, 300)


def test_the_own_part_is_read_from_memory_without_a_request():
    with keeping([[9 * BLOCK + 7] * 3], 1) as kept, reader_of(kept, kept.plan(), local=True) as reader:
        assert read(reader, A, 0, 9 * BLOCK + 7) == kept.parts[A]
        assert kept.requested() == 0
        assert reader.bytes_local == 9 * BLOCK + 7


def test_bytes_that_were_read_are_no_view_of_the_part():
    with keeping([[9 * BLOCK] * 3], 1) as kept, reader_of(kept, kept.plan(), local=True) as reader:
        target = bytearray(9 * BLOCK)
        reader.read_all([PartRead(A, 0, memoryview(target))])
        kept.keepers[A].part[:] = bytes(9 * BLOCK)
        assert target == kept.parts[A]


def test_the_own_part_is_requested_from_the_server_if_it_is_not_in_memory():
    with keeping([[9000] * 3], 1) as kept, reader_of(kept, kept.plan()) as reader:
        assert read(reader, A, 0, 9000) == kept.parts[A]
        assert (reader.bytes_local, reader.bytes_peer) == (0, 9000)


@pytest.mark.parametrize("local", [True, False])
def test_only_a_damaged_block_is_decoded_with_an_event(local):
    notes = Notes()
    with keeping([[20 * BLOCK] * 4], 1) as kept:
        kept.flip(A, 7 * BLOCK + 9)
        with reader_of(kept, kept.plan(), local=local, notes=notes) as reader:
            assert read(reader, A, 0, 20 * BLOCK) == kept.parts[A]
            assert (reader.bytes_decoded, reader.bytes_local + reader.bytes_peer) == (BLOCK, 19 * BLOCK)
    assert [(note["part"], note["to"]) for note in notes.of(EventKind.SNAPSHOT_FALLBACK)] == [
        ("a", "decoded")
    ]
    assert "corrupt" in notes.of(EventKind.SNAPSHOT_FALLBACK)[0]["reason"]


@pytest.mark.parametrize("offset", [0, BLOCK - 1, 13 * BLOCK + 77, 20 * BLOCK - 1])
def test_a_corrupt_block_of_a_survivor_is_an_erasure(offset):
    notes = Notes()
    with keeping([[20 * BLOCK] * 5], 2) as kept:
        kept.flip(B, offset)
        with reader_of(kept, kept.plan(E), C, notes=notes) as reader:
            for host in (E, B):
                assert read(reader, host, 0, 20 * BLOCK) == kept.parts[host]
            assert reader.bytes_decoded == 20 * BLOCK + BLOCK
    bad = notes.of(EventKind.SNAPSHOT_BLOCK_CORRUPT)
    assert {note["source"] for note in bad} == {"b"}
    assert all(f"block {offset // BLOCK}" in note["reason"] for note in bad)


def test_a_corrupt_block_of_parity_is_an_erasure():
    notes = Notes()
    with keeping([[20 * BLOCK] * 5], 2) as kept:
        for host in (A, B, C, D):
            kept.flip(host, 3, 0)
        with reader_of(kept, kept.plan(E), C, notes=notes) as reader:
            assert read(reader, E, 0, 20 * BLOCK) == kept.parts[E]
    bad = notes.of(EventKind.SNAPSHOT_BLOCK_CORRUPT)
    assert bad
    assert all("parity row 0" in note["reason"] for note in bad)


@pytest.mark.parametrize("row", [0, 1])
def test_corrupt_parity_without_a_spare_shard_loses_only_the_chunks_of_its_stripe(row):
    with keeping([[12 * BLOCK] * 5], 2) as kept:
        chunk = kept.chunks[E]
        assert chunk == 4 * BLOCK
        kept.flip(A, 3, row)
        # Stripe (0 - row) mod 5 has k shards left, one of them corrupt; d and e have these chunks in it.
        stripe = -row % 5
        in_stripe = {D: (3 - 2 - stripe) % 5, E: (4 - 2 - stripe) % 5}
        for host, bad in in_stripe.items():
            for number in range(3):
                with reader_of(kept, kept.plan(D, E), C) as reader:
                    if number != bad:
                        start = number * chunk
                        assert read(reader, host, start, chunk) == kept.parts[host][start : start + chunk]
                        continue
                    with pytest.raises(SnapshotLost, match=rf"parity row {row} from 0 to 1 is damaged"):
                        read(reader, host, number * chunk, chunk)


def test_damage_beyond_parity_loses_only_those_blocks_and_they_are_listed():
    with keeping([[12 * BLOCK] * 4], 1) as kept:
        # D is lost: its block 0 is in a stripe with the first blocks of chunks of two other hosts. The flipped bits
        # differ, since with one row of parity the same bit flipped twice would cancel out.
        for number, host in enumerate((A, B, C)):
            for chunk in range(3):
                kept.flip(host, chunk * kept.chunks[D] + number)
        with reader_of(kept, kept.plan(D)) as reader:
            assert read(reader, D, BLOCK, 3 * BLOCK) == kept.parts[D][BLOCK : 4 * BLOCK]
            target = bytearray(12 * BLOCK)
            with pytest.raises(SnapshotLost) as lost:
                reader.read_all([PartRead(D, 0, memoryview(target))])
    assert lost.value.exit_code is ExitCode.STATE_LOST
    assert isinstance(lost.value, OperatorError)
    text = str(lost.value)
    assert text.startswith("the snapshot of step 12 (generation 3) cannot be rebuilt: bytes ")
    assert "that host d kept, with bytes of d/" in text
    assert (
        "(its group of 4 has parity 1): its stripe has 4 shards, of which 3 are needed, and 1 found" in text
    )
    assert "of its part is damaged" in text
    assert "The parts of a, b, c survive. Resume from a checkpoint" in text


def test_a_part_is_lost_if_any_two_hosts_are_lost_with_parity_one():
    with keeping([[5000] * 4], 1) as kept:
        for lost in combinations(kept.parts, 2):
            me = next(host for host in kept.parts if host not in lost)
            with reader_of(kept, kept.plan(*lost), me) as reader, pytest.raises(SnapshotLost) as error:
                read(reader, lost[0], 0, 5000)
            assert "it is not among those that have the snapshot complete" in str(error.value)
        with reader_of(kept, kept.plan(A, B, unaware_of=(A, B)), C) as reader:
            assert read(reader, D, 0, 5000) == kept.parts[D]
            with pytest.raises(SnapshotLost, match=r"no process listens there.* The parts of c, d survive"):
                read(reader, A, 0, 5000)


def test_without_parity_only_the_part_of_a_lost_host_is_lost():
    with keeping([[5000] * 3], 0) as kept, reader_of(kept, kept.plan(B)) as reader:
        assert read(reader, C, 0, 5000) == kept.parts[C]
        assert set(reader.read_manifests()) == {A, B, C}
        with pytest.raises(
            SnapshotLost, match=r"host b kept.* \(its group of 3 has parity 0\): it is not among"
        ):
            read(reader, B, 0, 5000)


def test_corrupt_blocks_of_two_survivors_that_do_not_overlap_are_decoded():
    with keeping([[6 * BLOCK] * 5], 2) as kept:
        chunk = kept.chunks[A]
        assert chunk == 2 * BLOCK
        # Chunk 0 of a is in stripe 3, with chunk 1 of b and chunk 2 of c, and parity on d and e.
        kept.flip(B, chunk + 5)  # in the first block of the chunk
        kept.flip(C, 2 * chunk + BLOCK + 5)  # in the second block
        with reader_of(kept, kept.plan(A), D) as reader:
            assert read(reader, A, 0, chunk) == kept.parts[A][:chunk]
            assert reader.bytes_decoded == chunk


def test_a_survivor_that_serves_damaged_bytes_is_identified():
    notes = Notes()
    with keeping([[20 * BLOCK] * 5], 2) as kept:
        kept.keepers[B].believes = True
        for block in range(20):
            kept.flip(B, block * BLOCK + 1)
        with reader_of(kept, kept.plan(E), C, notes=notes) as reader:
            for host in (E, B):
                assert read(reader, host, 0, 20 * BLOCK) == kept.parts[host]
    assert {note["source"] for note in notes.of(EventKind.SNAPSHOT_BLOCK_CORRUPT)} == {"b"}


def test_damaged_bytes_of_a_survivor_are_a_loss_without_spare_parity():
    with keeping([[20 * BLOCK] * 4], 1) as kept:
        kept.keepers[B].believes = True
        for block in range(20):
            kept.flip(B, block * BLOCK + 1)
        with (
            reader_of(kept, kept.plan(D), C) as reader,
            pytest.raises(SnapshotLost, match="is corrupt"),
        ):
            read(reader, D, 0, 20 * BLOCK)


def test_bytes_that_change_in_transit_are_an_erasure():
    notes = Notes()
    with keeping([[20 * BLOCK] * 4], 2) as kept:
        kept.keepers[B].lies_on_the_way = True
        with reader_of(kept, kept.plan(D), C, notes=notes) as reader:
            for host in (D, B):
                assert read(reader, host, 0, 20 * BLOCK) == kept.parts[host]
    assert "changed in transit" in notes.of(EventKind.SNAPSHOT_BLOCK_CORRUPT)[0]["reason"]


def test_a_part_whose_server_stops_during_a_read_is_decoded_from_the_stripes():
    notes = Notes()
    with keeping([[20 * BLOCK] * 4], 1) as kept, reader_of(kept, kept.plan(), C, notes=notes) as reader:
        assert read(reader, B, 0, 10 * BLOCK) == kept.parts[B][: 10 * BLOCK]
        kept.keepers[B].stop()
        assert read(reader, B, 10 * BLOCK, 10 * BLOCK) == kept.parts[B][10 * BLOCK :]
        assert (reader.bytes_peer, reader.bytes_decoded) == (10 * BLOCK, 10 * BLOCK)
        assert read(reader, B, 0, 20 * BLOCK) == kept.parts[B]
    assert [note["source"] for note in notes.of(EventKind.SNAPSHOT_SOURCE_FAILED)] == ["b"]
    assert [note["part"] for note in notes.of(EventKind.SNAPSHOT_FALLBACK)] == ["b"]


def test_a_suspect_host_is_used_again_if_no_other_source_is_left():
    with keeping([[3 * BLOCK] * 2], 0) as kept, reader_of(kept, kept.plan(), A) as reader:
        reader.read_manifests()
        keeper = kept.keepers[B]
        give, failed = keeper.give, []

        def fail_once(request):
            if not failed:
                failed.append(request)
                raise OSError("too many open files")
            return give(request)

        keeper.give = fail_once
        assert read(reader, B, 0, 3 * BLOCK) == kept.parts[B]


def test_a_damaged_manifest_is_read_from_another_member():
    notes = Notes()
    with keeping([[5000] * 3], 1) as kept:
        damaged = bytearray(kept.keepers[A].manifests[C])
        damaged[40] ^= 1
        kept.keepers[A].manifests[C] = bytes(damaged)
        kept.keepers[B].manifests[B] = kept.keepers[B].manifests[A]
        with reader_of(kept, kept.plan(C), B, notes=notes) as reader:
            found = reader.read_manifests()
        assert found == {host: kept.keepers[host].manifest for host in kept.parts}
    assert {note["source"] for note in notes.of(EventKind.SNAPSHOT_BLOCK_CORRUPT)} == {"a"}
    assert {note["source"] for note in notes.of(EventKind.SNAPSHOT_SOURCE_FAILED)} == {"b"}


def test_a_manifest_that_no_member_has_is_a_loss():
    with keeping([[5000] * 3], 1) as kept:
        for keeper in kept.keepers.values():
            keeper.manifests.pop(C, None)
        with (
            reader_of(kept, kept.plan(C)) as reader,
            pytest.raises(
                SnapshotLost,
                match="the contents of host c's part are unknown: no member of its group has its manifest",
            ),
        ):
            reader.read_manifests()


def test_an_own_part_that_cannot_be_opened_is_read_through_the_server_with_an_event():
    class Broken:
        def open_own_part(self, id, /):
            raise ChecksumMismatch("manifest is damaged")

    notes = Notes()
    with keeping([[5000] * 3], 1) as kept:
        reader = SnapshotReader(kept.plan(), A, Broken(), CREDENTIALS, check=lambda: None, record_event=notes)
        assert read(reader, A, 0, 5000) == kept.parts[A]
        reader.close()
    assert notes.of(EventKind.SNAPSHOT_FALLBACK)[0]["reason"] == "manifest is damaged"


class Enough(Exception):
    """An exception that `check` raises."""


def test_an_exception_of_check_ends_a_read_while_a_server_hangs():
    with keeping([[5000] * 3], 1) as kept:
        hanging, release = threading.Event(), threading.Event()

        def hang(request):
            hanging.set()
            release.wait(WAIT_S)
            return MemoryAnswer(memoryview(b""))

        def check():
            if hanging.is_set():
                raise Enough

        for keeper in kept.keepers.values():
            keeper.give = hang
        with reader_of(kept, kept.plan(), check=check) as reader:
            with pytest.raises(Enough):
                read(reader, B, 0, 5000)
            release.set()


def test_a_loss_is_raised_at_once_while_another_server_hangs():
    with keeping([[5000] * 3], 0) as kept, reader_of(kept, kept.plan(C)) as reader:
        reader.read_manifests()
        hanging, release = threading.Event(), threading.Event()

        def hang(request):
            hanging.set()
            release.wait()
            return MemoryAnswer(memoryview(b""))

        kept.keepers[B].give = hang
        try:
            with pytest.raises(SnapshotLost, match="host c kept"):
                reader.read_all([PartRead(host, 0, memoryview(bytearray(5000))) for host in (B, C)])
        finally:
            release.set()


def test_close_ends_all_threads_and_releases_the_own_part():
    def ours():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("rj-snapshot")]

    with keeping([[50000] * 4], 1) as kept:
        with reader_of(kept, kept.plan(D), local=True) as reader:
            assert read(reader, D, 0, 50000) == kept.parts[D]
            assert read(reader, A, 0, 50000) == kept.parts[A]
        wait_until("the end of our threads", lambda: not ours(), WAIT_S)
        kept.keepers[A].part.append(0)  # a bytearray cannot grow while a view of it exists


def test_survivors_share_the_load_of_a_decode(monkeypatch):
    monkeypatch.setattr(stripe_decoder, "SPAN_BYTES", BLOCK)  # a chunk is read in several spans
    with keeping([[60 * BLOCK] * 6], 2) as kept, reader_of(kept, kept.plan(F)) as reader:
        assert read(reader, F, 0, 60 * BLOCK) == kept.parts[F]
        asked = [kept.requested(host) for host in (A, B, C, D, E)]
        assert sum(asked) == 4 * 60 * BLOCK
        assert max(asked) <= min(asked) + 12 * BLOCK
        assert {request.region for host in (A, B) for request in kept.keepers[host].requests} == set(Region)
