"""Reads a log in parts of bounded size: its last lines, then what was appended since. Its writer may go on writing."""

from pathlib import Path
from typing import Final

import msgspec

MAX_PART_BYTES: Final = 256 * 1024
"""A part is one message of an agent, which reads it while it supervises."""


class LogPart(msgspec.Struct, frozen=True, kw_only=True):
    """Some lines of a log.

    Attributes:
        data: complete lines with their ends; of a line longer than `MAX_PART_BYTES` a piece.
        next_offset: bytes from the beginning of the log.
        is_cut: whether fewer lines were read than asked for, because more would be too many bytes.
    """

    data: bytes = b""
    next_offset: int = 0
    is_cut: bool = False


def read_last_lines(path: Path, lines: int) -> LogPart:
    """Return the last `lines` complete lines of a log, fewer where they are too long; none of a log that is absent."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - MAX_PART_BYTES)
            file.seek(start)
            data = file.read(MAX_PART_BYTES)
    except FileNotFoundError:
        return LogPart()
    kept, is_cut = take_last_lines(data, lines, is_beginning=start == 0)
    return LogPart(data=kept, next_offset=start + len(cut_incomplete_line(data)), is_cut=is_cut)


def read_appended(path: Path, offset: int) -> LogPart:
    """Return the complete lines of a log after `offset`; a log that has become shorter is read from its beginning."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < offset:
                offset = 0
            file.seek(offset)
            data = file.read(MAX_PART_BYTES)
    except FileNotFoundError:
        return LogPart()
    complete = cut_incomplete_line(data)
    if not complete and len(data) == MAX_PART_BYTES:  # a line that no part holds completely
        complete = data
    return LogPart(data=complete, next_offset=offset + len(complete))


def cut_incomplete_line(data: bytes) -> bytes:
    r"""Return `data` up to its last line's end.

    Example:
        >>> cut_incomplete_line(b"one\ntwo\nthr")
        b'one\ntwo\n'
    """
    return data[: data.rfind(b"\n") + 1]


def take_last_lines(data: bytes, lines: int, *, is_beginning: bool) -> tuple[bytes, bool]:
    r"""Return the last complete lines of `data`, and whether there are fewer than `lines` although the log has more.

    Args:
        data: the end of a log.
        lines: the most lines to return.
        is_beginning: whether `data` is the complete log; False: the first line may be incomplete, and does not count.

    Example:
        >>> take_last_lines(b"ne\ntwo\nthree\n", 2, is_beginning=False)
        (b'two\nthree\n', False)
    """
    found = data.split(b"\n")[:-1]
    if not is_beginning:
        del found[:1]
    kept = found[max(0, len(found) - lines) :]
    return b"".join(line + b"\n" for line in kept), not is_beginning and len(found) < lines
