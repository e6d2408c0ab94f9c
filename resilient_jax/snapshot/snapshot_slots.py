"""The two slots of a host and what is in them: who may write where, what is complete, what is given up.

Rules.
- The slot of the newest committed snapshot is never written to; nor is one whose snapshot may still be committed.
- A slot that a worker may write to is nobody else's until that worker says so or its line is closed.
- A snapshot that is complete here is not dropped: others may count on it. Only the next generation decides: what it
  goes on from counts as committed, and what is newer than that is gone.
- Snapshots of an older generation that are not complete when a new layout is opened are dropped.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import threading
import time
from typing import Final, Protocol

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
from resilient_jax.snapshot.memory_budget import (
    NUM_SLOTS,
    check_memory,
    compute_required_memory,
    read_free_memory,
)
from resilient_jax.snapshot.messages import (
    ParityPiece,
    ServerNotification,
    SlotInfo,
    SlotRetired,
    SnapshotSettled,
)
from resilient_jax.snapshot.slot_choice import choose_slot, format_snapshot_id, is_outdated, recency_key
from resilient_jax.snapshot.slot_contents import SlotContents, compute_slot_layout
from resilient_jax.snapshot.slot_memory import SlotMemory, SlotPhase

ALLOCATION_TIMEOUT_S: Final = 2.0
"""How long a snapshot waits at its begin for a slot that just gets its memory."""
COMMIT_TIMEOUT_S: Final = 0.1
"""How long for one whose snapshot is complete: on other hosts it may be known to be committed already."""
MAX_DROPPED_KEPT: Final = 64
"""Dropped snapshots whose reasons are kept, for hosts that ask late."""


class SlotListener(Protocol):
    """Who is told what happens. Called with the arena's lock held: must return at once and not call back."""

    def record_event(
        self, kind: EventKind, id: SnapshotId | None = None, **detail: str | float | bool
    ) -> None:
        """An event."""
        ...

    def notify_agent(self) -> None:
        """What is complete here, or that something no longer is."""
        ...

    def notify_worker(self, notice: ServerNotification) -> None:
        """Something the worker should know."""
        ...

    def notify_root(self, id: SnapshotId, layout: SnapshotLayout, reason: str) -> None:
        """This host will never be complete: the root must know."""
        ...


@dataclasses.dataclass(slots=True)
class _Slot:
    """A slot, once there is a layout, and the snapshot in it."""

    memory: SlotMemory | None = None
    contents: SlotContents | None = None
    is_allocating: bool = False


