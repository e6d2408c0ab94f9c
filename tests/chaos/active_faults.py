"""The registry of temporary faults: each is undone in time, at the latest when the campaign ends."""

import dataclasses
import threading
from collections.abc import Callable, Iterable

from resilient_jax.events import Event


@dataclasses.dataclass(slots=True)
class _Pending:
    undo: Callable[[], None]
    until: str | None
    timer: threading.Timer | None


class ActiveFaults:
    """The faults that are not undone yet; the campaign must call `undo_all` at its end.

    Timed faults end on their own threads: the campaign's thread may be waiting for a store that the fault has stopped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the pending faults, so that each is undone once."""
        self._pending: list[_Pending] = []

    def add(self, undo: Callable[[], None], *, after_s: float | None, until: str | None = None) -> None:
        """Call `undo` after `after_s` seconds, at an event of kind `until`, or in `undo_all`, whichever is first."""
        pending = _Pending(undo, until, None)
        if after_s is not None:
            pending.timer = threading.Timer(after_s, self._end, (pending,))
            pending.timer.daemon = True
        with self._lock:
            self._pending.append(pending)
        if pending.timer is not None:
            pending.timer.start()

    def observe_events(self, events: Iterable[Event]) -> None:
        """Undo the faults that last until one of these events."""
        kinds = {str(event.kind) for event in events}
        # A copy: timers remove their faults from the list on threads of their own.
        for pending in list(self._pending):
            if pending.until in kinds:
                self._end(pending)

    @property
    def num_timed(self) -> int:
        """Return the number of pending faults that end by a timer or an event."""
        with self._lock:
            return sum(p.timer is not None or p.until is not None for p in self._pending)

    def undo_all(self) -> None:
        """Undo all faults that are still pending."""
        for pending in list(self._pending):
            self._end(pending)

    def _end(self, pending: _Pending) -> None:
        with self._lock:
            if pending not in self._pending:
                return
            self._pending.remove(pending)
        if pending.timer is not None:
            pending.timer.cancel()
        # Without the lock, since it may take long. It is called once: the fault is no longer in the list.
        pending.undo()
