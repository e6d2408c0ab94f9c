"""The slots of a host: the memory that each has, and the snapshot that is in it.

The table allocates memory and finds contents; `SnapshotSlots` decides what happens to a snapshot.
"""

import dataclasses
import itertools
import os
import threading
from typing import Final

from resilient_jax.errors import SnapshotDropped, SnapshotMissing, StaleGeneration
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout
from resilient_jax.snapshot.memory_budget import NUM_SLOTS
from resilient_jax.snapshot.messages import SlotInfo, SlotRetired
from resilient_jax.snapshot.notifier import Notifier
from resilient_jax.snapshot.slot_choice import choose_slot, format_snapshot_id, is_outdated
from resilient_jax.snapshot.slot_contents import SlotContents, compute_slot_layout
from resilient_jax.snapshot.slot_memory import SlotMemory, SlotPhase

ALLOCATION_TIMEOUT_S: Final = 2.0
"""How long a new snapshot waits for a slot whose memory is being allocated."""
COMMIT_TIMEOUT_S: Final = 0.1
"""How long a new snapshot waits for the slot of a complete one, which may already be committed on other hosts."""


@dataclasses.dataclass(slots=True)
class _Slot:
    """A slot; it has memory from the first layout on."""

    memory: SlotMemory | None = None
    contents: SlotContents | None = None
    is_allocating: bool = False


