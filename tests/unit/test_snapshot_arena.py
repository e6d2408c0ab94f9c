"""The arena: what may be written where, what a slot's mark vouches for, what is dropped."""

import contextlib
import fcntl
import itertools
import mmap
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from resilient_jax.erasure import choose_checksum
from resilient_jax.errors import (
    CallerError,
    ChecksumMismatch,
    SnapshotDropped,
    SnapshotMissing,
    SnapshotRefused,
    StaleGeneration,
)
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.snapshots import ParityGroup, SnapshotId, SnapshotLayout, SnapshotPhase
from resilient_jax.snapshot import memory_budget
from resilient_jax.snapshot.commit_votes import CommitVotes
from resilient_jax.snapshot.manifest import (
    PartContents,
    PartManifest,
    checksum_blocks,
    decode_manifest,
    encode_manifest,
)
from resilient_jax.snapshot.messages import (
    PARITY_PIECE_BYTES,
    CommitOutcome,
    ParityPiece,
    ServerNotification,
    SlotRetired,
    SnapshotSettled,
)
from resilient_jax.snapshot.slot_choice import choose_slot
from resilient_jax.snapshot.slot_contents import cut_blocks
from resilient_jax.snapshot.slot_memory import MEMFD_NAME, SlotHeader, SlotLayout, SlotMemory, SlotPhase
from resilient_jax.snapshot.snapshot_slots import SnapshotSlots
from resilient_jax.snapshot.stripes import MIN_BLOCK_BYTES, Grid, cut_grid

HOST, PEER = HostName("a"), HostName("b")
CHECKSUM = choose_checksum()
BLOCK = MIN_BLOCK_BYTES
SHAPE = SlotLayout(part_bytes=10_000, parity_rows=2, grid=Grid(4096, 8192))


def make_id(step, generation=1):
    return SnapshotId(step, GenerationNumber(generation))


def make_layout(part_bytes=300_000, generation=1, peer_bytes=10):
    return SnapshotLayout(
        generation=GenerationNumber(generation),
        groups=(ParityGroup(hosts=(HOST, PEER), parity=1),),
        part_bytes={HOST: part_bytes, PEER: peer_bytes},
        server_endpoints={HOST: "a:1", PEER: "b:1"},
        root=HOST,
    )


def make_manifest(id, part=b"", host=HOST):
    """As the layout of `make_layout` cuts parts of that length."""
    block_bytes = cut_grid([len(part), 10], 1).block_bytes
    return encode_manifest(
        PartManifest(
            id=id,
            host=host,
            contents=PartContents(),
            part_bytes=len(part),
            checksum=CHECKSUM.name,
            block_bytes=block_bytes,
            block_checksums=checksum_blocks(part, CHECKSUM, block_bytes),
        )
    )


def make_piece(id, chunk, offset=0, *, stripe=0, row=0):
    data = chunk[offset : offset + PARITY_PIECE_BYTES]
    blocks = cut_blocks(data, cut_grid([len(chunk)], 1).block_bytes)
    return ParityPiece(
        id=id,
        stripe=stripe,
        row=row,
        offset=offset,
        data=data,
        checksum=CHECKSUM.name,
        checksums=tuple(map(CHECKSUM.compute, blocks)),
    )


@dataclass
class Heard:
    """A listener that keeps what it hears."""

    events: list[EventKind] = field(default_factory=list)
    notices: list[ServerNotification] = field(default_factory=list)
    dropped: list[SnapshotId] = field(default_factory=list)
    holding_changes: int = 0

    def happened(self, kind, id=None, **detail):
        self.events.append(kind)

    def holding_changed(self):
        self.holding_changes += 1

    def notify_worker(self, notice):
        self.notices.append(notice)

    def dropped_here(self, held, layout, reason):
        self.dropped.append(held)


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def arena(heard):
    made = SnapshotSlots(HOST, heard)
    yield made
    made.close()


WRITER = object()


def take(arena, id, phase=SlotPhase.COMMITTED, part_bytes=300_000):
    """A snapshot of `id`, as far as `phase`."""
    held = arena.begin(id, WRITER)
    part = bytes([id.step]) * part_bytes
    held.part[:] = part
    if phase >= SlotPhase.PART:
        arena.seal(arena.finish(id, WRITER), make_manifest(id, part))
    for reached in (SlotPhase.COMPLETE, SlotPhase.COMMITTED):
        if phase >= reached:
            arena.advance(held, reached)
    return held


# Slots.


