"""What is done of a step goes with its state into a new world, and only where both are certain."""

from types import SimpleNamespace
from typing import Any

import pytest

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.generation import Generation, GenerationPhase, ResumedState
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotPlan
from resilient_jax.worker.committed_state import CommittedState, KeptArrays
from resilient_jax.worker.shard_restore import StatePeers
from resilient_jax.worker.state_handover import StateHandover


class Kept(KeptArrays):
    """Arrays of a train function, which note what becomes of them."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def leave_devices(self, generation: Generation | None) -> None:
        self.done.append("moved")

    def drop(self, *, keeps_copies: bool = False) -> None:
        self.done.append("dropped but for copies" if keeps_copies else "dropped")


def prepare(*, in_place: bool = False, step: int = 6, **changes: Any) -> tuple[Kept, CommittedState]:
    """Return what is left of a step after 6 committed ones, before a generation that reads a snapshot of `step`."""
    kept, committed = Kept(), CommittedState()
    committed.kept.append(kept)
    committed.set_parts(6)
    unused: Any = SimpleNamespace()
    peers = StatePeers(
        host=HostName("a"),
        offers=unused,
        credentials=unused,
        raise_if_ended=lambda: None,
        record_event=lambda *_: None,
    )
    handover = StateHandover(committed, peers)
    plan = SnapshotPlan(id=SnapshotId(step, GenerationNumber(1)), groups=(), sources=())
    generation = Generation(
        number=GenerationNumber(2),
        phase=GenerationPhase.FORM,
        reason="a loss",
        state=ResumedState(snapshot=plan),
    )
    changed = change_fields(generation, **changes)
    (handover.keep_devices if in_place else handover.leave_devices)(changed)
    return kept, committed


def test_what_is_done_of_the_step_after_the_snapshot_is_kept_in_host_memory():
    kept, committed = prepare()
    assert kept.done == ["moved"]
    assert committed.step == 6


def test_in_place_it_stays_where_it_is():
    kept, _ = prepare(in_place=True)
    assert kept.done == []


@pytest.mark.parametrize(
    "changes", [{"step": 5}, {"step": 7}, {"are_parts_doubtful": True}, {"trusted_step": 6}]
)
def test_of_another_step_or_after_a_failure_that_nothing_explains_it_is_dropped(changes: dict[str, Any]):
    kept, committed = prepare(**changes)
    assert kept.done == ["dropped"]
    assert committed.step == changes.get("step", 6)
