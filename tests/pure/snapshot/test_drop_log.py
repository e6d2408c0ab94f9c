"""The log of dropped snapshots."""

from resilient_jax.events import EventKind
from resilient_jax.snapshot.drop_log import MAX_DROPPED_KEPT, DropLog
from resilient_jax.snapshot.messages import SnapshotSettled
from tests.pure.snapshot.snapshot_slots import HOST, RecordingListener, make_id, make_layout


def test_a_drop_is_an_event_and_reported_to_the_worker_and_to_the_root_unless_the_root_decided_it():
    listener = RecordingListener()
    log = DropLog(HOST, listener)
    log.record(make_id(1), make_layout(), "no slot is free")
    log.record(make_id(2), make_layout(), "another host dropped it", known_to_root=True)
    assert listener.events == [EventKind.SNAPSHOT_DROPPED] * 2
    assert listener.notices == [
        SnapshotSettled(id=make_id(1), committed=False, reason="no slot is free"),
        SnapshotSettled(id=make_id(2), committed=False, reason="another host dropped it"),
    ]
    assert listener.dropped == [make_id(1)]


def test_the_oldest_reasons_are_forgotten():
    log = DropLog(HOST, RecordingListener())
    for step in range(MAX_DROPPED_KEPT + 1):
        log.record(make_id(step), make_layout(), f"reason {step}")
    assert log.get_reason(make_id(0)) is None
    assert log.get_reason(make_id(1)) == "reason 1"
    assert "reason 1" in log.describe(make_id(1))