def test_a_slot_is_private_sealed_against_shrinking_and_wholly_in_memory():
    slot = SlotMemory(0, SHAPE.mapped_bytes)
    try:
        assert stat.S_IMODE(os.fstat(slot.descriptor).st_mode) == 0o600
        assert fcntl.fcntl(slot.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            os.ftruncate(slot.descriptor, 4096)
        assert os.fstat(slot.descriptor).st_blocks * 512 == SHAPE.mapped_bytes
        assert not os.get_inheritable(slot.descriptor)
    finally:
        slot.close()


def test_the_regions_of_a_slot_lie_apart_on_whole_pages():
    for part, rows, chunk in itertools.product((0, 1, 4096, 300_001), (0, 1, 3), (0, 4096, 12 * 2**20)):
        shape = SlotLayout(part_bytes=part, parity_rows=rows, grid=Grid(4096, chunk))
        ends = [shape.part_offset, shape.part_offset + part, shape.parity_offset]
        ends += [shape.parity_offset + rows * chunk, shape.checksums_offset]
        ends += [shape.checksums_offset + rows * chunk // 4096 * 4, shape.mapped_bytes]
        assert ends == sorted(ends)
        assert all(offset % mmap.PAGESIZE == 0 for offset in (shape.parity_offset, shape.mapped_bytes))


def test_a_mark_comes_back_and_every_flipped_bit_of_it_is_found():
    slot = SlotMemory(0, SHAPE.mapped_bytes)
    try:
        mark = SlotHeader(
            id=make_id(7, 3),
            phase=SlotPhase.COMPLETE,
            layout=SHAPE,
            manifest_bytes=5,
            manifest_crc=9,
            wall_s=1.5,
        )
        slot.write_header(mark)
        assert slot.read_header() == mark
        length = len(bytes(slot.view[:4096]).rstrip(b"\0"))
        for at, bit in itertools.product(range(length), range(8)):
            slot.view[at] ^= 1 << bit
            with pytest.raises(ChecksumMismatch):
                slot.read_header()
            slot.view[at] ^= 1 << bit
        assert slot.read_header() == mark
    finally:
        slot.close()


def test_an_empty_slot_has_no_mark():
    slot = SlotMemory(0, SHAPE.mapped_bytes)
    try:
        with pytest.raises(ChecksumMismatch):
            slot.read_header()
    finally:
        slot.close()


def test_more_memory_than_the_machine_has_is_refused():
    with pytest.raises(SnapshotRefused, match="memory"):
        SlotMemory(0, 2**62)


# Which slot.


@dataclass
class Content:
    id: SnapshotId
    phase: SlotPhase


def content(text):
    """`c1.2` is step 1 of generation 2, committed; the phases are w, p, k (complete), c; `-` is an empty slot."""
    if text == "-":
        return None
    step, generation = map(int, text[1:].split("."))
    phases = {"w": SlotPhase.WRITING, "p": SlotPhase.PART, "k": SlotPhase.COMPLETE, "c": SlotPhase.COMMITTED}
    return Content(make_id(step, generation), phases[text[0]])


@pytest.mark.parametrize(
    ("slots", "chosen"),
    [
        ("- -", 0),
        ("w1.2 -", 1),
        ("c1.2 -", 1),
        ("c1.2 c2.2", 0),
        ("c3.2 c2.2", 1),
        ("c9.1 c2.2", 0),  # an older generation's, though of more steps
        ("c1.2 w2.2", None),
        ("c1.2 p2.2", None),
        ("c1.2 k2.2", None),
        ("k1.2 p2.2", None),
        ("k1.2 k2.2", None),
        ("c1.1 k2.1", 1),  # generation 1 is over and nobody says that 2 counts
        ("k1.1 k2.1", 0),
        ("k2.1 w3.2", None),
        ("k2.1 k3.2", None),
        ("k2.1 c3.2", 0),
    ],
)
def test_the_slot_of_what_can_still_be_needed_is_never_chosen(slots, chosen):
    index, reason = choose_slot([content(text) for text in slots.split()], GenerationNumber(2))
    assert index == chosen
    assert bool(reason) == (chosen is None)


def test_the_newest_committed_snapshot_keeps_its_slot_while_others_come_and_go(arena):
    arena.open(make_layout())
    for step in range(1, 5):
        before = [status.id.step for status in arena.statuses()]
        held = arena.begin(make_id(step), WRITER)
        kept = [status.id.step for status in arena.statuses()]
        assert kept == before[-1:]
        held.part[:] = bytes([step]) * len(held.part)
        arena.finish(held.id, WRITER)
        arena.advance(held, SlotPhase.COMPLETE)
        arena.advance(held, SlotPhase.COMMITTED)
    assert [(s.id.step, s.phase) for s in arena.statuses()] == [
        (3, SnapshotPhase.COMMITTED),
        (4, SnapshotPhase.COMMITTED),
    ]


def test_a_third_snapshot_is_dropped_while_two_are_under_way_and_the_root_hears_it(arena, heard):
    arena.open(make_layout())
    take(arena, make_id(1), SlotPhase.PART)
    take(arena, make_id(2), SlotPhase.PART)
    with pytest.raises(SnapshotDropped, match=r"no slot is free.*step 1.*is part.*step 2"):
        arena.begin(make_id(3), WRITER)
    assert heard.dropped == [make_id(3)]
    assert heard.events.count(EventKind.SNAPSHOT_DROPPED) == 1
    with pytest.raises(SnapshotDropped, match="no slot is free"):  # later, too: on other hosts it is gone
        arena.find(make_id(3), SlotPhase.PART)


# What the mark vouches for.


def test_nothing_of_a_part_is_given_before_it_is_finished(arena):
    arena.open(make_layout())
    held = arena.begin(make_id(1), WRITER)
    with pytest.raises(SnapshotMissing, match="writing"):
        arena.find(make_id(1), SlotPhase.PART)
    assert held.slot.read_mark().phase is SlotPhase.WRITING
    assert arena.statuses() == ()


def test_a_snapshot_whose_mark_is_damaged_is_not_given_and_not_reported(arena, heard):
    arena.open(make_layout())
    held = take(arena, make_id(1))
    held.slot.memory[17] ^= 4
    with pytest.raises(ChecksumMismatch, match="mark of slot"):
        arena.find(make_id(1), SlotPhase.PART)
    assert arena.statuses() == ()
    assert EventKind.SNAPSHOT_CORRUPT in heard.events


def test_a_mark_that_is_whole_but_of_something_else_vouches_for_nothing(arena):
    arena.open(make_layout())
    held = take(arena, make_id(1))
    held.slot.write_mark(SlotHeader(id=make_id(2), phase=SlotPhase.COMMITTED, layout=held.shape))
    with pytest.raises(ChecksumMismatch, match="overwritten"):
        arena.find(make_id(1), SlotPhase.PART)
    assert arena.statuses() == ()


def test_a_damaged_block_of_a_part_is_named_and_the_others_are_given(arena):
    arena.open(make_layout(part_bytes=3 * BLOCK))
    held = take(arena, make_id(1), part_bytes=3 * BLOCK)
    held.part[BLOCK + 5] ^= 1
    assert held.view_part(0, BLOCK) == bytes([1]) * BLOCK
    assert held.view_part(2 * BLOCK, 10) == bytes([1]) * 10
    for offset, length in ((BLOCK, 1), (BLOCK - 1, 2), (2 * BLOCK - 1, 1)):
        with pytest.raises(ChecksumMismatch, match="block 1 of the part"):
            held.view_part(offset, length)


def test_nothing_is_read_behind_a_parts_end(arena):
    arena.open(make_layout(part_bytes=100, peer_bytes=9000))
    held = take(arena, make_id(1), part_bytes=100)
    assert held.view_part(90, 10) == bytes([1]) * 10
    with pytest.raises(CallerError, match="bytes 90 to 101, expected none outside 0 to 100"):
        held.view_part(90, 11)


def test_parity_comes_back_and_a_damaged_block_or_digest_is_found(arena):
    arena.open(make_layout(part_bytes=2 * PARITY_PIECE_BYTES + 4096))
    id = make_id(1)
    held = take(arena, id, SlotPhase.PART, part_bytes=2 * PARITY_PIECE_BYTES + 4096)
    chunk = os.urandom(held.shape.chunk_bytes)
    for offset in (PARITY_PIECE_BYTES, 2 * PARITY_PIECE_BYTES, PARITY_PIECE_BYTES):  # in any order, and twice
        assert not held.has_parity()
        arena.store_piece(make_piece(id, chunk, offset))
    arena.store_piece(make_piece(id, chunk))
    assert held.has_parity()
    assert held.view_parity(0, 0, len(chunk)) == chunk
    held.parity(0)[held.shape.block_bytes] ^= 128
    with pytest.raises(ChecksumMismatch, match="block 1 of parity row 0"):
        held.view_parity(0, 0, len(chunk))
    held.parity(0)[held.shape.block_bytes] ^= 128
    held.slot.memory[held.shape.digests_offset] ^= 1
    with pytest.raises(ChecksumMismatch, match="block 0 of parity row 0"):
        held.view_parity(0, 7, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"stripe": 1},
        {"row": 1},
        {"row": -1},
        {"offset": 4096},
        {"offset": PARITY_PIECE_BYTES},
        {"data": b"short"},
        {"digests": ()},
    ],
    ids=str,
)
def test_parity_that_does_not_belong_here_is_refused(arena, change):
    arena.open(make_layout())
    take(arena, make_id(1), SlotPhase.PART)
    piece = make_piece(make_id(1), bytes(arena.find(make_id(1), SlotPhase.PART).shape.chunk_bytes))
    fields = {name: getattr(piece, name) for name in piece.__struct_fields__}
    with pytest.raises(CallerError, match="parity for a"):
        arena.store_piece(ParityPiece(**{**fields, **change}))