class SlotTable:
    """The slots of one host. The caller holds the lock for every call but `allocate` and `share`, which take it."""

    def __init__(self, host: HostName, changed: threading.Condition, listener: Notifier) -> None:
        """Start with empty slots that have no memory; `changed` is notified when a slot becomes free."""
        self.layout: SnapshotLayout | None = None
        self._host = host
        self._changed = changed
        self._listener = listener
        self._slots = [_Slot() for _ in range(NUM_SLOTS)]
        self._numbers = itertools.count()

    # Contents.

    def list_contents(self) -> list[SlotContents]:
        """Return the snapshots that are in a slot, dropped ones that still have a writer included."""
        return [slot.contents for slot in self._slots if slot.contents is not None]

    def find(self, id: SnapshotId) -> SlotContents | None:
        """Return the contents of the slot that has the snapshot, if there is one."""
        return next((contents for contents in self.list_contents() if contents.id == id), None)

    def find_written_by(self, id: SnapshotId, writer: object) -> SlotContents:
        """Return the snapshot that `writer` may write to.

        Raises:
            SnapshotMissing: this writer did not begin the snapshot, or has finished it.
        """
        contents = self.find(id)
        if contents is None or contents.writer is not writer:
            raise SnapshotMissing(f"{format_snapshot_id(id)} was not begun by this worker, or is finished")
        return contents

    def has(self, contents: object) -> bool:
        """Return whether these contents are still in their slot and not dropped."""
        return any(found is contents and not found.drop_reason for found in self.list_contents())

    def remove(self, contents: SlotContents) -> None:
        """Free the slot that has these contents."""
        for slot in self._slots:
            if slot.contents is contents:
                slot.contents = None
        self._changed.notify_all()

    # Slots for new snapshots.

    def get_layout(self, id: SnapshotId) -> SnapshotLayout:
        """Return the layout of a new snapshot, which must be the newest one.

        Raises:
            SnapshotDropped: the layout of the snapshot's generation is not open yet.
            StaleGeneration: the snapshot's generation has ended.
        """
        layout, name = self.layout, format_snapshot_id(id)
        if layout is None or id.generation > layout.generation:
            raise SnapshotDropped(f"{name}: its layout is unknown on {self._host}; open it first")
        if id.generation < layout.generation:
            raise StaleGeneration(f"{name}: {self._host} is in generation {layout.generation}")
        return layout

    def begin(self, id: SnapshotId, writer: object) -> tuple[SlotContents | None, str]:
        """Put a new snapshot into a free slot; return its contents, or None and why there is no free slot.

        Wait a moment for a slot that will become free without help. Raise as `get_layout`.
        """
        # 0 s unless a slot is about to become free without help.
        self._changed.wait_for(lambda: self._choose(id)[0] is not None, self._free_timeout_s())
        slot, reason = self._choose(id)
        if slot is None:
            return None, reason
        assert slot.memory is not None, "a slot without memory is never chosen"
        # What the slot had is overwritten from now on: the agent must not report it to the leader any longer.
        was_reported = slot.contents is not None
        slot.contents = SlotContents(id, self.get_layout(id), self._host, slot.memory, writer)
        if was_reported:
            self._listener.notify_agent()
        self._changed.notify_all()
        return slot.contents, ""

    def empty_undersized(self, id: SnapshotId) -> None:
        """Empty the slot that a new snapshot takes, if it is too small, so that `allocate` can replace its memory.

        Raise as `get_layout`.
        """
        layout = self.get_layout(id)
        index, _ = choose_slot([slot.contents for slot in self._slots], layout.generation)
        if index is not None and self._is_undersized(self._slots[index], layout):
            self._slots[index].contents = None
            self._listener.notify_agent()

    def _choose(self, id: SnapshotId) -> tuple[_Slot | None, str]:
        """Return a slot that is free and large enough, or None and why there is none."""
        layout = self.get_layout(id)
        ready = [slot for slot in self._slots if not slot.is_allocating]
        index, reason = choose_slot([slot.contents for slot in ready], layout.generation)
        if index is None:
            return None, reason
        if self._is_undersized(ready[index], layout):
            return None, f"the memory of its slot was not allocated within {ALLOCATION_TIMEOUT_S:g} s"
        return ready[index], ""

    def _free_timeout_s(self) -> float:
        """Return how long it is worth waiting for a slot that becomes free without help."""
        if any(slot.is_allocating for slot in self._slots):
            return ALLOCATION_TIMEOUT_S
        is_any_complete = any(contents.phase is SlotPhase.COMPLETE for contents in self.list_contents())
        return COMMIT_TIMEOUT_S if is_any_complete else 0.0

    # Memory.

    def allocate(self) -> None:
        """Allocate the memory that the layout needs for every free slot, which takes about a second for a GB.

        Raises:
            SnapshotRefused: the kernel cannot allocate the memory.
        """
        while (found := self._take_undersized()) is not None:
            slot, mapped_bytes = found
            memory = None
            try:
                # Without the lock: this takes about a second for a GB, and other hosts must be answered meanwhile.
                memory = SlotMemory(next(self._numbers), mapped_bytes)
            finally:
                with self._changed:
                    slot.memory, slot.is_allocating = memory, False
                    self._changed.notify_all()

    def share(self) -> tuple[tuple[SlotInfo, ...], list[int]]:
        """Return the slots that have memory, and a descriptor of each, which the caller closes."""
        with self._changed:
            memories = [slot.memory for slot in self._slots if slot.memory is not None]
            infos = tuple(SlotInfo(number=m.number, mapped_bytes=m.mapped_bytes) for m in memories)
            # Duplicates, made under the lock: another thread may close a slot's own descriptor.
            return infos, [os.dup(memory.descriptor) for memory in memories]

    def count_mapped_bytes(self, slot_limit_bytes: int | None = None) -> int:
        """Return the memory of all slots in bytes, each counted up to a limit if one is given."""
        sizes = [slot.memory.mapped_bytes for slot in self._slots if slot.memory is not None]
        return sum(size if slot_limit_bytes is None else min(slot_limit_bytes, size) for size in sizes)

    def close(self) -> None:
        """Drop all contents and free all memory."""
        with self._changed:
            for slot in self._slots:
                if slot.memory is not None:
                    slot.memory.close()
                slot.memory = slot.contents = None

    def _take_undersized(self) -> tuple[_Slot, int] | None:
        """Return a free slot that is too small, emptied, and the bytes it needs; None if there is none."""
        with self._changed:
            if self.layout is None:
                return None
            everything = self.list_contents()
            for slot in self._slots:
                is_free = slot.contents is None or is_outdated(slot.contents, everything)
                if slot.is_allocating or not is_free or not self._is_undersized(slot, self.layout):
                    continue
                if slot.contents is not None:
                    self._listener.notify_agent()
                if slot.memory is not None:
                    # The kernel frees the memory only when the worker has unmapped it as well.
                    self._listener.notify_worker(SlotRetired(number=slot.memory.number))
                    slot.memory.close()
                slot.is_allocating, slot.contents, slot.memory = True, None, None
                return slot, compute_slot_layout(self.layout, self._host).mapped_bytes
            return None

    def _is_undersized(self, slot: _Slot, layout: SnapshotLayout) -> bool:
        needed_bytes = compute_slot_layout(layout, self._host).mapped_bytes
        return slot.memory is None or slot.memory.mapped_bytes < needed_bytes
