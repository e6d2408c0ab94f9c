"""The rules of the snapshot slots: writers, phases, drops and layouts."""

import contextlib
import os
from pathlib import Path

import pytest

from resilient_jax.errors import (
    ChecksumMismatch,
    SnapshotDropped,
    SnapshotMissing,
    SnapshotRefused,
    StaleGeneration,
)
from resilient_jax.events import EventKind
from resilient_jax.protocol.snapshots import SnapshotPhase
from resilient_jax.snapshot import memory_budget
from resilient_jax.snapshot.messages import (
    SlotRetired,
    SnapshotSettled,
)
from resilient_jax.snapshot.slot_memory import MEMFD_NAME, SlotHeader, SlotPhase
from resilient_jax.snapshot.snapshot_slots import SnapshotSlots
from tests.pure.snapshot.snapshot_slots import (
    HOST,
    WRITER,
    RecordingListener,
    make_id,
    make_layout,
    make_manifest,
    take,
)


@pytest.fixture
def listener():
    return RecordingListener()


@pytest.fixture
def slots(listener):
    made = SnapshotSlots(HOST, listener)
    yield made
    made.table.close()


def test_the_newest_committed_snapshot_keeps_its_slot_while_others_are_taken(slots):
    slots.open_layout(make_layout())
    for step in range(1, 5):
        before = [status.id.step for status in slots.list_statuses()]
        held = slots.begin(make_id(step), WRITER)
        kept = [status.id.step for status in slots.list_statuses()]
        assert kept == before[-1:]
        held.part[:] = bytes([step]) * len(held.part)
        slots.finish(held.id, WRITER)
        slots.advance(held, SlotPhase.COMPLETE)
        slots.advance(held, SlotPhase.COMMITTED)
    assert [(s.id.step, s.phase) for s in slots.list_statuses()] == [
        (3, SnapshotPhase.COMMITTED),
        (4, SnapshotPhase.COMMITTED),
    ]


def test_a_third_snapshot_is_dropped_while_two_are_in_progress_and_the_root_is_notified(slots, listener):
    slots.open_layout(make_layout())
    take(slots, make_id(1), SlotPhase.PART)
    take(slots, make_id(2), SlotPhase.PART)
    with pytest.raises(SnapshotDropped, match=r"no slot is free.*step 1.*is part.*step 2"):
        slots.begin(make_id(3), WRITER)
    assert listener.dropped == [make_id(3)]
    assert listener.events.count(EventKind.SNAPSHOT_DROPPED) == 1
    with pytest.raises(
        SnapshotDropped, match="no slot is free"
    ):  # also later, since other hosts have dropped it
        slots.find(make_id(3), SlotPhase.PART)


def test_a_part_cannot_be_read_before_it_is_finished(slots):
    slots.open_layout(make_layout())
    held = slots.begin(make_id(1), WRITER)
    with pytest.raises(SnapshotMissing, match="writing"):
        slots.find(make_id(1), SlotPhase.PART)
    assert held.memory.read_header().phase is SlotPhase.WRITING
    assert slots.list_statuses() == ()


def test_a_snapshot_with_a_corrupt_header_is_neither_found_nor_reported(slots, listener):
    slots.open_layout(make_layout())
    held = take(slots, make_id(1))
    held.memory.view[17] ^= 4
    with pytest.raises(ChecksumMismatch, match="header of slot"):
        slots.find(make_id(1), SlotPhase.PART)
    assert slots.list_statuses() == ()
    assert EventKind.SNAPSHOT_CORRUPT in listener.events


def test_a_snapshot_with_an_intact_header_of_another_one_is_neither_found_nor_reported(slots):
    slots.open_layout(make_layout())
    held = take(slots, make_id(1))
    held.memory.write_header(SlotHeader(id=make_id(2), phase=SlotPhase.COMMITTED, layout=held.slot_layout))
    with pytest.raises(ChecksumMismatch, match="overwritten"):
        slots.find(make_id(1), SlotPhase.PART)
    assert slots.list_statuses() == ()


def test_a_part_cannot_be_read_until_it_is_sealed(slots):
    slots.open_layout(make_layout())
    held = take(slots, make_id(1), SlotPhase.WRITING)
    slots.finish(held.id, WRITER)
    assert held.memory.read_header().phase is SlotPhase.WRITING
    with pytest.raises(SnapshotMissing, match="expected part"):
        slots.find(held.id, SlotPhase.PART)
    slots.seal(held, make_manifest(held.id, bytes(held.part)))
    assert slots.find(held.id, SlotPhase.PART) is held


