"""The choice of the slot that the next snapshot takes: a pure decision, with its reason."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.slot_memory import SlotPhase


class SnapshotProgress(Protocol):
    """The facts about a snapshot that decide whether its slot may be taken."""

    @property
    def id(self) -> SnapshotId:
        """Identity of the snapshot."""
        ...

    @property
    def phase(self) -> SlotPhase:
        """Phase that the snapshot has reached."""
        ...


def choose_slot(
    contents: Sequence[SnapshotProgress | None], generation: GenerationNumber
) -> tuple[int | None, str]:
    """Return the index of the slot that the next snapshot takes, or None and the reason why no slot is free.

    The slot of the newest committed snapshot is never chosen, nor that of one that may still be committed.

    Args:
        contents: the snapshot in each slot; None for an empty slot.
    """
    for index, held in enumerate(contents):
        if held is None:
            return index, ""
    everything = [held for held in contents if held is not None]
    for index, held in enumerate(everything):
        if is_outdated(held, everything):
            return index, ""
    # An orphan was complete here when its generation ended, and no later generation has restored it. Its slot may be
    # taken if another snapshot is left to fall back on.
    orphans = [h for h in everything if h.phase is SlotPhase.COMPLETE and h.id.generation < generation]
    if orphans and (
        len(orphans) == len(everything) > 1 or any(h.phase is SlotPhase.COMMITTED for h in everything)
    ):
        return everything.index(min(orphans, key=lambda held: recency_key(held.id))), ""
    busy = ", ".join(f"{format_snapshot_id(held.id)} is {held.phase.name.lower()}" for held in everything)
    return None, (
        f"no slot is free ({busy}). If this happens often, snapshots are taken faster than their parity can be "
        "exchanged: take them less often"
    )


def is_outdated(held: SnapshotProgress, everything: Iterable[SnapshotProgress]) -> bool:
    """Return whether a newer snapshot is committed, and this one is too or belongs to an older generation."""
    return any(
        other.phase is SlotPhase.COMMITTED
        and recency_key(other.id) > recency_key(held.id)
        and (
            held.phase is SlotPhase.COMMITTED
            or (held.phase is SlotPhase.COMPLETE and held.id.generation < other.id.generation)
        )
        for other in everything
    )


def recency_key(id: SnapshotId) -> tuple[int, int]:
    """Return a sort key that is greater for the later snapshot.

    Steps alone do not order snapshots: a generation that resumes from an earlier step takes newer ones at lower steps.
    """
    return (id.generation, id.step)


def format_snapshot_id(id: SnapshotId) -> str:
    """Return the name of a snapshot for messages."""
    return f"snapshot of step {id.step} (generation {id.generation})"
