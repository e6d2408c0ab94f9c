"""A worker's output: every line to the host's log file, the worker's own lines to the screen."""

import asyncio
import collections
import contextlib
import os
import re
import sys
from pathlib import Path

from resilient_jax.telemetry.log_file import LogFile

LIBRARY_LOG_PATTERN = re.compile(
    rb"^\[Gloo\] Rank |^\[?[IWE]\d{4} \d\d:\d\d:\d\d|^WARNING: All log messages before absl|peer ranks"
)
"""Lines of gloo and of XLA's C++ logging. They are in the log file; on the screen they hide the job."""

ERROR_LINES = 60
"""How much of a worker's standard error is kept to be shown again when the job ends with its error."""


def print_bytes(text: bytes) -> None:
    """Print text on the screen. Never raises: a job does not end because its output is closed.

    Unbuffered, so that nothing is left to be written, and to fail, at the end of the process.
    """
    if sys.stdout is None:  # closed (`>&-`) before Python began
        return
    with contextlib.suppress(OSError, ValueError):  # a full disk, a reader that is gone, a closed stream
        os.write(sys.stdout.fileno(), text)


class WorkerOutput:
    """Prefixes a host's lines with its name, and keeps the end of its standard error."""

    def __init__(self, host: str, log: Path | None, *, show_all: bool = False) -> None:
        self._prefix = f"[{host}] ".encode()
        self._file = LogFile(log) if log is not None else None
        self._everything = show_all
        self._errors: collections.deque[str] = collections.deque(maxlen=ERROR_LINES)

    async def follow(self, reader: asyncio.StreamReader, *, is_error: bool) -> None:
        """Copy lines until the stream ends."""
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # a line longer than the reader's limit: show what there is
                line = await reader.read(2**16)
            if not line:
                return
            self.write(line.rstrip(b"\r\n"), is_error=is_error)

    def write(self, line: bytes, *, is_error: bool = False) -> None:
        """Write one line of the worker."""
        if self._file is not None:
            self._file.write(line)
        is_library_log = LIBRARY_LOG_PATTERN.search(line) is not None
        if is_error and not is_library_log:
            self._errors.append(line.decode(errors="replace"))
        if self._everything or not is_library_log:
            print_bytes(self._prefix + line + b"\n")

    def read_last_errors(self) -> str:
        """Return the end of what the worker wrote to standard error: from the last traceback on, if there is one."""
        lines = list(self._errors)
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        return "\n".join(lines[starts[-1] :] if starts else lines[-10:])

    def clear_errors(self) -> None:
        """Forget the standard error of the worker before: it is not the new worker's."""
        self._errors.clear()

    def close(self) -> None:
        """Close the log file, if there is one; a later line opens it again."""
        if self._file is not None:
            self._file.close()