def test_parity_that_was_damaged_on_the_way_is_refused_and_nothing_is_kept(arena):
    arena.open(make_layout())
    held = take(arena, make_id(1), SlotPhase.PART)
    piece = make_piece(make_id(1), os.urandom(held.shape.chunk_bytes))
    damaged = bytearray(piece.data)
    damaged[5] ^= 2
    fields = {name: getattr(piece, name) for name in piece.__struct_fields__}
    with pytest.raises(ChecksumMismatch, match="that came"):
        arena.store_piece(ParityPiece(**{**fields, "data": bytes(damaged)}))
    assert not held.has_parity()


def test_a_manifest_of_another_part_or_a_damaged_one_is_not_kept(arena):
    arena.open(make_layout())
    id, part = make_id(1), bytes(10)
    held = take(arena, id, SlotPhase.PART)
    for manifest in (
        make_manifest(make_id(2), part, PEER),
        make_manifest(id, part),
        make_manifest(id, b"", PEER),
    ):
        with pytest.raises(CallerError, match="manifest: found"):
            held.store_manifest(PEER, manifest)
    with pytest.raises(ChecksumMismatch):
        held.store_manifest(PEER, make_manifest(id, part, PEER)[:-1] + b"?")
    assert held.missing_manifests() == [PEER]