def test_a_part_that_is_dropped_while_its_checksums_are_computed_is_not_sealed(slots):
    slots.open_layout(make_layout())
    held = take(slots, make_id(1), SlotPhase.WRITING)
    slots.finish(held.id, WRITER)
    slots.drop(held.id, "another host gave it up")
    with pytest.raises(SnapshotDropped, match="another host"):
        slots.seal(held, make_manifest(held.id, bytes(300_000)))


def test_parts_that_a_dead_worker_began_are_dropped_and_finished_ones_stay(slots, listener):
    slots.open_layout(make_layout())
    take(slots, make_id(1), SlotPhase.PART)
    take(slots, make_id(2), SlotPhase.WRITING)
    slots.abandon_all(WRITER, "it is dead")
    assert slots.find(make_id(1), SlotPhase.PART).id == make_id(1)
    with pytest.raises(SnapshotDropped, match="it is dead"):
        slots.find(make_id(2), SlotPhase.PART)
    assert listener.dropped == [make_id(2)]
    slots.begin(make_id(3), WRITER)


def test_a_slot_is_not_reused_while_a_worker_may_write_to_it(slots):
    slots.open_layout(make_layout())
    take(slots, make_id(1))
    held = take(slots, make_id(2), SlotPhase.WRITING)
    slots.drop(make_id(2), "another host gave it up")
    with pytest.raises(SnapshotDropped, match="no slot is free"):
        slots.begin(make_id(3), WRITER)
    with pytest.raises(SnapshotDropped, match="another host"):
        slots.finish(make_id(2), WRITER)
    assert slots.begin(make_id(4), WRITER).memory is held.memory


def test_only_the_worker_that_began_a_snapshot_can_finish_it(slots):
    slots.open_layout(make_layout())
    take(slots, make_id(1), SlotPhase.WRITING)
    with pytest.raises(SnapshotMissing, match="not begun by this worker"):
        slots.finish(make_id(1), object())
    slots.abandon_all(object(), "somebody else is dead")
    slots.finish(make_id(1), WRITER)
    with pytest.raises(SnapshotMissing):
        slots.finish(make_id(1), WRITER)


def test_a_snapshot_that_is_complete_here_is_not_dropped(slots):
    slots.open_layout(make_layout())
    take(slots, make_id(1), SlotPhase.COMPLETE)
    slots.drop(make_id(1), "whatever")
    assert [status.phase for status in slots.list_statuses()] == [SnapshotPhase.COMPLETE]


