"""What an agent orders a standby in a seat, and when that takes over: the table, row by row."""

import pytest

from resilient_jax.cluster.generation_orders import (
    GenerationRead,
    LeaveNoticed,
    OrdersConfig,
    OrdersState,
    WorkerChanged,
    handle,
)
from resilient_jax.cluster.standby_orders import (
    DismissStandby,
    FailStandby,
    OrderStandby,
    SendStandbyToSeat,
    StandbyCommand,
    TakeOver,
)
from resilient_jax.cluster.worker_view import WorkerView
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat, WorldId
from resilient_jax.protocol.generation import (
    Generation,
    GenerationPhase,
    JobOutcome,
    JobOutcomeKind,
    Member,
    Membership,
    PlannedBoundary,
    SeatId,
)
from resilient_jax.protocol.worker_messages import Quiesce
from resilient_jax.protocol.worker_report import (
    WorkerFailure,
    WorkerFailureKind,
    WorkerReport,
    WorkerState,
    WorldPlace,
)

HOST = HostName("a")
ME = Member(host=HOST, incarnation=Incarnation(1), seat=Seat(0))
OTHER = Member(host=HostName("b"), incarnation=Incarnation(1), seat=Seat(1))
STANDBY = Member(host=HOST, incarnation=Incarnation(2), seat=Seat(2))
WORLD = WorldId(1)
SEATED = WorkerReport(state=WorkerState.IDLE, place=WorldPlace(world=WORLD, seat=SeatId(WORLD, STANDBY.seat)))
TRAINING = WorkerView(incarnation=ME.incarnation, report=WorkerReport(state=WorkerState.RUNNING))
DEAD = WorkerView(incarnation=ME.incarnation, report=TRAINING.report, is_dying=True)
CONFIG = OrdersConfig(host=HOST, quiesce_timeout_s=5.0)
CHANGING = [GenerationPhase.QUIESCE, GenerationPhase.PAUSE, GenerationPhase.BOUNDARY, GenerationPhase.FORM]


def make_generation(number: int, phase: GenerationPhase, *, is_given_seat: bool = True) -> Generation:
    return Generation(
        number=GenerationNumber(number),
        phase=phase,
        membership=Membership(
            world=WORLD, members=(ME, OTHER), newcomers=(STANDBY,) if is_given_seat else ()
        ),
        planned=PlannedBoundary(boundary_step=3 if phase is GenerationPhase.BOUNDARY else None),
        outcome=JobOutcome(kind=JobOutcomeKind.DONE, exit_code=0)
        if phase is GenerationPhase.FINISHED
        else None,
    )


def view_standby(**changes) -> WorkerView:
    return WorkerView(**{"incarnation": STANDBY.incarnation, "report": SEATED, **changes})


def tell(event, state=None, worker=TRAINING, standby=None) -> list[StandbyCommand | SendStandbyToSeat]:
    """Return what the machine commands for the standby."""
    _, commands = handle(state or OrdersState(), event, worker, standby or view_standby(), 0.0, CONFIG)
    kinds = (DismissStandby, FailStandby, OrderStandby, SendStandbyToSeat, TakeOver)
    return [command for command in commands if isinstance(command, kinds)]


def test_a_standby_with_a_seat_is_sent_there_while_others_train_and_else_left_alone():
    training = make_generation(2, GenerationPhase.ACTIVE)
    assert tell(GenerationRead(training)) == [SendStandbyToSeat(training)]
    for phase in CHANGING:
        assert tell(GenerationRead(make_generation(2, phase))) == []


def test_what_a_standby_without_a_seat_was_ordered_is_void():
    for phase in [*CHANGING, GenerationPhase.ACTIVE]:
        (command,) = tell(GenerationRead(make_generation(2, phase, is_given_seat=False)))
        assert isinstance(command, OrderStandby)
        assert isinstance(command.order, Quiesce)


def test_an_older_generation_orders_nothing():
    state = OrdersState(generation=make_generation(3, GenerationPhase.QUIESCE))
    assert tell(GenerationRead(make_generation(2, GenerationPhase.ACTIVE)), state) == []


def test_a_standby_ends_with_the_job_or_when_its_host_leaves():
    assert tell(GenerationRead(make_generation(2, GenerationPhase.FINISHED))) == [DismissStandby()]
    state = OrdersState(generation=make_generation(2, GenerationPhase.ACTIVE))
    assert tell(LeaveNoticed(), state) == [DismissStandby()]


def test_a_standby_that_could_not_take_its_seat_is_of_no_use():
    state = OrdersState(generation=make_generation(2, GenerationPhase.ACTIVE))
    tried = WorkerReport(state=WorkerState.IDLE, place=WorldPlace(world=None, seat=SEATED.place.seat))
    assert tell(WorkerChanged(), state, standby=view_standby(report=tried)) == [
        FailStandby("it could not take its seat")
    ]
    for report in (
        SEATED,
        WorkerReport(state=WorkerState.PREPARING, place=WorldPlace(seat=SEATED.place.seat)),
        WorkerReport(),
    ):
        assert tell(WorkerChanged(), state, standby=view_standby(report=report)) == []


@pytest.mark.parametrize("state", [WorkerState.IDLE, WorkerState.PREPARING])
def test_a_standby_takes_over_as_soon_as_the_worker_is_dying(state: WorkerState):
    report = WorkerReport(state=state, place=WorldPlace(seat=SEATED.place.seat))
    assert tell(WorkerChanged(), worker=DEAD, standby=view_standby(report=report)) == [TakeOver()]
    assert tell(WorkerChanged(), worker=TRAINING, standby=view_standby(report=SEATED)) == []


def test_a_standby_does_not_take_over_where_it_could_not_train_or_the_job_ends():
    starting = view_standby(report=WorkerReport())
    stopped = view_standby(is_unresponsive=True)
    ended = view_standby(has_exited=True)
    for standby in (starting, stopped, ended):
        assert tell(WorkerChanged(), worker=DEAD, standby=standby) == []
    failure = WorkerFailure(kind=WorkerFailureKind.USER, text="ValueError")
    failed = WorkerView(incarnation=ME.incarnation, report=WorkerReport(failure=failure), has_exited=True)
    assert tell(WorkerChanged(), worker=failed) == []
