"""Reads microbatches ahead on threads, so that the accelerator does not wait for them.

Rules, all under `_changed`:
- A read begins when its `Future` is put into `_reads`; so it begins once, and every caller of `get` waits for it.
- A thread begins the next expected read while fewer than `buffer_size` reads have begun that `get` has not requested.
- A `get` of a microbatch whose read has not begun reads on the caller's thread: no caller waits for room in the buffer,
  so there is no deadlock.
- A read ahead that failed is repeated by `get`: JAX's devices may have changed during the read, and a persistent error
  is then raised with the stack of the caller.
- `expect` drops what is no longer wanted. A read in progress cannot be stopped; only callers that wait already get its
  result.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import numpy as np

from resilient_jax.data.example_layout import Tree
from resilient_jax.data.microbatch_rows import ALL_ROWS, RowPart, check_positive_integers
from resilient_jax.data.microbatches import MicrobatchData
from resilient_jax.errors import DataError
from resilient_jax.telemetry.worker_activity import worker_activity

CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for reads in progress; a source that takes longer hangs."""

logger = logging.getLogger(__name__)

MicrobatchKey = tuple[int, int, RowPart]
"""(step, index, part) of a microbatch."""


class Prefetcher:
    """Microbatches that are read before they are requested.

    At most `buffer_size` unrequested microbatches are in memory, or being read. Requested ones stay until the next
    `expect`, so that a step can be repeated: call `expect` in each step. All methods are thread-safe.
    """

    def __init__(self, data: MicrobatchData, *, buffer_size: int = 8, num_threads: int = 2) -> None:
        """Start the threads, which wait for `expect`.

        Args:
            data: source that is read from all threads at once.
            buffer_size: microbatches that are kept ready.
            num_threads: microbatches that are read at once.

        Raises:
            DataError: a number is below 1.
        """
        check_positive_integers(buffer_size=buffer_size, num_threads=num_threads)
        self._data = data
        self._ahead = buffer_size
        self._changed = threading.Condition()  # guards all attributes below; notified when they change
        self._queue: OrderedDict[MicrobatchKey, None] = OrderedDict()  # expected and not begun
        self._reads: dict[MicrobatchKey, Future[Tree]] = {}  # begun, done or not
        self._asked: set[MicrobatchKey] = set()  # of those in _reads
        self._expected: set[MicrobatchKey] = set()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._read_ahead, name=f"resilient-jax-data-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, wanted: Sequence[MicrobatchKey]) -> None:
        """Set what will be requested, in that order, in place of the last call's.

        What is read or being read and still wanted is kept, unless its read has failed; the rest is dropped. So after a
        failure only the microbatches that are new to this host are read.

        Raises:
            DataError: the prefetcher is closed.
        """
        with self._changed:
            self._check_open()
            self._expected = set(wanted)
            self._reads = {
                key: read
                for key, read in self._reads.items()
                if key in self._expected and not _has_failed(read)
            }
            self._asked &= self._reads.keys()
            self._queue = OrderedDict.fromkeys(key for key in wanted if key not in self._reads)
            self._changed.notify_all()

    def get(self, step: int, index: int, part: RowPart = ALL_ROWS) -> Tree:
        """Return the microbatch; wait until it is read, as long as the source takes.

        A second `get` before the next `expect` returns the same arrays: do not write into them. An unexpected
        microbatch is read in the call, and not kept.

        Raises:
            DataError: the prefetcher is closed.
            Exception: what the source raised for this microbatch, unchanged. The next `get` reads again.
        """
        key = (step, index, part)
        while True:
            with self._changed:
                self._check_open()
                read = self._reads.get(key)
                is_mine = read is None
                if read is None:
                    read = self._begin(key)
                self._asked.add(key)
                self._changed.notify_all()
            if is_mine:
                self._read(key, read)
            try:
                return read.result()
            except Exception:
                if is_mine:
                    raise
            finally:
                self._forget_unless_wanted(key, read)

    def lengths(self, step: int, index: int) -> np.ndarray | None:
        """Return int32: document lengths of a packed microbatch, from the source; None if the source has none."""
        return self._data.lengths(step, index)

    def close(self) -> None:
        """Drop all microbatches, and end the threads after their reads in progress. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._reads = {}
            self._asked = set()
            self._changed.notify_all()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.warning(
                    "%s: found a read of the data source that takes longer than %.0f s, expected it to end; left "
                    "behind, it ends with the process",
                    thread.name,
                    CLOSE_TIMEOUT_S,
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, key: MicrobatchKey) -> Future[Tree]:
        self._queue.pop(key, None)
        read: Future[Tree] = Future()
        self._reads[key] = read
        return read

    def _read_ahead(self) -> None:
        """Run a thread until the prefetcher is closed."""
        while (begun := self._wait_next()) is not None:
            with worker_activity.help_reading():
                self._read(*begun)
            del begun  # else an idle thread would keep the last microbatch in memory

    def _wait_next(self) -> tuple[MicrobatchKey, Future[Tree]] | None:
        """Begin the next expected read; return None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._queue and self._has_room()))
            if self._closed:
                return None
            key = next(iter(self._queue))
            return key, self._begin(key)

    def _has_room(self) -> bool:
        return len(self._reads) - len(self._asked) < self._ahead

    def _read(self, key: MicrobatchKey, read: Future[Tree]) -> None:
        try:
            read.set_result(self._data.batch(*key))
        # The thread's boundary: callers that wait for the future get the error.
        except BaseException as error:
            read.set_exception(error)

    def _forget_unless_wanted(self, key: MicrobatchKey, read: Future[Tree]) -> None:
        with self._changed:
            if self._reads.get(key) is read and (key not in self._expected or _has_failed(read)):
                del self._reads[key]
                self._asked.discard(key)

    def _check_open(self) -> None:
        if self._closed:
            raise DataError("found a closed Prefetcher, expected an open one; make another one")


def _has_failed(read: Future[Tree]) -> bool:
    return read.done() and read.exception() is not None
