"""Memory and contents of the slots, without the rules of `SnapshotSlots`."""

import os
import threading

import pytest

from resilient_jax.errors import SnapshotDropped, SnapshotMissing, StaleGeneration
from resilient_jax.snapshot.messages import SlotRetired
from resilient_jax.snapshot.slot_memory import SlotPhase
from resilient_jax.snapshot.slot_table import SlotTable
from tests.pure.snapshot.snapshot_slots import HOST, WRITER, RecordingListener, make_id, make_layout


@pytest.fixture
def listener():
    return RecordingListener()


@pytest.fixture
def table(listener):
    made = SlotTable(HOST, threading.Condition(threading.RLock()), listener)
    yield made
    made.close()


def begin(table, id):
    with table._changed:
        return table.begin(id, WRITER)


def test_slots_have_no_memory_before_a_layout_and_are_allocated_once_for_it(table):
    table.allocate()
    assert table.share() == ((), [])
    table.layout = make_layout()
    table.allocate()
    infos, descriptors = table.share()
    try:
        assert [info.number for info in infos] == [0, 1]
        assert table.count_mapped_bytes() == sum(info.mapped_bytes for info in infos)
        assert table.count_mapped_bytes(slot_limit_bytes=10) == 20
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    table.allocate()
    assert table.count_mapped_bytes() == sum(info.mapped_bytes for info in infos)


def test_only_snapshots_of_the_newest_layout_get_a_slot(table):
    with pytest.raises(SnapshotDropped, match="open it first"):
        table.get_layout(make_id(1))
    table.layout = make_layout(generation=2)
    with pytest.raises(StaleGeneration, match="generation 2"):
        table.get_layout(make_id(1, 1))
    assert table.get_layout(make_id(1, 2)) == make_layout(generation=2)


def test_a_snapshot_takes_a_slot_until_it_is_removed(table):
    table.layout = make_layout()
    table.allocate()
    first, _ = begin(table, make_id(1))
    assert table.find_written_by(make_id(1), WRITER) is first
    with pytest.raises(SnapshotMissing):
        table.find_written_by(make_id(1), object())
    begin(table, make_id(2))
    found, reason = begin(table, make_id(3))
    assert found is None
    assert "no slot is free" in reason
    with table._changed:
        table.remove(first)
    assert not table.has(first)
    assert begin(table, make_id(3))[0] is not None


def test_a_slot_without_memory_for_the_layout_is_not_chosen(table):
    table.layout = make_layout()
    found, reason = begin(table, make_id(1))
    assert found is None
    assert "not allocated" in reason


def test_a_larger_layout_retires_only_free_slots(table, listener):
    table.layout = make_layout(part_bytes=1000)
    table.allocate()
    kept, _ = begin(table, make_id(1))
    kept.phase = SlotPhase.COMMITTED
    table.layout = make_layout(part_bytes=500_000, generation=2)
    table.allocate()
    assert table.list_contents() == [kept]
    assert listener.notices == [SlotRetired(number=1)]
