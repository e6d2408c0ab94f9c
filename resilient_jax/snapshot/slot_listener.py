"""The interface through which the snapshot slots report events and drops."""

from typing import Protocol

from resilient_jax.events import EventKind
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout
from resilient_jax.snapshot.messages import ServerNotification


class SlotListener(Protocol):
    """Receives what changes in the slots.

    Every method is called with the lock of `SnapshotSlots` held, so it must return at once and not call back.
    """

    def record_event(
        self, kind: EventKind, id: SnapshotId | None = None, **detail: str | float | bool
    ) -> None:
        """Record an event, of a snapshot if `id` is given."""
        ...

    def notify_agent(self) -> None:
        """Report to the agent that the set of complete snapshots has changed."""
        ...

    def notify_worker(self, notice: ServerNotification) -> None:
        """Send a notification to the worker of this host."""
        ...

    def notify_root(self, id: SnapshotId, layout: SnapshotLayout, reason: str) -> None:
        """Report to the root of the layout that this host will never complete the snapshot."""
        ...
