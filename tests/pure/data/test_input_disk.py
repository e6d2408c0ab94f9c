"""What a read of the input's files takes: of files that are open or mapped, past the page cache."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from resilient_jax.data import input_disk
from resilient_jax.data.input_disk import LIMIT_S, MIN_FILE_BYTES, list_input_files, measure_input_disk


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    path.write_bytes(os.urandom(MIN_FILE_BYTES))
    return path


def test_mapped_and_open_files_are_found_and_others_are_not(tokens: Path, tmp_path: Path) -> None:
    records, log = tmp_path / "records.bin", tmp_path / "log.txt"
    records.write_bytes(bytes(2 * MIN_FILE_BYTES))
    small = tmp_path / "small.bin"
    small.write_bytes(bytes(MIN_FILE_BYTES - 1))
    mapped = np.memmap(tokens, np.uint8, "r")
    with tokens.open("rb"):
        if str(tokens) not in list_input_files():
            pytest.skip("the temporary folder is in memory")
    with records.open("rb"), small.open("rb"), log.open("wb") as written:
        written.write(bytes(MIN_FILE_BYTES))
        written.flush()
        found = [path for path in list_input_files() if path.startswith(str(tmp_path))]
    assert found == [str(records), str(tokens)], "the largest first"
    del mapped
    assert str(tokens) not in list_input_files()
    assert not any(path.endswith(".so") for path in list_input_files())


def test_reads_are_timed(tokens: Path) -> None:
    with tokens.open("rb"):
        if str(tokens) not in list_input_files():
            pytest.skip("the temporary folder is in memory")
        assert 0 < measure_input_disk() <= LIMIT_S


def test_files_in_memory_are_on_no_disk() -> None:
    descriptor = os.memfd_create("tokens")
    os.truncate(descriptor, MIN_FILE_BYTES)
    mapped = np.memmap(f"/proc/self/fd/{descriptor}", np.uint8, "r")
    assert not any("memfd" in path for path in list_input_files())
    del mapped
    os.close(descriptor)


def test_a_file_that_is_gone_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_disk, "list_input_files", lambda: ["/nowhere/gone.bin"])
    assert measure_input_disk() == 0.0


def test_a_disk_that_hangs_holds_up_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(input_disk, "_last", None)
    monkeypatch.setattr(input_disk, "LIMIT_S", 0.01)
    monkeypatch.setattr(input_disk, "_time_reads", lambda path: is_over.wait())
    monkeypatch.setattr(input_disk, "list_input_files", lambda: ["tokens.bin"])
    assert measure_input_disk() == 0.01
    readers = threading.active_count()
    assert measure_input_disk() == 0.01
    assert threading.active_count() == readers, "another thread would hang, too"
    is_over.set()


def test_a_read_that_fails_is_no_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> float:
        raise ValueError("empty range for randrange(0)")

    monkeypatch.setattr(input_disk, "_last", None)
    monkeypatch.setattr(input_disk, "_time_reads", fail)
    monkeypatch.setattr(input_disk, "list_input_files", lambda: ["tokens.bin"])
    assert measure_input_disk() == 0.0
