"""The memory of a slot, its regions and its header."""

import fcntl
import itertools
import mmap
import os
import stat

import pytest

from resilient_jax.errors import (
    ChecksumMismatch,
    SnapshotRefused,
)
from resilient_jax.snapshot.slot_memory import SlotHeader, SlotLayout, SlotMemory, SlotPhase
from resilient_jax.snapshot.stripes import Grid
from tests.pure.snapshot.snapshot_slots import make_id

SHAPE = SlotLayout(part_bytes=10_000, parity_rows=2, grid=Grid(4096, 8192))


def test_slot_memory_is_private_sealed_against_shrinking_and_fully_allocated():
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


def test_the_regions_of_a_slot_do_not_overlap_and_start_on_pages():
    for part, rows, chunk in itertools.product((0, 1, 4096, 300_001), (0, 1, 3), (0, 4096, 12 * 2**20)):
        shape = SlotLayout(part_bytes=part, parity_rows=rows, grid=Grid(4096, chunk))
        ends = [shape.part_offset, shape.part_offset + part, shape.parity_offset]
        ends += [shape.parity_offset + rows * chunk, shape.checksums_offset]
        ends += [shape.checksums_offset + rows * chunk // 4096 * 4, shape.mapped_bytes]
        assert ends == sorted(ends)
        assert all(offset % mmap.PAGESIZE == 0 for offset in (shape.parity_offset, shape.mapped_bytes))


def test_a_header_round_trips_and_every_flipped_bit_is_detected():
    slot = SlotMemory(0, SHAPE.mapped_bytes)
    try:
        header = SlotHeader(
            id=make_id(7, 3),
            phase=SlotPhase.COMPLETE,
            layout=SHAPE,
            manifest_bytes=5,
            manifest_crc=9,
            wall_s=1.5,
        )
        slot.write_header(header)
        assert slot.read_header() == header
        length = len(bytes(slot.view[:4096]).rstrip(b"\0"))
        for at, bit in itertools.product(range(length), range(8)):
            slot.view[at] ^= 1 << bit
            with pytest.raises(ChecksumMismatch):
                slot.read_header()
            slot.view[at] ^= 1 << bit
        assert slot.read_header() == header
    finally:
        slot.close()


def test_an_empty_slot_has_no_header():
    slot = SlotMemory(0, SHAPE.mapped_bytes)
    try:
        with pytest.raises(ChecksumMismatch):
            slot.read_header()
    finally:
        slot.close()


def test_more_memory_than_the_machine_has_is_refused():
    with pytest.raises(SnapshotRefused, match="memory"):
        SlotMemory(0, 2**62)