def test_a_member_that_snapshots_another_state_is_refused(arena):
    arena.open(make_layout())
    id = make_id(1)
    held = take(arena, id, SlotPhase.PART)
    theirs = msgspec.structs.replace(
        decode_manifest(make_manifest(id, bytes(10), PEER)), contents=PartContents(strings={"['host']": "b"})
    )
    with pytest.raises(CallerError, match="b snapshots another state than a"):
        held.store_manifest(PEER, encode_manifest(theirs))
    assert held.missing_manifests() == [PEER]


def test_a_part_is_nobodys_until_it_is_checksummed(arena):
    arena.open(make_layout())
    held = take(arena, make_id(1), SlotPhase.WRITING)
    arena.finish(held.id, WRITER)
    assert held.slot.read_mark().phase is SlotPhase.WRITING
    with pytest.raises(SnapshotMissing, match="expected part"):
        arena.find(held.id, SlotPhase.PART)
    arena.seal(held, make_manifest(held.id, bytes(held.part)))
    assert arena.find(held.id, SlotPhase.PART) is held


def test_a_part_that_was_dropped_while_it_was_checksummed_is_not_sealed(arena):
    arena.open(make_layout())
    held = take(arena, make_id(1), SlotPhase.WRITING)
    arena.finish(held.id, WRITER)
    arena.drop(held.id, "another host gave it up")
    with pytest.raises(SnapshotDropped, match="another host"):
        arena.seal(held, make_manifest(held.id, bytes(300_000)))


def test_manifests_of_members_come_back_whole(arena):
    arena.open(make_layout())
    held = take(arena, make_id(1), SlotPhase.PART)
    assert held.missing_manifests() == [PEER]
    with pytest.raises(SnapshotMissing, match="manifest of b"):
        held.manifest_of(PEER)
    theirs = make_manifest(make_id(1), bytes(10), PEER)
    held.store_manifest(PEER, theirs)
    assert (held.manifest_of(PEER), held.missing_manifests()) == (theirs, [])
    assert held.manifest_of(HOST) == make_manifest(make_id(1), bytes([1]) * 300_000)
    assert held.nbytes == held.shape.mapped_bytes + len(theirs) + len(held.manifest_of(HOST))


# Writers.


