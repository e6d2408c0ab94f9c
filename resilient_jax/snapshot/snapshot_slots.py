"""The two snapshot slots of a host (a double buffer), and the rules for the snapshots in them.

Rules.
- The slot of the newest committed snapshot is never written to, nor is one whose snapshot may still be committed.
- A slot that a worker may write to is not assigned to another snapshot until that worker ends its write or its
  connection closes.
- A snapshot that is complete here is not dropped, since other hosts may count on it. Only the next generation decides:
  the snapshot that it restores counts as committed, and newer ones are dropped.
- Snapshots of an older generation that are not complete when a new layout is opened are dropped.
"""

import contextlib
import threading
import time

from resilient_jax.errors import (
    ChecksumMismatch,
    SnapshotDropped,
    SnapshotMissing,
    SnapshotRefused,
    StaleGeneration,
)
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout, SnapshotPhase, SnapshotStatus
from resilient_jax.snapshot.drop_log import DropLog
from resilient_jax.snapshot.memory_budget import (
    NUM_SLOTS,
    check_memory,
    compute_required_memory,
    read_free_memory,
)
from resilient_jax.snapshot.messages import ParityPiece, SnapshotSettled
from resilient_jax.snapshot.notifier import Notifier
from resilient_jax.snapshot.slot_choice import format_snapshot_id, recency_key
from resilient_jax.snapshot.slot_contents import SlotContents
from resilient_jax.snapshot.slot_memory import SlotPhase
from resilient_jax.snapshot.slot_table import SlotTable


