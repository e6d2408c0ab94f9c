"""A worker's output: every line to the host's log file, the worker's own lines to the screen.

A traceback on standard error is held back for a moment: if the script ends with it, it is the job's error, which is
shown once for all hosts, and without frames that do not help.
"""

import asyncio
import collections
import re
from collections.abc import Callable
from pathlib import Path

from resilient_jax.cluster.child_process import LineReader
from resilient_jax.cluster.traceback_text import find_last_chain, is_start, shorten_traceback
from resilient_jax.telemetry.log_file import LogFile
from resilient_jax.telemetry.screen_output import print_bytes

LIBRARY_LOG_PATTERN = re.compile(
    rb"^\[[\w./+-]+\.(?:cc|h|cpp):\d+\] "  # gloo's errors, such as a refused connection: [FILE:LINE] ERROR ...
    rb"|^\[?[IWEF]\d{4} \d\d:\d\d:\d\d|^WARNING: All log messages before absl"
    rb"|^Additional GRPC error information |^:UNKNOWN:"  # the lines that follow the first of an XLA message
    rb"|^\*\*\* Check failure stack trace: |^    @ +0x[0-9a-f]+ "
)
"""Lines of gloo and of XLA's C++ logging, which the survivors of a failure print. They are in the log file; on the
screen they hide the job."""

CRASH_PATTERN = re.compile(rb"^terminate called ")
"""The first line of a process that C++ ends, as gloo does when a peer dies at a bad moment. The stacks of all threads
follow, and nothing else."""

ERROR_LINES = 400
"""How much of a worker's standard error is kept to be shown when the job ends with its error: a traceback through
Flax and JAX with its causes has more than a hundred lines."""
LAST_LINES = 10
"""How much is shown of a standard error without a traceback."""
HOLD_S = 10.0
"""How long a traceback is held back: a script that ends with it has ended by then, also on a busy machine, or has
reported its failure."""


class WorkerOutput:
    """Prefixes a host's lines with its name, and keeps the end of its standard error.

    Args:
        log: file of the lines; None: no file.
        show_all: True: print every line at once and as it is, lines of libraries and tracebacks too.
        is_failing: tells whether the script has reported an error of its own, and is about to end.
    """

    def __init__(
        self,
        host: str,
        log: Path | None,
        *,
        show_all: bool = False,
        is_failing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._prefix = f"[{host}] ".encode()
        self._file = LogFile(log) if log is not None else None
        self._everything = show_all
        self._is_failing = is_failing
        self._errors: collections.deque[str] = collections.deque(maxlen=ERROR_LINES)
        self._held: list[bytes] = []
        """Lines of standard error from the beginning of a traceback on; not on the screen yet."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_crashing = False
        self._gloo = _GlooFilter()

    async def follow(self, reader: LineReader, *, is_error: bool) -> None:
        """Copy lines until the stream ends."""
        while True:
            if not (line := await reader.readline()):
                return
            self.write(line.rstrip(b"\r\n"), is_error=is_error)

    def write(self, line: bytes, *, is_error: bool = False) -> None:
        """Write one line of the worker."""
        if self._file is not None:
            self._file.write(line)
        is_library_log = LIBRARY_LOG_PATTERN.search(line) is not None
        self._is_crashing |= is_error and CRASH_PATTERN.match(line) is not None
        if is_error and not is_library_log:
            self._errors.append(line.decode(errors="replace"))
        if self._everything:
            self._print(line)
            return
        if not is_error:
            shown = self._gloo.strip(line)
            if shown is None:
                return
            line = shown
        if is_library_log or (is_error and self._is_crashing):
            return
        elif is_error and (self._held or is_start(line.decode(errors="replace"))):
            self._hold(line)
        else:
            self._print(line)

    def release(self) -> None:
        """Print a traceback that was held back."""
        held = b"\n".join(self._held)
        self.forget_traceback()
        if held:
            for line in shorten_traceback(held.decode(errors="surrogateescape")).split("\n"):
                self._print(line.encode(errors="surrogateescape"))

    def forget_traceback(self) -> None:
        """Do not print a traceback that was held back: the job's end shows it."""
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def read_last_errors(self) -> str:
        """Return the end of what the worker wrote to standard error: from the last traceback on, if there is one."""
        lines = list(self._errors)
        start = find_last_chain(lines)
        return "\n".join(lines[-LAST_LINES:] if start is None else lines[start:])

    def clear_errors(self) -> None:
        """Forget the standard error of the worker before: it is not the new worker's."""
        self._errors.clear()
        self._is_crashing = False
        self._gloo = _GlooFilter()

    def close(self) -> None:
        """Print what was held back, and close the log file, if there is one; a later line opens it again."""
        self.release()
        if self._file is not None:
            self._file.close()

    def _print(self, line: bytes) -> None:
        print_bytes(self._prefix + line + b"\n")

    def _hold(self, line: bytes) -> None:
        self._held.append(line)
        if len(self._held) > ERROR_LINES:  # no traceback is as long: the script works on
            self.release()
        elif self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HOLD_S, self._on_timer)

    def _on_timer(self) -> None:
        if self._is_failing():
            self._start_timer()
        else:
            self.release()


_GLOO_BEGINNING = b"[Gloo] Rank "
_GLOO_PIECE = re.compile(
    rb"\[Gloo\] Rank \d*"
    rb"|(?:^\d+)?(?: is connected to | peer ranks\. ?|Expected number of connected peer ranks is : )\d*"
)
"""Words of a message with the number that follows. A number before them is gloo's only at the beginning of a line."""


class _GlooFilter:
    """Takes what gloo prints when hosts connect out of the lines of the script.

    Gloo writes `[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3` and a
    newline in pieces, and threads that connect at the same time mix theirs: after a death, when several groups of hosts
    connect again, a line may have the pieces of two messages, and another only a number, or nothing. There are as many
    newlines as messages: the filter knows how many are still to come.
    """

    def __init__(self) -> None:
        self._num_missing = 0

    def strip(self, line: bytes) -> bytes | None:
        """Return the line without pieces of gloo's messages; None if nothing is left to be shown."""
        rest = _GLOO_PIECE.sub(b"", line)
        if rest != line:
            self._num_missing = max(self._num_missing + line.count(_GLOO_BEGINNING) - 1, 0)
        elif self._num_missing and (not line or line.isdigit()):
            self._num_missing -= 1
            return None
        else:
            return line
        return rest if rest.strip() else None
