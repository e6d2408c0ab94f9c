"""A log is read by its last lines, then by what was appended, in parts of bounded size and of complete lines."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.telemetry import log_reader
from resilient_jax.telemetry.log_reader import LogPart, read_appended, read_last_lines, take_last_lines


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "host-0.log"


@pytest.mark.parametrize(
    ("content", "lines", "expected"),
    [
        (b"", 2, b""),
        (b"one\ntwo\nthree\n", 2, b"two\nthree\n"),
        (b"one\ntwo\nthr", 2, b"one\ntwo\n"),
        (b"one\n\n\n", 2, b"\n\n"),
        (b"a bar\r a bar\r\nend\n", 2, b"a bar\r a bar\r\nend\n"),
        (b"one\n", 0, b""),
        (b"incomplete", 5, b""),
    ],
)
def test_the_last_complete_lines_are_read(log: Path, content: bytes, lines: int, expected: bytes) -> None:
    log.write_bytes(content)
    assert read_last_lines(log, lines) == LogPart(data=expected, next_offset=content.rfind(b"\n") + 1)


def test_a_log_that_is_absent_is_empty(log: Path) -> None:
    assert read_last_lines(log, 5) == read_appended(log, 7) == LogPart()


def test_the_next_part_begins_where_the_one_before_ended(log: Path) -> None:
    log.write_bytes(b"one\ntw")
    first = read_last_lines(log, 5)
    log.write_bytes(b"one\ntwo\nthree\nfo")
    second = read_appended(log, first.next_offset)
    assert second.data == b"two\nthree\n"
    assert read_appended(log, second.next_offset) == LogPart(next_offset=second.next_offset)


def test_a_log_that_was_replaced_is_read_from_its_beginning(log: Path) -> None:
    log.write_bytes(b"new\n")
    assert read_appended(log, 1000) == LogPart(data=b"new\n", next_offset=4)


def test_lines_that_are_too_long_together_are_fewer_and_the_part_says_so(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "MAX_PART_BYTES", 12)
    log.write_bytes(b"first line\nsecond\nthird\n")
    assert read_last_lines(log, 3) == LogPart(data=b"third\n", next_offset=24, is_cut=True)
    assert read_last_lines(log, 1) == LogPart(data=b"third\n", next_offset=24)


def test_a_line_longer_than_a_part_comes_in_pieces(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "MAX_PART_BYTES", 4)
    log.write_bytes(b"longest\nx\n")
    assert [read_appended(log, offset).data for offset in (0, 4, 8)] == [b"long", b"est\n", b"x\n"]


@given(st.lists(st.binary(max_size=30), max_size=8), st.integers(0, 5))
def test_the_last_lines_and_all_that_is_appended_are_the_end_of_the_log(
    tmp_path_factory: pytest.TempPathFactory, writes: list[bytes], before: int
) -> None:
    log = tmp_path_factory.mktemp("log") / "host-0.log"
    content = b"".join(writes[:before])
    log.write_bytes(content)
    part = read_last_lines(log, 2)
    read = [part.data]
    for written in writes[before:]:
        content += written
        log.write_bytes(content)
        part = read_appended(log, part.next_offset)
        read.append(part.data)
    complete = content[: content.rfind(b"\n") + 1]
    assert part.next_offset == len(complete)
    assert complete.endswith(b"".join(read))
    kept, _ = take_last_lines(b"".join(writes[:before]), 2, is_beginning=True)
    assert b"".join(read).startswith(kept)
