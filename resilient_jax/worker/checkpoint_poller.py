"""What a worker sees of checkpoints on storage, for whoever decides where a job goes on whose state is lost.

It looks while the worker is idle, for that is when it is decided, and again and again, for a save may end meanwhile. It
has a thread of its own: storage that hangs must hold up no recovery that needs nothing of it. What it sees is a level:
the newest now, not a promise that it can be read.
"""

import operator
import threading
from collections.abc import Callable
from typing import Final

from resilient_jax.events import EventKind

FindLatestCheckpoint = Callable[[], int | None]
"""Gives the step of the newest finished checkpoint on storage; None: there is none. Called on another thread."""
POLL_INTERVAL_S: Final = 1.0
"""Between two looks; a few fit into the time that lost hosts get to come back."""
MAX_REASON_LENGTH: Final = 200


class CheckpointPoller:
    """Looks from `begin` to `end`, as often as that happens; its thread dies with the process."""

    def __init__(
        self,
        find: FindLatestCheckpoint | None,
        tell: Callable[[int | None], None],
        note: Callable[..., object],
    ) -> None:
        """`find` looks; None: the training has no checkpoints, and nothing is done. `tell` hears what has changed."""
        self._find = find
        self._tell = tell
        self._note = note
        self._seen: int | None = None
        self._is_new = True
        self._failure = ""
        self._is_idle = threading.Event()
        self._at_once = threading.Event()
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """The worker is about to wait. What the next look sees is told, whether it has changed or not."""
        if self._find is None:
            return
        self._is_new = True
        self._is_idle.set()
        self._at_once.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="resilient-jax-lookout", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """It goes on; a look that has begun may still be told of."""
        self._is_idle.clear()

    def _look(self) -> None:
        while True:
            self._is_idle.wait()
            self._at_once.clear()
            is_new, self._is_new = self._is_new, False
            seen = self._look_once()
            if is_new or seen != self._seen:
                self._seen = seen
                self._tell(seen)
            self._at_once.wait(POLL_INTERVAL_S)

    def _look_once(self) -> int | None:
        assert self._find is not None
        try:
            seen, failure = self._find(), ""
            seen = None if seen is None else operator.index(seen)  # may be numpy's
        except Exception as error:  # a function of the user's, on a thread of ours: it becomes an event
            seen, failure = None, f"{type(error).__name__}: {error}"[:MAX_REASON_LENGTH]
        if failure and failure != self._failure:
            self._note(EventKind.CHECKPOINT_POLL_FAILED, reason=failure)
        self._failure = failure
        return seen