def test_what_a_dead_worker_began_is_dropped_and_what_it_finished_stays(arena, heard):
    arena.open(make_layout())
    take(arena, make_id(1), SlotPhase.PART)
    take(arena, make_id(2), SlotPhase.WRITING)
    arena.abandon_all(WRITER, "it is dead")
    assert arena.find(make_id(1), SlotPhase.PART).id == make_id(1)
    with pytest.raises(SnapshotDropped, match="it is dead"):
        arena.find(make_id(2), SlotPhase.PART)
    assert heard.dropped == [make_id(2)]
    arena.begin(make_id(3), WRITER)


def test_a_slot_is_not_given_to_the_next_snapshot_while_a_worker_may_write_to_it(arena):
    arena.open(make_layout())
    take(arena, make_id(1))
    held = take(arena, make_id(2), SlotPhase.WRITING)
    arena.drop(make_id(2), "another host gave it up")
    with pytest.raises(SnapshotDropped, match="no slot is free"):
        arena.begin(make_id(3), WRITER)
    with pytest.raises(SnapshotDropped, match="another host"):
        arena.finish(make_id(2), WRITER)
    assert arena.begin(make_id(4), WRITER).slot is held.slot


def test_only_who_began_a_snapshot_can_finish_it(arena):
    arena.open(make_layout())
    take(arena, make_id(1), SlotPhase.WRITING)
    with pytest.raises(SnapshotMissing, match="not begun by this worker"):
        arena.finish(make_id(1), object())
    arena.abandon_all(object(), "somebody else is dead")
    arena.finish(make_id(1), WRITER)
    with pytest.raises(SnapshotMissing):
        arena.finish(make_id(1), WRITER)


def test_a_snapshot_that_is_complete_here_is_not_dropped(arena):
    arena.open(make_layout())
    take(arena, make_id(1), SlotPhase.COMPLETE)
    arena.drop(make_id(1), "whatever")
    assert [status.phase for status in arena.statuses()] == [SnapshotPhase.COMPLETE]


# Layouts.


