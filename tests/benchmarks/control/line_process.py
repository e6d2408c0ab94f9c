"""A script in a process of its own that is given lines and answers with lines."""

import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from resilient_jax.cluster.child_process import bind_to_this_process
from resilient_jax.errors import InternalError
from tests.benchmarks.runs import ERROR_CHARACTERS, script_environment


class LineProcess:
    """A running script. Enter it to start; leave it to end its standard input, and to kill it."""

    def __init__(self, command: Sequence[str], errors: Path, end_grace_s: float = 0.0) -> None:
        """Run a script.

        Args:
            command: the script with its arguments.
            errors: the file for its standard error.
            end_grace_s: how long it may take to end by itself before it is killed.
        """
        self._command = command
        self._errors = errors
        self._end_grace_s = end_grace_s
        self._lines: queue.Queue[bytes] = queue.Queue()

    def __enter__(self) -> Self:
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                bind_to_this_process([sys.executable, *self._command]),
                env=script_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None, "started with a pipe"
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._end_grace_s)
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send_line(self, line: str) -> None:
        """Give the script a line; if the script has ended, `read_line` says so."""
        assert self._process.stdin is not None, "started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def read_line(self, deadline_s: float) -> bytes:
        """Return the script's next line.

        Raises:
            InternalError: there was none until this monotonic time, or the script has ended.
        """
        try:
            line = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            line = b""
        if not line:
            said = self._errors.read_text(errors="replace")[-ERROR_CHARACTERS:]
            raise InternalError(
                f"{' '.join(self._command)}: found no line until its deadline, exit code {self._process.poll()}, "
                f"expected one:\n{said}"
            )
        return line

    def _read(self) -> None:
        assert self._process.stdout is not None, "started with a pipe"
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")
