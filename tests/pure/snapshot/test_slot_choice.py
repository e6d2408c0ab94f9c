"""The choice of the slot that the next snapshot takes."""

from dataclasses import dataclass

import pytest

from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.slot_choice import choose_slot
from resilient_jax.snapshot.slot_memory import SlotPhase
from tests.pure.snapshot.snapshot_slots import make_id


@dataclass
class Content:
    id: SnapshotId
    phase: SlotPhase


def content(text):
    """Parse `c1.2`: step 1 of generation 2, committed. The phases are w, p, k (complete), c; `-` is an empty slot."""
    if text == "-":
        return None
    step, generation = map(int, text[1:].split("."))
    phases = {"w": SlotPhase.WRITING, "p": SlotPhase.PART, "k": SlotPhase.COMPLETE, "c": SlotPhase.COMMITTED}
    return Content(make_id(step, generation), phases[text[0]])


@pytest.mark.parametrize(
    ("slots", "chosen"),
    [
        ("- -", 0),
        ("w1.2 -", 1),
        ("c1.2 -", 1),
        ("c1.2 c2.2", 0),
        ("c3.2 c2.2", 1),
        ("c9.1 c2.2", 0),  # of an older generation, though of a later step
        ("c1.2 w2.2", None),
        ("c1.2 p2.2", None),
        ("c1.2 k2.2", None),
        ("k1.2 p2.2", None),
        ("k1.2 k2.2", None),
        ("c1.1 k2.1", 1),  # generation 1 has ended, and no generation has restored step 2
        ("k1.1 k2.1", 0),
        ("k2.1 w3.2", None),
        ("k2.1 k3.2", None),
        ("k2.1 c3.2", 0),
    ],
)
def test_the_slot_of_a_snapshot_that_may_be_needed_is_never_chosen(slots, chosen):
    index, reason = choose_slot([content(text) for text in slots.split()], GenerationNumber(2))
    assert index == chosen
    assert bool(reason) == (chosen is None)
