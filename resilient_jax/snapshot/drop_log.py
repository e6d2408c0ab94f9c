"""The snapshots that a host has dropped, with the reason for each, and the notifications of a drop."""

import collections
from typing import Final

from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout
from resilient_jax.snapshot.messages import SnapshotSettled
from resilient_jax.snapshot.notifier import Notifier
from resilient_jax.snapshot.slot_choice import format_snapshot_id

MAX_DROPPED_KEPT: Final = 64
"""Dropped snapshots whose reasons are kept, for late requests."""


class DropLog:
    """Keeps the reasons of the newest drops. The caller holds the lock of `SnapshotSlots`."""

    def __init__(self, host: HostName, listener: Notifier) -> None:
        """Start with no drop; `listener` is notified of every later one."""
        self._host = host
        self._listener = listener
        self._reasons: collections.OrderedDict[SnapshotId, str] = collections.OrderedDict()

    def record(
        self, id: SnapshotId, layout: SnapshotLayout, reason: str, *, known_to_root: bool = False
    ) -> None:
        """Record a drop and notify the worker, and the root unless the root decided the drop itself."""
        self._reasons[id] = reason
        while len(self._reasons) > MAX_DROPPED_KEPT:
            self._reasons.popitem(last=False)
        self._listener.record_event(EventKind.SNAPSHOT_DROPPED, id, reason=reason)
        self._listener.notify_worker(SnapshotSettled(id=id, committed=False, reason=reason))
        if not known_to_root:
            self._listener.notify_root(id, layout, reason)

    def get_reason(self, id: SnapshotId) -> str | None:
        """Return why the snapshot was dropped, or None if it was not dropped or is forgotten."""
        return self._reasons.get(id)

    def describe(self, id: SnapshotId) -> str:
        """Return a sentence for an error about a dropped snapshot."""
        return f"{self._host} dropped {format_snapshot_id(id)}: {self._reasons[id]}"
