"""The regions of a snapshot in its slot, and their verification."""

import os

import msgspec
import pytest

from resilient_jax.errors import (
    CallerError,
    ChecksumMismatch,
    SnapshotMissing,
)
from resilient_jax.snapshot.manifest import (
    PartContents,
    decode_manifest,
    encode_manifest,
)
from resilient_jax.snapshot.messages import (
    PARITY_PIECE_BYTES,
    ParityPiece,
)
from resilient_jax.snapshot.slot_memory import SlotPhase
from resilient_jax.snapshot.snapshot_slots import SnapshotSlots
from tests.pure.snapshot.snapshot_slots import (
    BLOCK,
    HOST,
    PEER,
    RecordingListener,
    make_id,
    make_layout,
    make_manifest,
    make_piece,
    take,
)


@pytest.fixture
def slots():
    made = SnapshotSlots(HOST, RecordingListener())
    yield made
    made.table.close()


def test_a_corrupt_block_of_a_part_is_named_and_the_others_can_be_read(slots):
    slots.open_layout(make_layout(part_bytes=3 * BLOCK))
    held = take(slots, make_id(1), part_bytes=3 * BLOCK)
    held.part[BLOCK + 5] ^= 1
    assert held.view_part(0, BLOCK) == bytes([1]) * BLOCK
    assert held.view_part(2 * BLOCK, 10) == bytes([1]) * 10
    for offset, length in ((BLOCK, 1), (BLOCK - 1, 2), (2 * BLOCK - 1, 1)):
        with pytest.raises(ChecksumMismatch, match="block 1 of the part"):
            held.view_part(offset, length)


def test_a_read_behind_the_end_of_a_part_is_refused(slots):
    slots.open_layout(make_layout(part_bytes=100, peer_bytes=9000))
    held = take(slots, make_id(1), part_bytes=100)
    assert held.view_part(90, 10) == bytes([1]) * 10
    with pytest.raises(CallerError, match="bytes 90 to 101, expected none outside 0 to 100"):
        held.view_part(90, 11)


def test_parity_round_trips_and_a_corrupt_block_or_checksum_is_detected(slots):
    slots.open_layout(make_layout(part_bytes=2 * PARITY_PIECE_BYTES + 4096))
    id = make_id(1)
    held = take(slots, id, SlotPhase.PART, part_bytes=2 * PARITY_PIECE_BYTES + 4096)
    chunk = os.urandom(held.slot_layout.chunk_bytes)
    for offset in (PARITY_PIECE_BYTES, 2 * PARITY_PIECE_BYTES, PARITY_PIECE_BYTES):  # in any order, and twice
        assert not held.has_parity()
        slots.store_parity(make_piece(id, chunk, offset))
    slots.store_parity(make_piece(id, chunk))
    assert held.has_parity()
    assert held.view_parity(0, 0, len(chunk)) == chunk
    held.parity_chunk(0)[held.slot_layout.block_bytes] ^= 128
    with pytest.raises(ChecksumMismatch, match="block 1 of parity row 0"):
        held.view_parity(0, 0, len(chunk))
    held.parity_chunk(0)[held.slot_layout.block_bytes] ^= 128
    held.memory.view[held.slot_layout.checksums_offset] ^= 1
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
        {"checksums": ()},
    ],
    ids=str,
)
def test_parity_that_does_not_belong_on_this_host_is_refused(slots, change):
    slots.open_layout(make_layout())
    take(slots, make_id(1), SlotPhase.PART)
    piece = make_piece(make_id(1), bytes(slots.find(make_id(1), SlotPhase.PART).slot_layout.chunk_bytes))
    fields = {name: getattr(piece, name) for name in piece.__struct_fields__}
    with pytest.raises(CallerError, match="parity for a"):
        slots.store_parity(ParityPiece(**{**fields, **change}))


def test_parity_that_arrives_corrupt_is_refused_and_not_stored(slots):
    slots.open_layout(make_layout())
    held = take(slots, make_id(1), SlotPhase.PART)
    piece = make_piece(make_id(1), os.urandom(held.slot_layout.chunk_bytes))
    damaged = bytearray(piece.data)
    damaged[5] ^= 2
    fields = {name: getattr(piece, name) for name in piece.__struct_fields__}
    with pytest.raises(ChecksumMismatch, match="as received"):
        slots.store_parity(ParityPiece(**{**fields, "data": bytes(damaged)}))
    assert not held.has_parity()


def test_a_manifest_of_another_part_or_a_corrupt_one_is_not_stored(slots):
    slots.open_layout(make_layout())
    id, part = make_id(1), bytes(10)
    held = take(slots, id, SlotPhase.PART)
    for manifest in (
        make_manifest(make_id(2), part, PEER),
        make_manifest(id, part),
        make_manifest(id, b"", PEER),
    ):
        with pytest.raises(CallerError, match="manifest: found"):
            held.store_manifest(PEER, manifest)
    with pytest.raises(ChecksumMismatch):
        held.store_manifest(PEER, make_manifest(id, part, PEER)[:-1] + b"?")
    assert held.list_missing_manifests() == [PEER]


def test_a_member_that_snapshots_another_state_is_refused(slots):
    slots.open_layout(make_layout())
    id = make_id(1)
    held = take(slots, id, SlotPhase.PART)
    theirs = msgspec.structs.replace(
        decode_manifest(make_manifest(id, bytes(10), PEER)), contents=PartContents(strings={"['host']": "b"})
    )
    with pytest.raises(CallerError, match="b snapshots another state than a"):
        held.store_manifest(PEER, encode_manifest(theirs))
    assert held.list_missing_manifests() == [PEER]


def test_manifests_of_members_round_trip(slots):
    slots.open_layout(make_layout())
    held = take(slots, make_id(1), SlotPhase.PART)
    assert held.list_missing_manifests() == [PEER]
    with pytest.raises(SnapshotMissing, match="manifest of b"):
        held.read_manifest_bytes(PEER)
    theirs = make_manifest(make_id(1), bytes(10), PEER)
    held.store_manifest(PEER, theirs)
    assert (held.read_manifest_bytes(PEER), held.list_missing_manifests()) == (theirs, [])
    assert held.read_manifest_bytes(HOST) == make_manifest(make_id(1), bytes([1]) * 300_000)
    assert held.nbytes == held.slot_layout.mapped_bytes + len(theirs) + len(held.read_manifest_bytes(HOST))