class SnapshotSlots:
    """The snapshots of one host, by the rules above; safe to share between threads.

    Attributes:
        changed: a condition whose lock guards the slots and all contents; notified at every change.
    """

    def __init__(self, host: HostName, listener: Notifier) -> None:
        """Start with empty slots that have no memory."""
        self.host = host
        self.changed = threading.Condition(threading.RLock())
        self.table = SlotTable(host, self.changed, listener)
        self._listener = listener
        self._drops = DropLog(host, listener)

    @property
    def layout(self) -> SnapshotLayout | None:
        """The newest layout that was opened."""
        return self.table.layout

    # For the worker.

    def open_layout(self, layout: SnapshotLayout, restored: SnapshotId | None = None) -> None:
        """Use this layout for all later snapshots, and allocate its memory in free slots.

        Args:
            layout: layout of a newer generation than any before, or the newest layout again.
            restored: the snapshot that the generation resumes from, or would go back to, the same on every host; None:
                unknown.

        Raises:
            SnapshotRefused: the host has too little memory, or the generation already has another layout.
            StaleGeneration: a newer layout is open.
        """
        with self.changed:
            if self.layout != layout:
                _check_new_layout(self.host, self.layout, layout)
                _check_memory(self.host, layout, self.table)
                self._end_older_generations(layout.generation, restored)
                self.table.layout = layout
                self.changed.notify_all()
        began_s = time.monotonic()
        self.table.allocate()
        with self.changed:
            self._listener.record_event(
                EventKind.SNAPSHOT_SLOTS_ALLOCATED,
                nbytes=self.table.count_mapped_bytes(),
                duration_s=time.monotonic() - began_s,
                generation=layout.generation,
            )

    def begin(self, id: SnapshotId, writer: object) -> SlotContents:
        """Return a slot's contents, whose part `writer` may write.

        Raises:
            SnapshotDropped: no slot is free, or the snapshot was begun or dropped before.
            StaleGeneration: the snapshot's generation has ended.
        """
        with self.changed:
            # In three steps, since memory is allocated without the lock; the last one chooses the slot anew.
            self.table.empty_undersized(id)
        try:
            self.table.allocate()
        except SnapshotRefused as error:
            raise SnapshotDropped(f"{format_snapshot_id(id)}: {error}") from error
        with self.changed:
            layout = self.table.get_layout(id)
            reason = self._drops.get_reason(id)
            if reason is not None or self.table.find(id) is not None:
                raise SnapshotDropped(f"{format_snapshot_id(id)}: {reason or 'this host began it before'}")
            contents, reason = self.table.begin(id, writer)
            if contents is None:
                self._drops.record(id, layout, reason)
                raise SnapshotDropped(f"{format_snapshot_id(id)}: {reason}")
            return contents

    def finish(self, id: SnapshotId, writer: object) -> SlotContents:
        """End a writer's access to a part that is written completely; `seal` it next.

        Raises:
            SnapshotDropped: the snapshot was dropped meanwhile.
            SnapshotMissing: this writer did not begin the snapshot.
        """
        with self.changed:
            contents = self.table.find_written_by(id, writer)
            if contents.drop_reason:
                self.table.remove(contents)
                raise SnapshotDropped(f"{format_snapshot_id(id)}: {contents.drop_reason}")
            contents.writer = None
            return contents

    def seal(self, contents: SlotContents, manifest: bytes) -> None:
        """Store the manifest of a part with its checksums; from now on other hosts may read the part.

        Raises:
            SnapshotDropped: the snapshot was dropped meanwhile.
        """
        with self.changed:
            self._check_not_dropped(contents)
            contents.store_manifest(self.host, manifest)
            contents.advance(SlotPhase.PART)
            self.changed.notify_all()

    def abandon(self, id: SnapshotId, writer: object, reason: str) -> None:
        """End a writer's access to a part that is incomplete, and drop the snapshot."""
        with self.changed, contextlib.suppress(SnapshotMissing):
            contents = self.table.find_written_by(id, writer)
            contents.writer = None
            self.drop(id, reason)
            self.table.remove(contents)

    def abandon_all(self, writer: object, reason: str) -> None:
        """Abandon every snapshot that a writer has begun and not finished."""
        with self.changed:
            for contents in self.table.list_contents():
                if contents.writer is writer:
                    self.abandon(contents.id, writer, reason)

    # For the exchange with other hosts.

    def find(self, id: SnapshotId, at_least: SlotPhase) -> SlotContents:
        """Return a snapshot that has reached a phase and whose header is intact.

        Raises:
            SnapshotMissing: the snapshot is not here, or has not reached the phase yet.
            SnapshotDropped: this host dropped the snapshot.
            ChecksumMismatch: the header is corrupt, so nothing in the slot can be trusted.
        """
        with self.changed:
            if self._drops.get_reason(id) is not None:
                raise SnapshotDropped(self._drops.describe(id))
            contents = self.table.find(id)
            if contents is None or contents.phase < at_least:
                phase = "nothing" if contents is None else contents.phase.name.lower()
                raise SnapshotMissing(
                    f"{self.host} has {phase} of {format_snapshot_id(id)}, expected {at_least.name.lower()}"
                )
            self._check_header(contents)
            return contents

    def store_parity(self, piece: ParityPiece) -> None:
        """Store a piece of parity; storing the same piece again changes nothing.

        Raises:
            SnapshotMissing: this host has not begun the snapshot yet.
            SnapshotDropped: this host dropped the snapshot.
            ChecksumMismatch: the piece is corrupt.
            CallerError: the piece does not belong on this host.
        """
        contents = self.find(piece.id, SlotPhase.WRITING)
        # Checksums are computed without the lock, so it is asked again below whether the snapshot is still there.
        contents.check_parity(piece)
        with self.changed:
            self._check_not_dropped(contents)
            # A repeated piece is not written again once other hosts may read the row.
            if contents.phase < SlotPhase.COMPLETE:
                contents.store_parity(piece)
                self.changed.notify_all()

    def is_held(self, contents: object) -> bool:
        """Return whether contents are still in their slot: if so, the bytes that were read from them are valid."""
        with self.changed:
            return self.table.has(contents)

    def advance(self, contents: SlotContents, phase: SlotPhase) -> None:
        """Record in the header that a snapshot is complete or committed, and report it.

        Raises:
            SnapshotDropped: the snapshot was dropped meanwhile.
        """
        with self.changed:
            self._check_not_dropped(contents)
            contents.advance(phase, time.time() if phase is SlotPhase.COMPLETE else 0.0)
            is_committed = phase is SlotPhase.COMMITTED
            kind = EventKind.SNAPSHOT_COMMITTED if is_committed else EventKind.SNAPSHOT_COMPLETE
            self._listener.record_event(kind, contents.id, nbytes=contents.nbytes)
            if is_committed:
                self._listener.notify_worker(SnapshotSettled(id=contents.id, committed=True))
            self._listener.notify_agent()
            self.changed.notify_all()

    def drop(self, id: SnapshotId, reason: str, *, known_to_root: bool = False) -> None:
        """Drop a snapshot unless it is complete. Its slot is free once no worker may write to it."""
        with self.changed:
            contents = self.table.find(id)
            if contents is None or contents.phase >= SlotPhase.COMPLETE or contents.drop_reason:
                return
            contents.drop_reason = reason
            self._drops.record(id, contents.layout, reason, known_to_root=known_to_root)
            if contents.writer is None:
                self.table.remove(contents)
            self.changed.notify_all()

    def withdraw(self, contents: SlotContents, reason: str) -> None:
        """Drop a complete snapshot that, as its root has decided, will never be committed."""
        with self.changed:
            if self.is_held(contents) and contents.phase is SlotPhase.COMPLETE:
                self._drop_complete(contents, reason)

    def list_statuses(self) -> tuple[SnapshotStatus, ...]:
        """Return the complete snapshots with an intact header, oldest first."""
        with self.changed:
            return tuple(
                _make_status(contents, self.host)
                for contents in sorted(self.table.list_contents(), key=lambda held: recency_key(held.id))
                if contents.phase >= SlotPhase.COMPLETE and self._has_intact_header(contents)
            )

    # With the lock held.

    def _end_older_generations(self, generation: GenerationNumber, restored: SnapshotId | None) -> None:
        for contents in self.table.list_contents():
            if contents.phase < SlotPhase.COMPLETE:
                reason = f"generation {generation} began before the snapshot was complete"
                self.drop(contents.id, reason, known_to_root=True)
            elif restored is not None and contents.id > restored:
                reason = f"generation {generation} counts on {format_snapshot_id(restored)}"
                self._drop_complete(contents, reason)
            elif contents.id == restored and contents.phase is SlotPhase.COMPLETE:
                self.advance(contents, SlotPhase.COMMITTED)

    def _drop_complete(self, contents: SlotContents, reason: str) -> None:
        contents.drop_reason = reason
        self._drops.record(contents.id, contents.layout, reason, known_to_root=True)
        self.table.remove(contents)
        self._listener.notify_agent()

    def _check_not_dropped(self, contents: SlotContents) -> None:
        if not self.table.has(contents):
            reason = contents.drop_reason or "its slot was taken by another snapshot"
            raise SnapshotDropped(f"{format_snapshot_id(contents.id)}: {reason}")

    def _check_header(self, contents: SlotContents) -> None:
        try:
            contents.check_header()
        except ChecksumMismatch as error:
            self._listener.record_event(EventKind.SNAPSHOT_CORRUPT, contents.id, error=str(error))
            raise

    def _has_intact_header(self, contents: SlotContents) -> bool:
        try:
            self._check_header(contents)
        except ChecksumMismatch:
            return False
        return True


