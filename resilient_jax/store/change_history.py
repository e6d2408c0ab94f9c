"""The history of a store: the events of its last revisions, for watches that start in the past."""

import collections
import dataclasses
from collections.abc import Sequence

from resilient_jax.errors import CompactedRevision
from resilient_jax.ids import Revision
from resilient_jax.store.interface import PutEvent, WatchEvent

KEEP_REVISIONS = 10_000
"""How far back a watch can start: minutes of a busy job, of which a watcher needs seconds."""
KEEP_BYTES = 32 * 1024 * 1024
"""The memory of the history: with large values it covers fewer revisions."""
EVENT_OVERHEAD_BYTES = 300
"""The approximate size of the objects of one event, without key and value."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """All events of one revision."""

    revision: Revision
    events: tuple[WatchEvent, ...]
    size_bytes: int


class ChangeHistory:
    """Every change after `compacted_revision`, and nothing else.

    Attributes:
        revision: revision of the last change.
        compacted_revision: the last revision that the history no longer has.
    """

    def __init__(self, first_revision: Revision, *, keep_revisions: int, keep_bytes: int) -> None:
        """Start without a change.

        Args:
            first_revision: revision of the store while it is empty.
            keep_bytes: approximate memory of the history.
        """
        assert keep_revisions > 0, keep_revisions
        self.revision = first_revision
        self.compacted_revision = first_revision
        self._keep_revisions = keep_revisions
        self._keep_bytes = keep_bytes
        self._changes: collections.deque[_Change] = collections.deque()
        self._size_bytes = 0

    def begin(self, revision: Revision) -> None:
        """Begin anew after a revision, of whose changes nothing is known."""
        self.revision = self.compacted_revision = revision
        self._changes.clear()
        self._size_bytes = 0

    def append(self, revision: Revision, events: Sequence[WatchEvent]) -> None:
        """Add the events of a revision, if there are any, and forget the oldest revisions beyond the limits."""
        if not events:
            return
        assert revision == self.revision + 1, (revision, self.revision)
        self.revision = revision
        change = _Change(revision=revision, events=tuple(events), size_bytes=sum(map(_size_bytes, events)))
        self._changes.append(change)
        self._size_bytes += change.size_bytes
        # The newest change stays, however large it is: no watcher has read it yet.
        while len(self._changes) > self._keep_revisions or (
            self._size_bytes > self._keep_bytes and len(self._changes) > 1
        ):
            compacted = self._changes.popleft()
            self._size_bytes -= compacted.size_bytes
            self.compacted_revision = compacted.revision

    def list_since(self, revision: Revision) -> list[tuple[Revision, tuple[WatchEvent, ...]]]:
        """Return the events of each revision after this one, oldest first; the history must still have them."""
        return [(change.revision, change.events) for change in self._changes_since(Revision(revision + 1))]

    def read(
        self, prefix: str, from_revision: Revision, max_bytes: int, last_revision: Revision
    ) -> tuple[list[WatchEvent], Revision]:
        """Return the events of keys that begin with `prefix`, from `from_revision` on, in order.

        Args:
            prefix: "" for every key.
            max_bytes: the approximate limit; as a revision is never split, one may exceed it.
            last_revision: the last revision to read; later ones are not in the journal yet.

        Returns:
            The events, and the revision from which to continue.

        Raises:
            CompactedRevision: the history no longer has `from_revision`.
        """
        if from_revision <= self.compacted_revision:
            raise CompactedRevision(
                f"revision {from_revision} is compacted: the history begins with "
                f"{self.compacted_revision + 1}. Read with range, then watch from its revision + 1"
            )
        events: list[WatchEvent] = []
        size_bytes = 0
        for change in self._changes_since(from_revision):
            if change.revision > last_revision:
                break
            if size_bytes >= max_bytes:
                return events, change.revision
            matching = [event for event in change.events if event.key.startswith(prefix)]
            if matching:
                events += matching
                size_bytes += change.size_bytes
        return events, Revision(max(from_revision, last_revision + 1))

    def _changes_since(self, from_revision: Revision) -> list[_Change]:
        """Return the changes from a revision on, by index: the history has every revision."""
        missing = max(0, self.revision + 1 - from_revision)
        newest_first = [self._changes[-1 - index] for index in range(missing)]
        return newest_first[::-1]


def _size_bytes(event: WatchEvent) -> int:
    value_bytes = len(event.key_value.value) if isinstance(event, PutEvent) else 0
    return EVENT_OVERHEAD_BYTES + len(event.key) + value_bytes
