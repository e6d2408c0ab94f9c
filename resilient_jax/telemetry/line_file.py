"""A log file that may never take the training down with it: a full disk is said once, then retried."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

RETRY_AFTER_S = 10.0
"""A full disk may be cleaned up; trying on every line would cost a system call a line for nothing."""


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class LineFile:
    """Appends lines, one unbuffered write each. Never raises after it was opened.

    Lines that could not be written are counted and the count is written when the file takes lines again.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = _say) -> None:
        self.path = path
        self._say = say
        self._lost = 0
        self._retry_at_s = 0.0
        self._descriptor: int | None = None
        self._open()

    def write(self, line: bytes) -> None:
        """Appends `line` and a newline."""
        if self._descriptor is None:
            if time.monotonic() < self._retry_at_s:
                self._lost += 1
                return
            self._open()
        if self._descriptor is None:
            self._lost += 1
            return
        try:
            whole = line + b"\n"
            if os.write(self._descriptor, whole) != len(whole):
                raise OSError(28, "No space left on device")
        except OSError as error:
            self._lost += 1
            self._give_up_for_now(error)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            if self._lost:
                os.write(self._descriptor, f"({self._lost} lines were lost here)\n".encode())
                self._lost = 0
        except OSError as error:
            self._give_up_for_now(error)

    def _give_up_for_now(self, error: OSError) -> None:
        if self._retry_at_s == 0.0:
            self._say(
                f"resilient-jax: cannot write the log file {self.path}: {error.strerror}; expected a writable "
                "disk with free space; training goes on without this log, free space to get it back"
            )
        self._retry_at_s = time.monotonic() + RETRY_AFTER_S
        with contextlib.suppress(OSError):
            self.close()
