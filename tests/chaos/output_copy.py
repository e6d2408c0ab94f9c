"""Who reads the output of a job's `launch`: a thread that copies it into a file, and may stop to read."""

import contextlib
import fcntl
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

PIPE_BYTES = 4096
"""As little as the kernel allows, so that a reader who has stopped is noticed after a few lines."""
END_TIMEOUT_S = 10.0
"""Timeout for the rest of the output after its writer has ended: a process that was left behind may keep it open."""


class OutputCopy:
    """A copy of the output of a process: a pipe, and a thread that writes what comes into a file.

    Attributes:
        writer: the descriptor for the process whose output it is; see `close_writer`.
    """

    def __init__(self, path: Path) -> None:
        """Begin to copy into `path`, whose folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._reader, self.writer = os.pipe()
        fcntl.fcntl(self._reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._is_closed = False
        self._may_read = threading.Event()
        self._may_read.set()
        self._thread = threading.Thread(
            target=self._copy, args=(path.open("wb", buffering=0),), name="output-copy", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._may_read.set()
        self.close_writer()
        self._thread.join(END_TIMEOUT_S)

    def close_writer(self) -> None:
        """Close this process's end, once another has it: else the output would have no end. Idempotent."""
        if not self._is_closed:  # the number may be another's by now
            self._is_closed = True
            os.close(self.writer)

    def hold(self) -> Callable[[], None]:
        """Read nothing more, and return the function that goes on."""
        self._may_read.clear()
        return self._may_read.set

    def _copy(self, file: io.FileIO) -> None:
        with file, os.fdopen(self._reader, "rb", buffering=0) as pipe:
            while True:
                self._may_read.wait()
                if not (chunk := pipe.read(PIPE_BYTES)):
                    return
                with contextlib.suppress(OSError):  # the disk is full, which is a fault of its own
                    file.write(chunk)
