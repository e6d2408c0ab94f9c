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
from resilient_jax.protocol.snapshots import SnapshotLayout, SnapshotId, SnapshotPhase, SnapshotStatus
from resilient_jax.snapshot.memory_budget import SLOTS, check_memory, memory_needed, read_free_memory
from resilient_jax.snapshot.messages import ParityPiece, Retired, ServerNotice, Settled, SlotSize
from resilient_jax.snapshot.slot_choice import age_of, choose_slot, is_outdated, name_of
from resilient_jax.snapshot.slot_contents import HeldSnapshot, shape_of
from resilient_jax.snapshot.slot_memory import Phase, Slot

PREPARING_LIMIT_S: Final = 2.0
"""How long a snapshot waits at its begin for a slot that just gets its memory."""
SETTLING_LIMIT_S: Final = 0.1
"""How long for one whose snapshot is complete: on other hosts it may be known to be committed already."""
REMEMBERED: Final = 64
"""Dropped snapshots whose reasons are kept, for hosts that ask late."""


class Listener(Protocol):
    """Who is told what happens. Called with the arena's lock held: must return at once and not call back."""

    def happened(self, kind: EventKind, id: SnapshotId | None = None, **detail: str | float | bool) -> None:
        """An event."""
        ...

    def holding_changed(self) -> None:
        """What is complete here, or that something no longer is."""
        ...

    def notify_worker(self, notice: ServerNotice) -> None:
        """Something the worker should know."""
        ...

    def dropped_here(self, held: SnapshotId, layout: SnapshotLayout, reason: str) -> None:
        """This host will never be complete: the root must know."""
        ...


@dataclasses.dataclass(slots=True)
class _Berth:
    """A slot, once there is a layout, and the snapshot in it."""

    slot: Slot | None = None
    held: HeldSnapshot | None = None
    preparing: bool = False