class SnapshotSlots:
    """See the rules above.

    Attributes:
        changed: its lock guards everything here; notified at every change.
        layout: the newest.
    """

    def __init__(self, host: HostName, listener: SlotListener) -> None:
        self.host = host
        self.changed = threading.Condition(threading.RLock())
        self.layout: SnapshotLayout | None = None
        self._listener = listener
        self._berths = [_Slot() for _ in range(NUM_SLOTS)]
        self._numbers = itertools.count()
        self._dropped: collections.OrderedDict[SnapshotId, str] = collections.OrderedDict()

    # For the worker.

    def open_layout(self, layout: SnapshotLayout, restored: SnapshotId | None = None) -> None:
        """Snapshots have this layout from now on, and free slots the memory for it.

        Args:
            layout: of a newer generation than any before, or the newest again.
            restored: the snapshot that the generation goes on from, the same on every host; None if that is not known.

        Raises:
            SnapshotRefused: there is not the memory for it, or the generation has another layout already.
            StaleGeneration: a newer one is open.
        """
        with self.changed:
            if self.layout != layout:
                self._check_new(layout)
                self._end_older(layout.generation, restored)
                self.layout = layout
                self.changed.notify_all()
        began_s = time.monotonic()
        self.allocate_slots()
        with self.changed:
            self._listener.record_event(
                EventKind.SNAPSHOT_SLOTS_ALLOCATED,
                nbytes=sum(b.memory.mapped_bytes for b in self._berths if b.memory is not None),
                duration_s=time.monotonic() - began_s,
                generation=layout.generation,
            )

    def share_slots(self) -> tuple[tuple[SlotInfo, ...], list[int]]:
        """The slots that have their memory, and descriptors of it, for the caller to close."""
        with self.changed:
            slots = [berth.memory for berth in self._berths if berth.memory is not None]
            sizes = tuple(SlotInfo(number=s.number, mapped_bytes=s.mapped_bytes) for s in slots)
            return sizes, [os.dup(slot.descriptor) for slot in slots]

    def begin(self, id: SnapshotId, writer: object) -> SlotContents:
        """A slot that `writer` may write the part of a new snapshot to.

        Raises:
            SnapshotDropped: there is none; says why.
            StaleGeneration: the snapshot's generation has ended.
        """
        self._make_room(id)
        with self.changed:
            layout = self._layout_of(id)
            if id in self._dropped or self._find(id) is not None:
                reason = self._dropped.get(id, "it was begun before on this host")
                raise SnapshotDropped(f"{format_snapshot_id(id)}: {reason}")
            self.changed.wait_for(lambda: self._choose(id)[0] is not None, self._worth_waiting_s())
            berth, reason = self._choose(id)
            if berth is None:
                self._remember_dropped(id, layout, reason)
                raise SnapshotDropped(f"{format_snapshot_id(id)}: {reason}")
            assert berth.memory is not None, "it was chosen"
            was_reported = berth.contents is not None
            berth.contents = SlotContents(id, layout, self.host, berth.memory, writer)
            if was_reported:
                self._listener.notify_agent()
            self.changed.notify_all()
            return berth.contents

    def finish(self, id: SnapshotId, writer: object) -> SlotContents:
        """The writer writes no more, and all is written: `seal` it.

        Raises:
            SnapshotDropped: it is not wanted any more.
            SnapshotMissing: this writer did not begin it.
        """
        with self.changed:
            held = self._written_by(id, writer)
            if held.drop_reason:
                self._release(held)
                raise SnapshotDropped(f"{format_snapshot_id(id)}: {held.drop_reason}")
            held.writer = None
            return held

    def seal(self, held: SlotContents, manifest: bytes) -> None:
        """The part is checksummed: others may have it.

        Raises:
            SnapshotDropped: it was dropped meanwhile.
        """
        with self.changed:
            self._check_held(held)
            held.store_manifest(self.host, manifest)
            held.advance(SlotPhase.PART)
            self.changed.notify_all()

    def abandon(self, id: SnapshotId, writer: object, reason: str) -> None:
        """The writer writes no more, and the part is not there."""
        with self.changed, contextlib.suppress(SnapshotMissing):
            held = self._written_by(id, writer)
            held.writer = None
            self.drop(id, reason)
            self._release(held)

    def abandon_all(self, writer: object, reason: str) -> None:
        """The writer is gone."""
        with self.changed:
            for held in self._all_held():
                if held.writer is writer:
                    self.abandon(held.id, writer, reason)

    # For the exchange with other hosts.

    def find(self, id: SnapshotId, at_least: SlotPhase) -> SlotContents:
        """The snapshot, if it is as far as that here and its mark is whole.

        Raises:
            SnapshotMissing: it is not, or not yet.
            SnapshotDropped: it never will be.
            ChecksumMismatch: the mark is damaged: nothing that the slot holds is believed.
        """
        with self.changed:
            if id in self._dropped:
                raise SnapshotDropped(f"{self.host} dropped {format_snapshot_id(id)}: {self._dropped[id]}")
            held = self._find(id)
            if held is None or held.phase < at_least:
                phase = "nothing" if held is None else held.phase.name.lower()
                raise SnapshotMissing(
                    f"{self.host} has {phase} of {format_snapshot_id(id)}, expected {at_least.name.lower()}"
                )
            self._check_mark(held)
            return held

    def store_parity(self, piece: ParityPiece) -> None:
        """Keeps parity. A piece that came before changes nothing.

        Raises:
            SnapshotMissing: the snapshot was not begun here yet.
            SnapshotDropped: it was given up.
            ChecksumMismatch: the piece is damaged.
            CallerError: it does not belong here.
        """
        held = self.find(piece.id, SlotPhase.WRITING)
        held.check_parity(piece)
        with self.changed:
            self._check_held(held)
            if held.phase < SlotPhase.COMPLETE:
                held.store_parity(piece)
                self.changed.notify_all()

    def is_held(self, held: object) -> bool:
        """Whether it is still in its slot: what was read of it meanwhile is its own."""
        with self.changed:
            return any(
                b.contents is held and not b.contents.drop_reason
                for b in self._berths
                if b.contents is not None
            )

    def advance(self, held: SlotContents, phase: SlotPhase) -> None:
        """Writes the mark.

        Raises:
            SnapshotDropped: it was dropped meanwhile.
        """
        with self.changed:
            self._check_held(held)
            held.advance(phase, time.time() if phase is SlotPhase.COMPLETE else 0.0)
            kind = (
                EventKind.SNAPSHOT_COMMITTED if phase is SlotPhase.COMMITTED else EventKind.SNAPSHOT_COMPLETE
            )
            self._listener.record_event(kind, held.id, nbytes=held.nbytes)
            if phase is SlotPhase.COMMITTED:
                self._listener.notify_worker(SnapshotSettled(id=held.id, committed=True))
            self._listener.notify_agent()
            self.changed.notify_all()

    def drop(self, id: SnapshotId, reason: str, *, known_to_root: bool = False) -> None:
        """Gives the snapshot up, unless it is complete."""
        with self.changed:
            held = self._find(id)
            if held is None or held.phase >= SlotPhase.COMPLETE or held.drop_reason:
                return
            held.drop_reason = reason
            self._remember_dropped(id, held.layout, reason, known_to_root=known_to_root)
            if held.writer is None:
                self._release(held)
            self.changed.notify_all()

    def withdraw(self, held: SlotContents, reason: str) -> None:
        """Lets go of a complete snapshot that its root says will never be committed."""
        with self.changed:
            if self.is_held(held) and held.phase is SlotPhase.COMPLETE:
                held.drop_reason = reason
                self._remember_dropped(held.id, held.layout, reason, known_to_root=True)
                self._release(held)
                self._listener.notify_agent()

    def allocate_slots(self) -> None:
        """Gives every slot that is free the size that the layout needs. Takes a second for a GB.

        Raises:
            SnapshotRefused: the kernel does not give the memory.
        """
        while (found := self._take_unprepared()) is not None:
            berth, mapped_bytes = found
            slot = None
            try:
                slot = SlotMemory(next(self._numbers), mapped_bytes)
            finally:
                with self.changed:
                    berth.memory, berth.is_allocating = slot, False
                    self.changed.notify_all()

    def list_statuses(self) -> tuple[SnapshotStatus, ...]:
        """What is complete here and whole, oldest first."""
        with self.changed:
            return tuple(
                SnapshotStatus(
                    id=held.id,
                    phase=SnapshotPhase.COMMITTED
                    if held.phase is SlotPhase.COMMITTED
                    else SnapshotPhase.COMPLETE,
                    groups=held.layout.groups,
                    nbytes=held.nbytes,
                    wall_s=held.wall_s,
                )
                for held in sorted(self._all_held(), key=lambda held: recency_key(held.id))
                if held.phase >= SlotPhase.COMPLETE and self._has_whole_mark(held)
            )

    def close(self) -> None:
        """Lets go of all snapshots."""
        with self.changed:
            for berth in self._berths:
                if berth.memory is not None:
                    berth.memory.close()
                berth.memory = berth.contents = None

    # With the lock held.

    def _check_new(self, layout: SnapshotLayout) -> None:
        if self.layout is not None and layout.generation <= self.layout.generation:
            if layout.generation < self.layout.generation:
                raise StaleGeneration(
                    f"{self.host} has the layout of generation {self.layout.generation}, found an older one, of "
                    f"generation {layout.generation}"
                )
            raise SnapshotRefused(
                f"{self.host}: generation {layout.generation} has another layout already; every worker must compute "
                "the same one, once"
            )
        needed = compute_required_memory(layout, self.host)
        each = needed.total_bytes // NUM_SLOTS
        # A slot that is larger than needed is kept as it is: what it has to spare is no use to the other one.
        taken_over = sum(min(each, b.memory.mapped_bytes) for b in self._berths if b.memory is not None)
        check_memory(needed, read_free_memory(), self.host, reclaimed_bytes=taken_over)

    def _end_older(self, generation: GenerationNumber, restored: SnapshotId | None) -> None:
        for held in self._all_held():
            if held.phase < SlotPhase.COMPLETE:
                self.drop(
                    held.id, f"generation {generation} began before it was complete", known_to_root=True
                )
            elif restored is not None and held.id > restored:
                held.drop_reason = f"generation {generation} goes on from {format_snapshot_id(restored)}"
                self._remember_dropped(held.id, held.layout, held.drop_reason, known_to_root=True)
                self._release(held)
                self._listener.notify_agent()
            elif held.id == restored and held.phase is SlotPhase.COMPLETE:
                self.advance(held, SlotPhase.COMMITTED)

    def _layout_of(self, id: SnapshotId) -> SnapshotLayout:
        if self.layout is None or id.generation > self.layout.generation:
            raise SnapshotDropped(
                f"{format_snapshot_id(id)}: its layout is unknown on {self.host}; open it first"
            )
        if id.generation < self.layout.generation:
            raise StaleGeneration(
                f"{format_snapshot_id(id)}: {self.host} is in generation {self.layout.generation}"
            )
        return self.layout

    def _choose(self, id: SnapshotId) -> tuple[_Slot | None, str]:
        """A slot that is free and large enough; else why there is none."""
        layout = self._layout_of(id)
        ready = [berth for berth in self._berths if not berth.is_allocating]
        index, reason = choose_slot([berth.contents for berth in ready], layout.generation)
        if index is None:
            return None, reason
        if self._is_small(ready[index], layout):
            return None, "its slot did not get its memory in time"
        return ready[index], ""

    def _worth_waiting_s(self) -> float:
        """How long for a slot to become free by itself."""
        if any(berth.is_allocating for berth in self._berths):
            return ALLOCATION_TIMEOUT_S
        return COMMIT_TIMEOUT_S if any(h.phase is SlotPhase.COMPLETE for h in self._all_held()) else 0.0

    def _make_room(self, id: SnapshotId) -> None:
        """A slot may be free only now that it is needed, and too small."""
        with self.changed:
            layout = self._layout_of(id)
            free, _ = choose_slot([berth.contents for berth in self._berths], layout.generation)
            if free is not None and self._is_small(self._berths[free], layout):
                self._berths[free].contents = None
                self._listener.notify_agent()
        try:
            self.allocate_slots()
        except SnapshotRefused as error:
            raise SnapshotDropped(f"{format_snapshot_id(id)}: {error}") from error

    def _take_unprepared(self) -> tuple[_Slot, int] | None:
        """A free slot that is too small, emptied; None if there is none."""
        with self.changed:
            if self.layout is None:
                return None
            everything = self._all_held()
            for berth in self._berths:
                outdated = berth.contents is None or is_outdated(berth.contents, everything)
                if berth.is_allocating or not outdated or not self._is_small(berth, self.layout):
                    continue
                if berth.contents is not None:
                    self._listener.notify_agent()
                if berth.memory is not None:
                    self._listener.notify_worker(SlotRetired(number=berth.memory.number))
                    berth.memory.close()
                berth.is_allocating, berth.contents, berth.memory = True, None, None
                return berth, compute_slot_layout(self.layout, self.host).mapped_bytes
            return None

    def _is_small(self, berth: _Slot, layout: SnapshotLayout) -> bool:
        return (
            berth.memory is None
            or berth.memory.mapped_bytes < compute_slot_layout(layout, self.host).mapped_bytes
        )

    def _written_by(self, id: SnapshotId, writer: object) -> SlotContents:
        held = self._find(id)
        if held is None or held.writer is not writer:
            raise SnapshotMissing(f"{format_snapshot_id(id)} was not begun by this worker, or is finished")
        return held

    def _find(self, id: SnapshotId) -> SlotContents | None:
        return next((held for held in self._all_held() if held.id == id), None)

    def _all_held(self) -> list[SlotContents]:
        return [berth.contents for berth in self._berths if berth.contents is not None]

    def _check_held(self, held: SlotContents) -> None:
        if not self.is_held(held):
            raise SnapshotDropped(
                f"{format_snapshot_id(held.id)}: {held.drop_reason or 'its slot was taken'}"
            )

    def _release(self, held: SlotContents) -> None:
        for berth in self._berths:
            if berth.contents is held:
                berth.contents = None
        self.changed.notify_all()

    def _remember_dropped(
        self, id: SnapshotId, layout: SnapshotLayout, reason: str, *, known_to_root: bool = False
    ) -> None:
        self._dropped[id] = reason
        while len(self._dropped) > MAX_DROPPED_KEPT:
            self._dropped.popitem(last=False)
        self._listener.record_event(EventKind.SNAPSHOT_DROPPED, id, reason=reason)
        self._listener.notify_worker(SnapshotSettled(id=id, committed=False, reason=reason))
        if not known_to_root:
            self._listener.notify_root(id, layout, reason)

    def _check_mark(self, held: SlotContents) -> None:
        try:
            held.check_header()
        except ChecksumMismatch as error:
            self._listener.record_event(EventKind.SNAPSHOT_CORRUPT, held.id, error=str(error))
            raise

    def _has_whole_mark(self, held: SlotContents) -> bool:
        try:
            self._check_mark(held)
        except ChecksumMismatch:
            return False
        return True
