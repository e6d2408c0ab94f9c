"""A log file that never stops training: a full disk is reported once, then retried."""

import collections
import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

RETRY_INTERVAL_S = 1.0
"""A full disk may be cleaned up; trying on every line would cost a system call a line for nothing."""


def _print_to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _format_lost_count(lost: int) -> bytes:
    return f"({lost} lines were lost here)".encode()


class LogFile:
    """Appends lines, one unbuffered write each. Never raises after it was opened.

    Of lines that could not be written the newest `max_kept` are written when the file takes lines again; the others are
    counted, and a line gives their number. A line is written completely or not at all.
    """

    def __init__(
        self,
        path: Path,
        print_line: Callable[[str], None] = _print_to_stderr,
        *,
        max_kept: int = 0,
        format_lost: Callable[[int], bytes] = _format_lost_count,
    ) -> None:
        """Open the file; `format_lost` makes the line with the number of lost lines."""
        self.path = path
        self._print_line = print_line
        self._kept = max_kept
        self._format_lost = format_lost
        self._pending: collections.deque[bytes] = collections.deque()
        self._lost = 0
        self._retry_at_s = 0.0
        self._descriptor: int | None = None
        self._open()

    def write(self, line: bytes) -> None:
        """Append `line` and a newline; to a new file if somebody has removed this one."""
        self._pending.append(line)
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            self.close()
        if self._descriptor is None and time.monotonic() >= self._retry_at_s:
            self._open()
        if self._descriptor is not None:
            self._flush(self._descriptor)
        while len(self._pending) > self._kept:
            self._pending.popleft()
            self._lost += 1

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _flush(self, descriptor: int) -> None:
        try:
            if self._lost:
                _append(descriptor, self._format_lost(self._lost))
                self._lost = 0
            while self._pending:
                _append(descriptor, self._pending[0])
                self._pending.popleft()
        except OSError as error:
            self._retry_later(error)

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            self._retry_later(error)

    def _retry_later(self, error: OSError) -> None:
        if self._retry_at_s == 0.0:
            self._print_line(
                f"resilient-jax: cannot write the log file {self.path}: {error.strerror}; expected a writable "
                "disk with free space; training continues without this log; free space to resume it"
            )
        self._retry_at_s = time.monotonic() + RETRY_INTERVAL_S
        with contextlib.suppress(OSError):
            self.close()


def _append(descriptor: int, line: bytes) -> None:
    """Write a line completely.

    Raises:
        OSError: the line did not fit; no part of the line is there.
    """
    complete = line + b"\n"
    written = os.write(descriptor, complete)
    if written != len(complete):
        # Half a line would swallow the next one, and readers of events refuse it.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