class Arena:
    """See the rules above.

    Attributes:
        changed: its lock guards everything here; notified at every change.
        layout: the newest.
    """

    def __init__(self, host: HostName, listener: Listener) -> None:
        self.host = host
        self.changed = threading.Condition(threading.RLock())
        self.layout: SnapshotLayout | None = None
        self._listener = listener
        self._berths = [_Berth() for _ in range(SLOTS)]
        self._numbers = itertools.count()
        self._dropped: collections.OrderedDict[SnapshotId, str] = collections.OrderedDict()

    # For the worker.

    def open(self, layout: SnapshotLayout, restored: SnapshotId | None = None) -> None:
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
        self.prepare()
        with self.changed:
            self._listener.happened(
                EventKind.SNAPSHOT_SLOTS_ALLOCATED,
                nbytes=sum(b.slot.mapped_bytes for b in self._berths if b.slot is not None),
                duration_s=time.monotonic() - began_s,
                generation=layout.generation,
            )

    def share_slots(self) -> tuple[tuple[SlotSize, ...], list[int]]:
        """The slots that have their memory, and descriptors of it, for the caller to close."""
        with self.changed:
            slots = [berth.slot for berth in self._berths if berth.slot is not None]
            sizes = tuple(SlotSize(number=s.number, mapped_bytes=s.mapped_bytes) for s in slots)
            return sizes, [os.dup(slot.descriptor) for slot in slots]

    def begin(self, id: SnapshotId, writer: object) -> HeldSnapshot:
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
                raise SnapshotDropped(f"{name_of(id)}: {reason}")
            self.changed.wait_for(lambda: self._choose(id)[0] is not None, self._worth_waiting_s())
            berth, reason = self._choose(id)
            if berth is None:
                self._remember_dropped(id, layout, reason)
                raise SnapshotDropped(f"{name_of(id)}: {reason}")
            assert berth.slot is not None, "it was chosen"
            was_reported = berth.held is not None
            berth.held = HeldSnapshot(id, layout, self.host, berth.slot, writer)
            if was_reported:
                self._listener.holding_changed()
            self.changed.notify_all()
            return berth.held

    def finish(self, id: SnapshotId, writer: object) -> HeldSnapshot:
        """The writer writes no more, and all is written: `seal` it.

        Raises:
            SnapshotDropped: it is not wanted any more.
            SnapshotMissing: this writer did not begin it.
        """
        with self.changed:
            held = self._written_by(id, writer)
            if held.dropped:
                self._release(held)
                raise SnapshotDropped(f"{name_of(id)}: {held.dropped}")
            held.writer = None
            return held

    def seal(self, held: HeldSnapshot, manifest: bytes) -> None:
        """The part is checksummed: others may have it.

        Raises:
            SnapshotDropped: it was dropped meanwhile.
        """
        with self.changed:
            self._check_held(held)
            held.store_manifest(self.host, manifest)
            held.advance(Phase.PART)
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

    def find(self, id: SnapshotId, at_least: Phase) -> HeldSnapshot:
        """The snapshot, if it is as far as that here and its mark is whole.

        Raises:
            SnapshotMissing: it is not, or not yet.
            SnapshotDropped: it never will be.
            ChecksumMismatch: the mark is damaged: nothing that the slot holds is believed.
        """
        with self.changed:
            if id in self._dropped:
                raise SnapshotDropped(f"{self.host} dropped {name_of(id)}: {self._dropped[id]}")
            held = self._find(id)
            if held is None or held.phase < at_least:
                phase = "nothing" if held is None else held.phase.name.lower()
                raise SnapshotMissing(
                    f"{self.host} has {phase} of {name_of(id)}, expected {at_least.name.lower()}"
                )
            self._check_mark(held)
            return held

    def store_piece(self, piece: ParityPiece) -> None:
        """Keeps parity. A piece that came before changes nothing.

        Raises:
            SnapshotMissing: the snapshot was not begun here yet.
            SnapshotDropped: it was given up.
            ChecksumMismatch: the piece is damaged.
            CallerError: it does not belong here.
        """
        held = self.find(piece.id, Phase.WRITING)
        held.check_piece(piece)
        with self.changed:
            self._check_held(held)
            if held.phase < Phase.COMPLETE:
                held.store_piece(piece)
                self.changed.notify_all()

    def is_held(self, held: object) -> bool:
        """Whether it is still in its slot: what was read of it meanwhile is its own."""
        with self.changed:
            return any(b.held is held and not b.held.dropped for b in self._berths if b.held is not None)

    def advance(self, held: HeldSnapshot, phase: Phase) -> None:
        """Writes the mark.

        Raises:
            SnapshotDropped: it was dropped meanwhile.
        """
        with self.changed:
            self._check_held(held)
            held.advance(phase, time.time() if phase is Phase.COMPLETE else 0.0)
            kind = EventKind.SNAPSHOT_COMMITTED if phase is Phase.COMMITTED else EventKind.SNAPSHOT_COMPLETE
            self._listener.happened(kind, held.id, nbytes=held.nbytes)
            if phase is Phase.COMMITTED:
                self._listener.notify_worker(Settled(id=held.id, committed=True))
            self._listener.holding_changed()
            self.changed.notify_all()

    def drop(self, id: SnapshotId, reason: str, *, known_to_root: bool = False) -> None:
        """Gives the snapshot up, unless it is complete."""
        with self.changed:
            held = self._find(id)
            if held is None or held.phase >= Phase.COMPLETE or held.dropped:
                return
            held.dropped = reason
            self._remember_dropped(id, held.layout, reason, known_to_root=known_to_root)
            if held.writer is None:
                self._release(held)
            self.changed.notify_all()

    def withdraw(self, held: HeldSnapshot, reason: str) -> None:
        """Lets go of a complete snapshot that its root says will never be committed."""
        with self.changed:
            if self.is_held(held) and held.phase is Phase.COMPLETE:
                held.dropped = reason
                self._remember_dropped(held.id, held.layout, reason, known_to_root=True)
                self._release(held)
                self._listener.holding_changed()

    def prepare(self) -> None:
        """Gives every slot that is free the size that the layout needs. Takes a second for a GB.

        Raises:
            SnapshotRefused: the kernel does not give the memory.
        """
        while (found := self._take_unprepared()) is not None:
            berth, mapped_bytes = found
            slot = None
            try:
                slot = Slot(next(self._numbers), mapped_bytes)
            finally:
                with self.changed:
                    berth.slot, berth.preparing = slot, False
                    self.changed.notify_all()

    def statuses(self) -> tuple[SnapshotStatus, ...]:
        """What is complete here and whole, oldest first."""
        with self.changed:
            return tuple(
                SnapshotStatus(
                    id=held.id,
                    phase=SnapshotPhase.COMMITTED
                    if held.phase is Phase.COMMITTED
                    else SnapshotPhase.COMPLETE,
                    groups=held.layout.groups,
                    nbytes=held.nbytes,
                    wall_s=held.wall_s,
                )
                for held in sorted(self._all_held(), key=lambda held: age_of(held.id))
                if held.phase >= Phase.COMPLETE and self._has_whole_mark(held)
            )

    def close(self) -> None:
        """Lets go of all snapshots."""
        with self.changed:
            for berth in self._berths:
                if berth.slot is not None:
                    berth.slot.close()
                berth.slot = berth.held = None

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
        needed = memory_needed(layout, self.host)
        each = needed.total // SLOTS
        # A slot that is larger than needed is kept as it is: what it has to spare is no use to the other one.
        taken_over = sum(min(each, b.slot.mapped_bytes) for b in self._berths if b.slot is not None)
        check_memory(needed, read_free_memory(), self.host, held=taken_over)

    def _end_older(self, generation: GenerationNumber, restored: SnapshotId | None) -> None:
        for held in self._all_held():
            if held.phase < Phase.COMPLETE:
                self.drop(
                    held.id, f"generation {generation} began before it was complete", known_to_root=True
                )
            elif restored is not None and held.id > restored:
                held.dropped = f"generation {generation} goes on from {name_of(restored)}"
                self._remember_dropped(held.id, held.layout, held.dropped, known_to_root=True)
                self._release(held)
                self._listener.holding_changed()
            elif held.id == restored and held.phase is Phase.COMPLETE:
                self.advance(held, Phase.COMMITTED)

    def _layout_of(self, id: SnapshotId) -> SnapshotLayout:
        if self.layout is None or id.generation > self.layout.generation:
            raise SnapshotDropped(f"{name_of(id)}: its layout is unknown on {self.host}; open it first")
        if id.generation < self.layout.generation:
            raise StaleGeneration(f"{name_of(id)}: {self.host} is in generation {self.layout.generation}")
        return self.layout

    def _choose(self, id: SnapshotId) -> tuple[_Berth | None, str]:
        """A slot that is free and large enough; else why there is none."""
        layout = self._layout_of(id)
        ready = [berth for berth in self._berths if not berth.preparing]
        index, reason = choose_slot([berth.held for berth in ready], layout.generation)
        if index is None:
            return None, reason
        if self._is_small(ready[index], layout):
            return None, "its slot did not get its memory in time"
        return ready[index], ""

    def _worth_waiting_s(self) -> float:
        """How long for a slot to become free by itself."""
        if any(berth.preparing for berth in self._berths):
            return PREPARING_LIMIT_S
        return SETTLING_LIMIT_S if any(h.phase is Phase.COMPLETE for h in self._all_held()) else 0.0

    def _make_room(self, id: SnapshotId) -> None:
        """A slot may be free only now that it is needed, and too small."""
        with self.changed:
            layout = self._layout_of(id)
            free, _ = choose_slot([berth.held for berth in self._berths], layout.generation)
            if free is not None and self._is_small(self._berths[free], layout):
                self._berths[free].held = None
                self._listener.holding_changed()
        try:
            self.prepare()
        except SnapshotRefused as error:
            raise SnapshotDropped(f"{name_of(id)}: {error}") from error

    def _take_unprepared(self) -> tuple[_Berth, int] | None:
        """A free slot that is too small, emptied; None if there is none."""
        with self.changed:
            if self.layout is None:
                return None
            everything = self._all_held()
            for berth in self._berths:
                outdated = berth.held is None or is_outdated(berth.held, everything)
                if berth.preparing or not outdated or not self._is_small(berth, self.layout):
                    continue
                if berth.held is not None:
                    self._listener.holding_changed()
                if berth.slot is not None:
                    self._listener.notify_worker(Retired(number=berth.slot.number))
                    berth.slot.close()
                berth.preparing, berth.held, berth.slot = True, None, None
                return berth, shape_of(self.layout, self.host).mapped_bytes
            return None

    def _is_small(self, berth: _Berth, layout: SnapshotLayout) -> bool:
        return berth.slot is None or berth.slot.mapped_bytes < shape_of(layout, self.host).mapped_bytes

    def _written_by(self, id: SnapshotId, writer: object) -> HeldSnapshot:
        held = self._find(id)
        if held is None or held.writer is not writer:
            raise SnapshotMissing(f"{name_of(id)} was not begun by this worker, or is finished")
        return held

    def _find(self, id: SnapshotId) -> HeldSnapshot | None:
        return next((held for held in self._all_held() if held.id == id), None)

    def _all_held(self) -> list[HeldSnapshot]:
        return [berth.held for berth in self._berths if berth.held is not None]

    def _check_held(self, held: HeldSnapshot) -> None:
        if not self.is_held(held):
            raise SnapshotDropped(f"{name_of(held.id)}: {held.dropped or 'its slot was taken'}")

    def _release(self, held: HeldSnapshot) -> None:
        for berth in self._berths:
            if berth.held is held:
                berth.held = None
        self.changed.notify_all()

    def _remember_dropped(
        self, id: SnapshotId, layout: SnapshotLayout, reason: str, *, known_to_root: bool = False
    ) -> None:
        self._dropped[id] = reason
        while len(self._dropped) > REMEMBERED:
            self._dropped.popitem(last=False)
        self._listener.happened(EventKind.SNAPSHOT_DROPPED, id, reason=reason)
        self._listener.notify_worker(Settled(id=id, committed=False, reason=reason))
        if not known_to_root:
            self._listener.dropped_here(id, layout, reason)

    def _check_mark(self, held: HeldSnapshot) -> None:
        try:
            held.check_mark()
        except ChecksumMismatch as error:
            self._listener.happened(EventKind.SNAPSHOT_CORRUPT, held.id, error=str(error))
            raise

    def _has_whole_mark(self, held: HeldSnapshot) -> bool:
        try:
            self._check_mark(held)
        except ChecksumMismatch:
            return False
        return True
