"""The tables of the worker's side of the protocol with its agent: what `worker_protocol` does, as data."""

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from resilient_jax.protocol.worker_messages import (
    FormWorld,
    HoldTraining,
    Pause,
    Quiesce,
    RunToBoundary,
    SnapshotServerReady,
    StopWorker,
    TakeSeat,
    WorkerAdmitted,
)
from resilient_jax.protocol.worker_report import WorkerState

GenerationOrder = FormWorld | TakeSeat | Quiesce | Pause | RunToBoundary
HandledOrder = GenerationOrder | HoldTraining | SnapshotServerReady | WorkerAdmitted | StopWorker


class WorkerEvent(enum.StrEnum):
    """What the main thread does that changes the worker's state."""

    JOINED = "the job has let it in, or is over"
    TOOK_WORLD = "takes a kept `FormWorld`"
    TOOK_SEAT = "takes a kept `TakeSeat`"
    TRIED_SEAT = "has taken the seat and loaded programs, or could not"
    LEFT_TRAINING = "has left the user's function"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMove:
    """How a worker gets from one state to the next; each move is reported.

    Attributes:
        effect: what else happens.
    """

    before: WorkerState
    event: WorkerEvent
    after: WorkerState
    effect: str


WORKER_MOVES: Final = (
    WorkerMove(
        before=WorkerState.STARTING,
        event=WorkerEvent.JOINED,
        after=WorkerState.IDLE,
        effect="serves its state to other hosts",
    ),
    WorkerMove(
        before=WorkerState.IDLE,
        event=WorkerEvent.TOOK_WORLD,
        after=WorkerState.RUNNING,
        effect="is not interrupted any more; has no limit and no boundary",
    ),
    WorkerMove(
        before=WorkerState.IDLE,
        event=WorkerEvent.TOOK_SEAT,
        after=WorkerState.PREPARING,
        effect="is not interrupted any more; gives up its part of the state",
    ),
    WorkerMove(
        before=WorkerState.PREPARING,
        event=WorkerEvent.TRIED_SEAT,
        after=WorkerState.IDLE,
        effect="answers for the newest generation; is not interrupted any more",
    ),
    WorkerMove(
        before=WorkerState.RUNNING,
        event=WorkerEvent.LEFT_TRAINING,
        after=WorkerState.IDLE,
        effect="answers for the newest generation; is not interrupted any more; holds no pause",
    ),
)

_NEXT_STATE: Final[Mapping[tuple[WorkerState, WorkerEvent], WorkerState]] = MappingProxyType(
    {(move.before, move.event): move.after for move in WORKER_MOVES}
)


def find_next_state(before: WorkerState, event: WorkerEvent) -> WorkerState:
    """Return the state that follows an event, which must be one that can happen in the state before."""
    after = _NEXT_STATE.get((before, event))
    assert after is not None, f"a worker that is {before} {event}"
    return after


ALIVE: Final = (WorkerState.STARTING, WorkerState.IDLE, WorkerState.PREPARING, WorkerState.RUNNING)
UNWOUND: Final = (WorkerState.IDLE,)
NOT_IDLE: Final = tuple(state for state in ALIVE if state not in UNWOUND)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrderEffect:
    """What an order does to a worker that is in one of some states; the state itself stays.

    Attributes:
        interrupts: whether the main thread is broken out of what it does.
        is_answered: whether a report follows at once.
    """

    order: type[HandledOrder]
    states: tuple[WorkerState, ...]
    effect: str
    interrupts: bool = False
    is_answered: bool = False


ORDER_EFFECTS: Final = (
    OrderEffect(order=FormWorld, states=ALIVE, effect="kept until it is taken or void; once in a generation"),
    OrderEffect(order=TakeSeat, states=ALIVE, effect="kept until it is taken or void; once for a seat"),
    OrderEffect(order=Quiesce, states=UNWOUND, effect="what is kept is void", is_answered=True),
    OrderEffect(order=Quiesce, states=NOT_IDLE, effect="what is kept is void", interrupts=True),
    OrderEffect(
        order=Pause,
        states=UNWOUND,
        effect="limit: the number of committed steps",
        is_answered=True,
    ),
    OrderEffect(
        order=Pause,
        states=NOT_IDLE,
        effect=(
            "limit: the first step that has not begun; the answer names the step after it where the job ends and saves "
            "checkpoints. Held without limit or answer where blocks must be copied first"
        ),
        is_answered=True,
    ),
    OrderEffect(order=RunToBoundary, states=ALIVE, effect="boundary; the limit does not count any more"),
    OrderEffect(
        order=HoldTraining,
        states=(WorkerState.PREPARING,),
        effect="the store is lost: a kept `FormWorld` is void; goes on",
    ),
    OrderEffect(
        order=HoldTraining,
        states=tuple(state for state in ALIVE if state is not WorkerState.PREPARING),
        effect="the store is lost: a kept `FormWorld` is void",
        interrupts=True,
    ),
    OrderEffect(order=SnapshotServerReady, states=ALIVE, effect="the endpoint is known"),
    OrderEffect(order=WorkerAdmitted, states=ALIVE, effect="may join"),
    OrderEffect(order=StopWorker, states=ALIVE, effect="taken before any other order", interrupts=True),
)
"""An order of an older generation than the newest that the worker has received is refused, and changes nothing."""

_INTERRUPTING: Final = frozenset(
    (row.order, state) for row in ORDER_EFFECTS if row.interrupts for state in row.states
)


def does_interrupt(order: HandledOrder, state: WorkerState) -> bool:
    """Return whether an order breaks the main thread of a worker in this state out of what it does."""
    return (type(order), state) in _INTERRUPTING
