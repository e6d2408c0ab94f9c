"""What a process of a job prints for people: written by a thread, so that who reads it never stops the job.

A terminal at Ctrl-S, a pager, an ssh that hangs or a log collector that is stuck takes nothing more, and a write to it
waits as long as that lasts. An event loop that waited with it would serve no store and renew no lease. So the loop only
hands its text over. What is not taken is kept up to `MAX_KEPT_BYTES`; beyond that the oldest lines are dropped, and one
line says how many were. Log files have them all.
"""

import collections
import contextlib
import io
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import Final, TextIO

MAX_KEPT_BYTES: Final = 8 * 2**20
"""More than jobs print at once as a rule, and no burden for a host."""
MAX_WRITE_BYTES: Final = 2**16
END_TIMEOUT_S: Final = 10.0
"""How long the end of a process waits for who reads its last lines."""


class ScreenOutput:
    """Writes text to a descriptor, from a thread that ends with `close`. Never raises, and never waits.

    Unbuffered otherwise, so that nothing is left to be written, and to fail, at the end of the process.
    """

    def __init__(self, descriptor: int) -> None:
        """Write to the descriptor, which stays open until the thread has ended."""
        self._descriptor = descriptor
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._texts: collections.deque[bytes] = collections.deque()
        self._num_bytes = 0
        self._num_lost = 0
        """Lines that were dropped, and that nobody was told of yet."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def print_bytes(self, text: bytes) -> None:
        """Have the text written after all that was printed before."""
        with self._changed:
            self._texts.append(text)
            self._num_bytes += len(text)
            while self._num_bytes > MAX_KEPT_BYTES:
                self._num_lost += self._pop().count(b"\n")
            self._start_thread()
            self._changed.notify()

    def close(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Wait until everything is written, or for so long."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        # A daemon, because the end of the process must not wait for a write that nobody takes.
        thread = threading.Thread(target=self._write_all, name="screen output", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread is left: tried again with the next text
            thread.start()
            self._thread = thread

    def _write_all(self) -> None:
        while text := self._wait_text():
            if not _write(self._descriptor, text):
                with self._changed:
                    self._num_lost += text.count(b"\n")

    def _wait_text(self) -> bytes:
        """Return what is to be written next; empty when the output is closed and all is written."""
        with self._changed:
            while not self._texts and not self._is_closed:
                self._changed.wait()
            taken = bytearray()
            if self._texts and self._num_lost:
                taken += f"({self._num_lost} lines were lost here: nobody took this output)\n".encode()
                self._num_lost = 0
            while self._texts and (not taken or len(taken) + len(self._texts[0]) <= MAX_WRITE_BYTES):
                taken += self._pop()
            return bytes(taken)

    def _pop(self) -> bytes:
        text = self._texts.popleft()
        self._num_bytes -= len(text)
        return text


def _write(descriptor: int, text: bytes) -> bool:
    """Write the text completely, however long that takes; return False if it cannot be written."""
    rest = memoryview(text)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # whoever shares the descriptor does not want to wait for it
            with contextlib.suppress(OSError):
                select.select([], [descriptor], [])
        except OSError:  # a full disk, a reader that is gone
            return False
    return True


_standard_outputs: list[ScreenOutput] = []
"""What `print_bytes` hands its text to; empty: it writes itself."""


def print_bytes(text: bytes) -> None:
    """Print text on standard output. Never raises: a job does not end because its output is closed.

    Waits for who reads it, except within `unblocked_output`.
    """
    if _standard_outputs:
        _standard_outputs[-1].print_bytes(text)
    elif (descriptor := _find_descriptor(sys.stdout)) is not None:
        _write(descriptor, text)


@contextlib.contextmanager
def unblocked_output() -> Iterator[None]:
    """Within the block `print_bytes`, and what Python writes to standard error, never wait for who reads it.

    At the end of the block what is left is written, within `END_TIMEOUT_S`.
    """
    with contextlib.ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            if (descriptor := _find_descriptor(stream)) is None:
                continue
            screen = ScreenOutput(descriptor)
            stack.callback(screen.close)
            if stream is sys.stdout:
                _standard_outputs.append(screen)
                stack.callback(_standard_outputs.remove, screen)
            else:
                stack.enter_context(contextlib.redirect_stderr(_ScreenStream(screen)))
        yield


def _find_descriptor(stream: TextIO | None) -> int | None:
    """Return the descriptor of a standard stream; None: it is closed, or writes to none."""
    try:
        return stream.fileno() if stream is not None else None  # None: closed (`>&-`) before Python began
    except (OSError, ValueError):
        return None


class _ScreenStream(io.TextIOBase):
    """A text stream that hands over what is written to it."""

    def __init__(self, screen: ScreenOutput) -> None:
        self._screen = screen

    def write(self, text: str, /) -> int:
        """Have the text written; return its length."""
        self._screen.print_bytes(text.encode(errors="backslashreplace"))
        return len(text)