def memfds():
    """The memory of slots that this process has, by inode."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if MEMFD_NAME in os.readlink(path):
                found.add(os.stat(path).st_ino)
    return found


def test_slots_grow_with_a_layout_without_losing_what_is_committed(arena, heard):
    arena.open(make_layout(part_bytes=1000))
    take(arena, make_id(1), part_bytes=1000)
    old = take(arena, make_id(2), part_bytes=1000)
    arena.open(make_layout(part_bytes=500_000, generation=2))
    assert [status.id.step for status in arena.statuses()] == [2]
    assert old.view_part(0, 1000) == bytes([2]) * 1000
    new = take(arena, make_id(3, 2), part_bytes=500_000)
    assert new.view_part(0, 500_000) == bytes([3]) * 500_000
    assert [status.id.step for status in arena.statuses()] == [2, 3]
    arena.prepare()  # as after every commit: now the old one is not needed any more
    assert [status.id.step for status in arena.statuses()] == [3]
    with pytest.raises(ValueError, match="released"):  # freed, although somebody still knows the snapshot
        old.view_part(0, 1000)
    assert len(memfds()) == 2
    assert [notice for notice in heard.notices if isinstance(notice, SlotRetired)] == [
        SlotRetired(number=0),
        SlotRetired(number=1),
    ]
    take(arena, make_id(4, 2), part_bytes=500_000)


def test_larger_slots_than_needed_are_used_as_they_are(arena, heard):
    arena.open(make_layout(part_bytes=500_000))
    take(arena, make_id(1), part_bytes=500_000)
    arena.open(make_layout(part_bytes=1000, generation=2))
    for step in (2, 3, 4):
        held = take(arena, make_id(step, 2), part_bytes=1000)
        assert held.view_part(0, 1000) == bytes([step]) * 1000
    assert not any(isinstance(notice, SlotRetired) for notice in heard.notices)


def test_what_is_not_complete_when_a_layout_is_opened_is_dropped(arena, heard):
    arena.open(make_layout())
    take(arena, make_id(1))
    take(arena, make_id(2), SlotPhase.PART)
    arena.open(make_layout(generation=2))
    assert [status.id.step for status in arena.statuses()] == [1]
    assert (
        SnapshotSettled(id=make_id(2), committed=False, reason="generation 2 began before it was complete")
        in heard.notices
    )
    assert heard.dropped == []  # its generation's root has other cares


def test_what_a_generation_goes_on_from_counts_as_committed(arena):
    arena.open(make_layout())
    take(arena, make_id(1))
    take(arena, make_id(2), SlotPhase.COMPLETE)
    arena.open(make_layout(generation=2), restored=make_id(2))
    assert [(s.id.step, s.phase) for s in arena.statuses()] == [
        (1, SnapshotPhase.COMMITTED),
        (2, SnapshotPhase.COMMITTED),
    ]
    arena.begin(make_id(3, 2), WRITER)
    assert [status.id.step for status in arena.statuses()] == [2]


@pytest.mark.parametrize("phase", [SlotPhase.COMPLETE, SlotPhase.COMMITTED])
def test_what_is_newer_than_what_a_generation_goes_on_from_is_dropped(arena, phase):
    arena.open(make_layout())
    take(arena, make_id(1))
    take(arena, make_id(2), phase)
    arena.open(make_layout(generation=2), restored=make_id(1))
    assert [status.id.step for status in arena.statuses()] == [1]
    arena.begin(make_id(2, 2), WRITER)
    assert [status.id.step for status in arena.statuses()] == [1]


def test_a_generation_that_goes_on_from_nothing_known_is_not_blocked_by_the_old_ones(arena):
    arena.open(make_layout(part_bytes=1000))
    take(arena, make_id(1), part_bytes=1000)
    take(arena, make_id(2), SlotPhase.COMPLETE, part_bytes=1000)
    arena.open(make_layout(part_bytes=300_000, generation=2))
    assert [status.id.step for status in arena.statuses()] == [1, 2]
    take(arena, make_id(3, 2))
    assert [status.id.step for status in arena.statuses()] == [1, 3]


def test_older_generations_and_unknown_ones_are_refused(arena):
    with pytest.raises(SnapshotDropped, match="open it first"):
        arena.begin(make_id(1), WRITER)
    arena.open(make_layout(generation=2))
    with pytest.raises(StaleGeneration, match="generation 2"):
        arena.open(make_layout(generation=1))
    with pytest.raises(StaleGeneration, match="generation 2"):
        arena.begin(make_id(1, 1), WRITER)
    with pytest.raises(SnapshotDropped, match="open it first"):
        arena.begin(make_id(1, 3), WRITER)


def test_a_layout_may_be_opened_again_but_not_changed(arena):
    arena.open(make_layout())
    take(arena, make_id(1))
    arena.open(make_layout())
    assert [status.id.step for status in arena.statuses()] == [1]
    with pytest.raises(SnapshotRefused, match="another layout"):
        arena.open(make_layout(part_bytes=7))


def test_a_layout_that_does_not_fit_is_refused_with_numbers_and_changes_nothing(arena):
    arena.open(make_layout())
    take(arena, make_id(1))
    with pytest.raises(SnapshotRefused, match=r"need [\d.]+ GiB.*available"):
        arena.open(make_layout(part_bytes=2**50, generation=2))
    assert arena.layout == make_layout()
    take(arena, make_id(2))


def test_memory_of_the_slots_that_there_are_counts_for_the_next_layout(arena, monkeypatch):
    arena.open(make_layout(part_bytes=30 * 2**20))
    nothing_left = memory_budget.FreeMemory(available_bytes=16 * 2**20)
    monkeypatch.setattr("resilient_jax.snapshot.snapshot_slots.read_free_memory", lambda: nothing_left)
    arena.open(make_layout(part_bytes=30 * 2**20, generation=2))
    with pytest.raises(SnapshotRefused):
        arena.open(make_layout(part_bytes=60 * 2**20, generation=3))


# The root's count.


def test_a_snapshot_is_committed_when_the_last_host_is_complete():
    board = CommitVotes()
    board.record_complete(make_id(1), HOST)
    board.record_complete(make_id(1), HOST)
    assert not board.is_complete(make_id(1), {HOST, PEER})
    board.record_complete(make_id(1), PEER)
    assert board.is_complete(make_id(1), {HOST, PEER})
    assert board.outcome(make_id(1)).outcome is CommitOutcome.WAITING
    assert board.commit(make_id(1)).outcome is CommitOutcome.COMMITTED


def test_the_first_outcome_stands():
    board = CommitVotes()
    board.record_dropped(make_id(1), "b is gone")
    assert board.commit(make_id(1)).outcome is CommitOutcome.DROPPED
    board.commit(make_id(2))
    board.record_dropped(make_id(2), "too late")
    assert board.outcome(make_id(2)).outcome is CommitOutcome.COMMITTED
    assert board.outcome(make_id(1)).reason == "b is gone"