def memfds():
    """Return the inodes of the slots' memory that this process has open."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if MEMFD_NAME in os.readlink(path):
                found.add(os.stat(path).st_ino)
    return found


def test_slots_grow_with_a_layout_without_losing_committed_snapshots(slots, listener):
    slots.open_layout(make_layout(part_bytes=1000))
    take(slots, make_id(1), part_bytes=1000)
    old = take(slots, make_id(2), part_bytes=1000)
    slots.open_layout(make_layout(part_bytes=500_000, generation=2))
    assert [status.id.step for status in slots.list_statuses()] == [2]
    assert old.view_part(0, 1000) == bytes([2]) * 1000
    new = take(slots, make_id(3, 2), part_bytes=500_000)
    assert new.view_part(0, 500_000) == bytes([3]) * 500_000
    assert [status.id.step for status in slots.list_statuses()] == [2, 3]
    slots.table.allocate()  # as after every commit, when the old slot is no longer needed
    assert [status.id.step for status in slots.list_statuses()] == [3]
    with pytest.raises(ValueError, match="released"):  # freed, although the test still refers to the snapshot
        old.view_part(0, 1000)
    assert len(memfds()) == 2
    assert [notice for notice in listener.notices if isinstance(notice, SlotRetired)] == [
        SlotRetired(number=0),
        SlotRetired(number=1),
    ]
    take(slots, make_id(4, 2), part_bytes=500_000)


def test_slots_that_are_larger_than_needed_are_reused(slots, listener):
    slots.open_layout(make_layout(part_bytes=500_000))
    take(slots, make_id(1), part_bytes=500_000)
    slots.open_layout(make_layout(part_bytes=1000, generation=2))
    for step in (2, 3, 4):
        held = take(slots, make_id(step, 2), part_bytes=1000)
        assert held.view_part(0, 1000) == bytes([step]) * 1000
    assert not any(isinstance(notice, SlotRetired) for notice in listener.notices)


def test_incomplete_snapshots_are_dropped_when_a_layout_is_opened(slots, listener):
    slots.open_layout(make_layout())
    take(slots, make_id(1))
    take(slots, make_id(2), SlotPhase.PART)
    slots.open_layout(make_layout(generation=2))
    assert [status.id.step for status in slots.list_statuses()] == [1]
    assert (
        SnapshotSettled(
            id=make_id(2), committed=False, reason="generation 2 began before the snapshot was complete"
        )
        in listener.notices
    )
    assert listener.dropped == []  # the root of an ended generation is not notified


def test_the_snapshot_that_a_generation_restores_counts_as_committed(slots):
    slots.open_layout(make_layout())
    take(slots, make_id(1))
    take(slots, make_id(2), SlotPhase.COMPLETE)
    slots.open_layout(make_layout(generation=2), restored=make_id(2))
    assert [(s.id.step, s.phase) for s in slots.list_statuses()] == [
        (1, SnapshotPhase.COMMITTED),
        (2, SnapshotPhase.COMMITTED),
    ]
    slots.begin(make_id(3, 2), WRITER)
    assert [status.id.step for status in slots.list_statuses()] == [2]


@pytest.mark.parametrize("phase", [SlotPhase.COMPLETE, SlotPhase.COMMITTED])
def test_snapshots_newer_than_the_restored_one_are_dropped(slots, phase):
    slots.open_layout(make_layout())
    take(slots, make_id(1))
    take(slots, make_id(2), phase)
    slots.open_layout(make_layout(generation=2), restored=make_id(1))
    assert [status.id.step for status in slots.list_statuses()] == [1]
    slots.begin(make_id(2, 2), WRITER)
    assert [status.id.step for status in slots.list_statuses()] == [1]


def test_a_generation_without_a_known_restored_snapshot_is_not_blocked_by_older_ones(slots):
    slots.open_layout(make_layout(part_bytes=1000))
    take(slots, make_id(1), part_bytes=1000)
    take(slots, make_id(2), SlotPhase.COMPLETE, part_bytes=1000)
    slots.open_layout(make_layout(part_bytes=300_000, generation=2))
    assert [status.id.step for status in slots.list_statuses()] == [1, 2]
    take(slots, make_id(3, 2))
    assert [status.id.step for status in slots.list_statuses()] == [1, 3]


def test_snapshots_of_older_and_unknown_generations_are_refused(slots):
    with pytest.raises(SnapshotDropped, match="open it first"):
        slots.begin(make_id(1), WRITER)
    slots.open_layout(make_layout(generation=2))
    with pytest.raises(StaleGeneration, match="generation 2"):
        slots.open_layout(make_layout(generation=1))
    with pytest.raises(StaleGeneration, match="generation 2"):
        slots.begin(make_id(1, 1), WRITER)
    with pytest.raises(SnapshotDropped, match="open it first"):
        slots.begin(make_id(1, 3), WRITER)


def test_a_layout_may_be_opened_again_but_not_changed(slots):
    slots.open_layout(make_layout())
    take(slots, make_id(1))
    slots.open_layout(make_layout())
    assert [status.id.step for status in slots.list_statuses()] == [1]
    with pytest.raises(SnapshotRefused, match="another layout"):
        slots.open_layout(make_layout(part_bytes=7))


def test_a_layout_that_needs_too_much_memory_is_refused_and_changes_nothing(slots):
    slots.open_layout(make_layout())
    take(slots, make_id(1))
    with pytest.raises(SnapshotRefused, match=r"need [\d.]+ GiB.*available"):
        slots.open_layout(make_layout(part_bytes=2**50, generation=2))
    assert slots.layout == make_layout()
    take(slots, make_id(2))


def test_memory_of_existing_slots_is_reclaimed_for_the_next_layout(slots, monkeypatch):
    slots.open_layout(make_layout(part_bytes=30 * 2**20))
    nothing_left = memory_budget.FreeMemory(available_bytes=16 * 2**20)
    monkeypatch.setattr("resilient_jax.snapshot.snapshot_slots.read_free_memory", lambda: nothing_left)
    slots.open_layout(make_layout(part_bytes=30 * 2**20, generation=2))
    with pytest.raises(SnapshotRefused):
        slots.open_layout(make_layout(part_bytes=60 * 2**20, generation=3))