def _check_new_layout(host: HostName, current: SnapshotLayout | None, layout: SnapshotLayout) -> None:
    if current is None or layout.generation > current.generation:
        return
    if layout.generation < current.generation:
        raise StaleGeneration(
            f"{host} has the layout of generation {current.generation}, found an older one, of generation "
            f"{layout.generation}"
        )
    raise SnapshotRefused(
        f"{host}: generation {layout.generation} already has another layout; every worker must compute the same one, "
        "once"
    )


def _check_memory(host: HostName, layout: SnapshotLayout, table: SlotTable) -> None:
    required = compute_required_memory(layout, host)
    # A larger slot than needed is kept as it is: its surplus cannot serve the other slot.
    reclaimed_bytes = table.count_mapped_bytes(slot_limit_bytes=required.total_bytes // NUM_SLOTS)
    check_memory(required, read_free_memory(), host, reclaimed_bytes=reclaimed_bytes)


def _make_status(contents: SlotContents, host: HostName) -> SnapshotStatus:
    groups = contents.layout.groups
    index = next(index for index, group in enumerate(groups) if host in group.hosts)
    is_committed = contents.phase is SlotPhase.COMMITTED
    return SnapshotStatus(
        id=contents.id,
        phase=SnapshotPhase.COMMITTED if is_committed else SnapshotPhase.COMPLETE,
        group=groups[index],
        group_index=index,
        num_groups=len(groups),
        nbytes=contents.nbytes,
        wall_s=contents.wall_s,
    )
