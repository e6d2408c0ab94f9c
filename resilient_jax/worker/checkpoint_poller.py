"""Polls storage for the newest checkpoint, for the decision where a job resumes whose state is lost.

A worker polls while it is idle, when that decision is made, and repeatedly, because a save may finish meanwhile; and
from an order to pause on, since the job may end there, with an outcome that says what is saved. The
poller has a thread of its own: storage that hangs must not delay a recovery that does not need it. What is reported is
the newest checkpoint now, not a promise that it can be read.
"""

import operator
import threading
from collections.abc import Callable
from typing import Final

from resilient_jax.events import EventKind

FindLatestCheckpoint = Callable[[], int | None]
"""Returns the step of the newest finished checkpoint on storage; None: there is none. Called on another thread."""
POLL_INTERVAL_S: Final = 1.0
"""Several polls fit into the time that lost hosts get to come back."""
MAX_REASON_LENGTH: Final = 200


class CheckpointPoller:
    """Polls from `resume` to `pause`, as often as these are called; its thread dies with the process.

    Args:
        find: returns the newest checkpoint; None: the training saves none, and nothing is polled.
    """

    def __init__(
        self,
        find: FindLatestCheckpoint | None,
        report: Callable[[int | None], None],
        record_event: Callable[..., object],
    ) -> None:
        self._find = find
        self._report = report
        self._record_event = record_event
        self._latest: int | None = None
        self._must_report = threading.Event()
        self._failure = ""
        self._is_idle = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Begin to poll: the worker is about to wait. The next result is reported, whether it has changed or not."""
        if self._find is None:
            return
        self._must_report.set()
        self._is_idle.set()
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._poll, name="resilient-jax-checkpoint-poller", daemon=True
            )
            self._thread.start()

    def pause(self) -> None:
        """Stop polling: the worker trains. A poll that has begun may still be reported."""
        self._is_idle.clear()

    def _poll(self) -> None:
        while True:
            self._is_idle.wait()
            # Cleared before the poll: a `resume` during it starts another one at once.
            self._wake.clear()
            # Not exchanged for False in one line: a `resume` in between would be lost.
            if must_report := self._must_report.is_set():
                self._must_report.clear()
            seen = self._poll_once()
            if must_report or seen != self._latest:
                self._latest = seen
                self._report(seen)
            self._wake.wait(POLL_INTERVAL_S)

    def _poll_once(self) -> int | None:
        assert self._find is not None
        try:
            seen, failure = self._find(), ""
            seen = None if seen is None else operator.index(seen)  # may be numpy's
        except Exception as error:  # a function of the user's, on a thread of ours: it becomes an event
            seen, failure = None, f"{type(error).__name__}: {error}"[:MAX_REASON_LENGTH]
        if failure and failure != self._failure:
            self._record_event(EventKind.CHECKPOINT_POLL_FAILED, reason=failure)
        self._failure = failure
        return seen
