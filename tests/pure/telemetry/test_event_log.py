"""The event log of a host: it keeps every event, and never interrupts training."""

import os
import shutil

import pytest

from resilient_jax.errors import MessageError
from resilient_jax.events import EventKind
from resilient_jax.telemetry import log_file
from resilient_jax.telemetry.event_log import EventLog, read_events
from resilient_jax.telemetry.log_file import RETRY_INTERVAL_S, LogFile
from tests.support.manual_clock import ManualClock

FULL = "No space left on device"


def promised(path, why):
    return (
        f"resilient-jax: cannot write the log file {path}: {why}; expected a writable disk with free space; "
        "training continues without this log; free space to resume it"
    )


def two_events(path):
    log = EventLog(path, "a", ManualClock(5.0))
    log.record(EventKind.AGENT_STARTED, pid=7)
    log.record(EventKind.STEP_COMMITTED, generation=2, step=3)
    log.close()
    return list(log.recent)


def test_events_are_read_as_they_were_recorded(tmp_path):
    path = tmp_path / "folder" / "a.jsonl"
    recorded = two_events(path)
    assert read_events(path) == recorded
    assert (recorded[0].kind, recorded[0].host, recorded[0].monotonic_s) == ("agent.started", "a", 5.0)


def test_a_log_without_a_file_keeps_its_events():
    assert [e.step for e in two_events(None)] == [None, 3]


def test_an_incomplete_last_line_is_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    recorded = two_events(path)
    path.write_bytes(path.read_bytes()[:-5])
    assert read_events(path) == recorded[:1]


def test_a_broken_line_that_is_not_the_last_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    two_events(path)
    path.write_bytes(b'{"kind": "nonsense"}\n' + path.read_bytes())
    with pytest.raises(MessageError) as refused:
        read_events(path)
    assert str(refused.value).startswith(
        f"{path}, line 1, does not decode as Event: Invalid enum value 'nonsense'"
    )


def test_a_full_disk_is_reported_once_and_raises_nothing(tmp_path):
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    said = []
    file = LogFile(path, said.append)
    for _ in range(3):
        file.write(b"line")
    file.close()
    assert said == [promised(path, FULL)]


def test_a_directory_that_cannot_be_created_is_reported_once_and_raises_nothing(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "folder" / "log"
    said = []
    file = LogFile(path, said.append)
    file.write(b"line")
    file.close()
    assert said == [promised(path, "Not a directory")]


def test_an_event_log_on_a_full_disk_keeps_its_events_in_memory(tmp_path, capfd):
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    assert len(two_events(path)) == 2
    assert capfd.readouterr().err == promised(path, FULL) + "\n"


def test_the_number_of_lost_lines_is_written_when_the_disk_has_space_again(tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(log_file.time, "monotonic", lambda: now_s)
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    said = []
    file = LogFile(path, said.append)
    file.write(b"lost 1")
    path.unlink()
    file.write(b"lost 2")  # before it is time to try again
    now_s += RETRY_INTERVAL_S
    file.write(b"kept")
    file.close()
    assert path.read_bytes() == b"(2 lines were lost here)\nkept\n"
    assert len(said) == 1


def test_events_that_a_full_disk_refused_are_written_when_there_is_space_again(tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(log_file.time, "monotonic", lambda: now_s)
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    log = EventLog(path, "host-0")
    log.record(EventKind.HOST_LOST, lost="host-1")
    log.record(EventKind.HOST_LOST, lost="host-2")
    path.unlink()
    now_s += RETRY_INTERVAL_S
    log.record(EventKind.HOST_LOST, lost="host-3")
    log.close()
    assert [event.detail["lost"] for event in read_events(path)] == ["host-1", "host-2", "host-3"]


def test_the_number_of_dropped_events_is_an_event(tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(log_file.time, "monotonic", lambda: now_s)
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    log = EventLog(path, "host-0")
    for number in range(EventLog.MAX_KEPT + 3):
        log.record(EventKind.WORKER_IDLE, number=number)
    path.unlink()
    now_s += RETRY_INTERVAL_S
    log.record(EventKind.WORKER_IDLE, number=-1)
    log.close()
    first, *others = read_events(path)
    assert (first.kind, first.detail["lost"]) == (EventKind.LOG_UNWRITABLE, 3)
    assert [event.detail["number"] for event in others] == [*range(3, EventLog.MAX_KEPT + 3), -1]


def test_a_line_that_was_written_in_part_is_removed(tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(log_file.time, "monotonic", lambda: now_s)
    path = tmp_path / "log"
    log = EventLog(path, "host-0")
    log.record(EventKind.HOST_LOST, lost="host-1")
    write = os.write
    monkeypatch.setattr(log_file.os, "write", lambda descriptor, data: write(descriptor, data[:10]))
    log.record(EventKind.HOST_LOST, lost="host-2")
    monkeypatch.setattr(log_file.os, "write", write)
    now_s += RETRY_INTERVAL_S
    log.record(EventKind.HOST_LOST, lost="host-3")
    log.close()
    assert [event.detail["lost"] for event in read_events(path)] == ["host-1", "host-2", "host-3"]


def test_writes_to_a_disk_that_stays_full_are_retried_silently(tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(log_file.time, "monotonic", lambda: now_s)
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    said = []
    file = LogFile(path, said.append)
    for _ in range(5):
        file.write(b"line")
        now_s += RETRY_INTERVAL_S
    file.close()
    assert len(said) == 1


def test_a_closed_file_has_closed_its_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    file = LogFile(tmp_path / "log")
    assert len(os.listdir("/proc/self/fd")) == before + 1
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_log_whose_file_was_removed_goes_on_in_a_new_one(tmp_path):
    log = LogFile(tmp_path / "folder" / "log")
    log.write(b"before")
    shutil.rmtree(tmp_path / "folder")
    log.write(b"after")
    log.close()
    assert (tmp_path / "folder" / "log").read_bytes() == b"after\n"
