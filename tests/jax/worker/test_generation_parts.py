"""What lives and dies with a generation is one list: who is told of which moment, in which order; what a raise does."""

from typing import Any

import pytest

from resilient_jax.errors import PeerUnreachable
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.generation_scoped import GenerationEnding, GenerationScoped
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.worker.generation_parts import ORDER, GenerationParts, SnapshotFlush
from resilient_jax.worker.training_control import GenerationEnded

GENERATION = Generation(number=GenerationNumber(2), phase=GenerationPhase.FORM)

WALKS = {
    "begin_generation": [
        "WorkerActivity",
        "WorldConnector",
        "RecentEvents",
        "ProgramFetcher",
        "ProgramDirectory",
        "CompilationMonitor",
        "Snapshotter",
    ],
    "keep_devices": ["StateHandover"],
    "leave_devices": ["StateHandover", "WorldExit"],
    "unwind": ["WorldConnector", "WorldExit"],
    "end_generation": ["WorldConnector", "SnapshotFlush", "Snapshotter"],
}
"""Who does something at a moment, one after the other."""


def make_ending(*, is_flushed: bool = False) -> GenerationEnding:
    return GenerationEnding(generation=GENERATION.number, is_intact=True, is_flushed=is_flushed)


def walk(parts: GenerationParts, moment: str) -> None:
    arguments = {"unwind": (), "end_generation": (make_ending(),)}.get(moment, (GENERATION,))
    getattr(parts, moment)(*arguments)


def make_bare(kind: type[GenerationScoped]) -> GenerationScoped:
    """Return a part without its attributes, which no moment reads here."""
    return object.__new__(kind)


@pytest.mark.parametrize("moment", WALKS)
def test_each_moment_reaches_the_parts_in_their_order(moment: str, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    for kind in ORDER:
        for name in vars(kind).keys() & WALKS.keys():
            monkeypatch.setattr(
                kind, name, lambda self, *_, name=name: told.append(f"{type(self).__name__} {name}")
            )
    given = [make_bare(kind) for kind in [*ORDER][::-1]]  # in no order of their own
    walk(GenerationParts(given), moment)
    assert told == [f"{name} {moment}" for name in WALKS[moment]]


def test_each_place_in_the_list_has_its_reason():
    assert all(reason.endswith(".") for reason in ORDER.values())


class Part(GenerationScoped):
    """Notes what it is told of, and may fail in it."""

    fails = False

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def note(self, moment: str) -> None:
        self.told.append(f"{type(self).__name__} {moment}")
        if self.fails:
            raise PeerUnreachable("a peer is gone")

    def begin_generation(self, generation: Generation) -> None:
        self.note("begins")

    def leave_devices(self, generation: Generation | None) -> None:
        self.note("leaves")

    def end_generation(self, ending: GenerationEnding) -> None:
        self.note("ends")


class First(Part):
    """Comes first."""


class Failing(Part):
    """Comes next, and fails."""

    fails = True


class Last(Part):
    """Comes last."""


def make_parts(told: list[str], *kinds: type[Part]) -> GenerationParts:
    return GenerationParts([kind(told) for kind in kinds], dict.fromkeys((First, Failing, Last), ""))


def test_a_part_that_raises_in_begin_ends_the_walk_and_what_it_raises_is_raised():
    told: list[str] = []
    with pytest.raises(PeerUnreachable, match="a peer is gone"):
        make_parts(told, Last, Failing, First).begin_generation(GENERATION)
    assert told == ["First begins", "Failing begins"]


def test_after_a_begin_that_failed_the_end_reaches_all_parts_and_the_next_begin_does_too():
    told: list[str] = []
    parts = make_parts(told, First, Failing, Last)
    Failing.fails = True
    try:
        with pytest.raises(PeerUnreachable):
            parts.begin_generation(GENERATION)
        Failing.fails = False
        told.clear()
        parts.end_generation(make_ending())
        parts.begin_generation(GENERATION)
    finally:
        Failing.fails = True
    ends = ["First ends", "Failing ends", "Last ends"]
    assert told == [*ends, "First begins", "Failing begins", "Last begins"]


def test_devices_are_left_from_the_last_part_to_the_first():
    told: list[str] = []
    make_parts(told, First, Last).leave_devices(None)
    assert told == ["Last leaves", "First leaves"]


def test_two_parts_of_a_kind_are_refused():
    with pytest.raises(AssertionError, match="two parts of a kind"):
        make_parts([], First, First)


class Agent:
    """What the flush asks of the agent's connection, and of the committed state."""

    is_interrupted, takes_snapshot, holds_state, step, state = False, True, False, 7, None


class Flushing:
    """A snapshotter that takes the snapshot of step 7, or raises."""

    def __init__(self, error: BaseException | None) -> None:
        self.error, self.calls = error, 0

    def flush(self, generation: GenerationNumber, state: object) -> SnapshotId:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return SnapshotId(7, generation)


def flush(error: BaseException | None = None, *, is_flushed: bool = True, **changed: Any) -> tuple[Any, ...]:
    """Return the snapshot that was taken, how often it was tried, and the events."""
    agent: Any = type("Changed", (Agent,), changed)
    snapshotter: Any = Flushing(error)
    events: list[EventKind] = []
    ending = make_ending(is_flushed=is_flushed)
    SnapshotFlush(agent, snapshotter, agent, lambda kind, **_: events.append(kind)).end_generation(ending)
    return ending.flushed, snapshotter.calls, events


def test_the_last_snapshot_is_taken_where_hosts_that_stay_lack_some_of_the_state():
    assert flush() == (SnapshotId(7, GENERATION.number), 1, [])


@pytest.mark.parametrize(
    "change",
    [{"is_flushed": False}, {"is_interrupted": True}, {"holds_state": True}, {"takes_snapshot": False}],
    ids=str,
)
def test_no_snapshot_is_taken_otherwise(change: dict[str, Any]):
    assert flush(**change) == (None, 0, [])


def test_a_last_snapshot_that_fails_ends_no_worker():
    assert flush(GenerationEnded()) == (None, 1, [])
    assert flush(PeerUnreachable("the server is gone")) == (None, 1, [EventKind.SNAPSHOT_DROPPED])
