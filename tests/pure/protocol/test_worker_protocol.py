"""The worker's machine under any sequence of orders, of old and of new generations, and of its main thread's steps."""

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat, WorldId
from resilient_jax.protocol.generation import Generation, GenerationPhase, Member, Membership, SeatId
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.state_records import NextMembers, StatePart
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
    WorkerReported,
)
from resilient_jax.protocol.worker_report import WorkerState, is_busy
from resilient_jax.worker import worker_protocol
from resilient_jax.worker.protocol_table import ALIVE, ORDER_EFFECTS, HandledOrder, OrderEffect
from resilient_jax.worker.worker_protocol import (
    OrderRefused,
    StepDecision,
    Transition,
    WorkerProtocol,
    make_initial_protocol,
    try_begin_step,
    try_take_order,
)

HOST = HostName("a")
MEMBER = Member(host=HOST, incarnation=Incarnation(1), seat=Seat(0))


def handle_order(protocol: WorkerProtocol, order: HandledOrder, now_s: float = 0.0) -> Transition:
    return worker_protocol.handle_order(protocol, order, now_s)


def make_generation(number: int, phase: GenerationPhase = GenerationPhase.FORM) -> Generation:
    generation = Generation(
        number=GenerationNumber(number), phase=phase, membership=Membership(world=WorldId(number))
    )
    if phase is GenerationPhase.FORM:
        return change_fields(generation, members=(MEMBER,))
    return change_fields(generation, newcomers=(MEMBER,))


def form_world(number: int) -> FormWorld:
    return FormWorld(generation=make_generation(number), host=HOST, relay_address="")


def take_seat(number: int) -> TakeSeat:
    generation = make_generation(number, GenerationPhase.ACTIVE)
    return TakeSeat(generation=generation, host=HOST, seat=MEMBER.seat, relay_address="")


def make_idle() -> WorkerProtocol:
    protocol, _ = handle_order(make_initial_protocol(polls_checkpoints=False), WorkerAdmitted())
    return worker_protocol.join_job(protocol, "a:1")[0]


def make_training(number: int, step: int = 0) -> WorkerProtocol:
    protocol, _ = handle_order(make_idle(), form_world(number))
    protocol, _, _ = try_take_order(protocol)
    seat = SeatId(WorldId(number), Seat(0))
    return worker_protocol.report_formed(protocol, seat, step, holds_state=True)[0]


def go_idle(protocol: WorkerProtocol) -> WorkerProtocol:
    return worker_protocol.report_idle(
        protocol,
        step=protocol.next_step,
        holds_state=True,
        part=None,
        snapshot=None,
        copied=None,
        done=False,
        failure=None,
    )[0]


def test_a_worker_that_leaves_its_world_for_a_seat_has_no_part_of_the_state_any_more():
    protocol = make_training(1)
    part = StatePart.from_units(range(3), 7)
    protocol, _ = worker_protocol.report_idle(
        protocol,
        step=5,
        holds_state=False,
        part=part,
        snapshot=None,
        copied=None,
        done=False,
        failure=None,
    )
    assert protocol.report.held.part == part
    protocol, order, _ = try_take_order(handle_order(protocol, take_seat(2))[0])
    assert isinstance(order, TakeSeat)
    assert protocol.report.held.part is None


def test_a_world_that_is_ordered_again_while_it_trains_is_not_entered_again_after_the_boundary():
    protocol, _ = handle_order(make_training(1), form_world(1))
    protocol, _ = handle_order(protocol, Pause(generation=GenerationNumber(2)))
    protocol, _ = handle_order(protocol, RunToBoundary(generation=GenerationNumber(2), boundary_step=0))
    protocol, order, _ = try_take_order(go_idle(protocol))
    assert order is None
    protocol, _ = handle_order(protocol, form_world(2))
    assert try_take_order(protocol)[1] == form_world(2)


def test_whether_a_snapshot_is_waited_for_is_said_for_one_boundary():
    protocol, _ = handle_order(make_training(1), Pause(generation=GenerationNumber(2)))
    order = RunToBoundary(generation=GenerationNumber(2), boundary_step=0, takes_snapshot=False)
    protocol, _ = handle_order(protocol, order)
    assert not protocol.takes_snapshot
    protocol, _, _ = try_take_order(handle_order(go_idle(protocol), form_world(2))[0])
    assert protocol.takes_snapshot


numbers = st.integers(1, 6).map(GenerationNumber)
generation_orders = st.one_of(
    st.builds(Quiesce, generation=numbers),
    st.builds(Pause, generation=numbers),
    st.builds(RunToBoundary, generation=numbers, boundary_step=st.integers(0, 5)),
    numbers.map(form_world),
    numbers.map(take_seat),
)
orders = generation_orders | st.builds(HoldTraining) | st.builds(StopWorker)
steps_of_main_thread = st.sampled_from(("step", "take", "unwind"))


def move_main_thread(protocol: WorkerProtocol, move: str) -> WorkerProtocol:
    """Do what the main thread may do in this state, and check it."""
    state = protocol.report.state
    if move == "take" and state is WorkerState.IDLE:
        after, order, _ = try_take_order(protocol)
        if isinstance(order, FormWorld | TakeSeat):
            assert protocol.stop is None
            assert is_busy(after.report.state), "the next order must interrupt it"
            assert not after.is_interrupted
        return after
    if move == "unwind" and state is WorkerState.RUNNING:
        after = go_idle(protocol)
        assert after.report.generation >= protocol.newest, "it answers the newest order"
        return after
    if move == "unwind" and state is WorkerState.PREPARING:
        return worker_protocol.report_seat(protocol, None, None)[0]
    if move == "step" and state is WorkerState.RUNNING:
        step = protocol.next_step
        after, decision = try_begin_step(protocol, step)
        if decision is StepDecision.START:
            assert not protocol.is_interrupted
            assert protocol.boundary is None or step < protocol.boundary
            assert protocol.limit is None or step < protocol.limit or protocol.boundary is not None
        return after
    return protocol


@given(script=st.lists(orders | steps_of_main_thread, max_size=30))
def test_no_sequence_of_orders_breaks_the_rules(script):
    protocol = make_idle()
    for item in script:
        before = protocol
        if isinstance(item, str):
            protocol = move_main_thread(before, item)
            continue
        protocol, answers = handle_order(before, item)
        assert protocol.newest >= before.newest
        assert protocol.report.state is before.report.state, "only the main thread changes what it does"
        number = getattr(item, "generation", None)
        number = getattr(number, "number", number)
        if number is not None and number < before.newest:
            assert protocol == before, "an old order changes nothing"
            assert answers == (OrderRefused(number, before.newest),)
        elif answers:
            assert answers == (WorkerReported(report=protocol.report),)
        if before.is_interrupted and is_busy(before.report.state):
            assert protocol.is_interrupted, "no order lets a generation that has ended go on"


@given(begun=st.integers(0, 4), boundary=st.integers(0, 6))
def test_a_paused_worker_stops_where_it_said_or_at_the_boundary(begun, boundary):
    protocol = make_training(1)
    for step in range(begun):
        protocol, _ = try_begin_step(protocol, step)
    protocol, answers = handle_order(protocol, Pause(generation=GenerationNumber(2)))
    assert answers == (WorkerReported(report=protocol.report),)
    assert protocol.report.earliest_stop_step == begun
    assert try_begin_step(protocol, begun)[1] is StepDecision.WAIT
    ordered = RunToBoundary(generation=GenerationNumber(2), boundary_step=max(boundary, begun))
    protocol, _ = handle_order(protocol, ordered)
    while (began := try_begin_step(protocol, protocol.next_step))[1] is StepDecision.START:
        protocol = began[0]
    assert began[1] is StepDecision.END
    assert protocol.next_step == ordered.boundary_step


NEXT_MEMBERS = NextMembers(hosts=(HOST,))


def make_training_with_part(number: int) -> WorkerProtocol:
    part = StatePart.from_units(range(3), 7)
    protocol, _ = try_begin_step(make_training(number), 0)
    return worker_protocol.report_commit(protocol, 1, holds_state=False, part=part)[0]


def test_a_pause_before_which_blocks_are_copied_is_held_and_leaves_a_step_for_the_leader_s_answer():
    protocol, second = make_training_with_part(1), GenerationNumber(2)
    protocol, answers = handle_order(protocol, Pause(generation=second, next_members=NEXT_MEMBERS))
    assert not answers
    assert protocol.held_pause is not None
    protocol, decision = try_begin_step(protocol, 1)
    assert decision is StepDecision.START, "training goes on"
    protocol, answers = worker_protocol.answer_pause(protocol, second)
    assert answers == (WorkerReported(report=protocol.report),)
    assert (protocol.report.generation, protocol.report.earliest_stop_step) == (2, 3)
    protocol, decision = try_begin_step(protocol, 2)
    assert decision is StepDecision.START
    assert try_begin_step(protocol, 3)[1] is StepDecision.WAIT


def test_a_held_pause_says_when_its_order_came_first():
    protocol, pause = (
        make_training_with_part(1),
        Pause(generation=GenerationNumber(2), next_members=NEXT_MEMBERS),
    )
    for now_s in (5.0, 9.0):  # agents may send an order again
        protocol, _ = handle_order(protocol, pause, now_s)
        assert protocol.held_pause is not None
        assert (protocol.held_pause.next_members, protocol.held_pause.received_s) == (NEXT_MEMBERS, 5.0)
    protocol, _ = handle_order(protocol, msgspec.structs.replace(pause, generation=GenerationNumber(3)), 12.0)
    assert protocol.held_pause is not None
    assert protocol.held_pause.received_s == 12.0


def test_a_pause_without_copies_ends_one_that_is_held():
    protocol, second = make_training_with_part(1), GenerationNumber(2)
    protocol, _ = handle_order(protocol, Pause(generation=second, next_members=NEXT_MEMBERS))
    protocol, answers = handle_order(protocol, Pause(generation=second))
    assert answers == (WorkerReported(report=protocol.report),)
    assert (protocol.held_pause, protocol.report.earliest_stop_step) == (None, 1)
    protocol, answers = worker_protocol.answer_pause(protocol, second)
    assert not answers
    assert try_begin_step(protocol, 1)[1] is StepDecision.WAIT, "as it was told the leader"


def test_a_pause_that_comes_after_the_members_let_it_come_is_answered_at_once():
    protocol, second = make_training_with_part(1), GenerationNumber(2)
    protocol, answers = worker_protocol.answer_pause(protocol, second)
    assert not answers
    protocol, answers = handle_order(protocol, Pause(generation=second, next_members=NEXT_MEMBERS))
    assert answers
    assert protocol.report.earliest_stop_step == 1
    third = GenerationNumber(3)
    protocol, answers = handle_order(protocol, Pause(generation=third, next_members=NEXT_MEMBERS))
    assert not answers, "the next one is held again"


def test_a_worker_without_a_part_of_the_state_holds_no_pause():
    pause = Pause(generation=GenerationNumber(2), next_members=NEXT_MEMBERS)
    assert handle_order(make_training(1), pause)[1]


def test_a_failure_ends_a_pause_that_is_held():
    protocol, _ = handle_order(
        make_training_with_part(1), Pause(generation=GenerationNumber(2), next_members=NEXT_MEMBERS)
    )
    protocol, _ = handle_order(protocol, Quiesce(generation=GenerationNumber(3)))
    assert protocol.held_pause is None


def test_an_order_that_was_not_taken_is_void_after_the_loss_of_the_store():
    protocol, _ = handle_order(make_idle(), form_world(1))
    protocol, _ = handle_order(protocol, HoldTraining())
    assert try_take_order(protocol)[1] is None


def test_the_end_of_the_job_is_taken_before_a_world_that_was_ordered_earlier():
    protocol, _ = handle_order(make_idle(), form_world(1))
    protocol, _ = handle_order(protocol, StopWorker(reason="done"))
    assert isinstance(try_take_order(protocol)[1], StopWorker)


def test_a_seat_is_tried_once():
    protocol, _ = handle_order(make_idle(), take_seat(1))
    protocol, order, _ = try_take_order(protocol)
    assert isinstance(order, TakeSeat)
    protocol, _ = worker_protocol.report_seat(protocol, None, None)
    protocol, _ = handle_order(protocol, take_seat(1))
    assert try_take_order(protocol)[1] is None


def test_before_the_job_ends_a_training_that_saves_has_one_more_step_in_which_it_knows():
    """However late the boundary is known: no host begins that step before."""
    protocol, _ = worker_protocol.report_saving(make_training(1), None)
    protocol, _ = try_begin_step(protocol, 0)
    protocol, (answer,) = handle_order(protocol, Pause(generation=GenerationNumber(2), ends_job=True))
    assert isinstance(answer, WorkerReported)
    assert answer.report.earliest_stop_step == 2
    assert try_begin_step(protocol, 1) == (protocol, StepDecision.WAIT)
    for boundary in (2, 3):  # another host may be a step further
        ordered, _ = handle_order(
            protocol, RunToBoundary(generation=GenerationNumber(2), boundary_step=boundary)
        )
        for step in range(1, boundary):
            assert not worker_protocol.is_leaving(ordered)
            ordered, decision = try_begin_step(ordered, step)
            assert decision is StepDecision.START
        assert worker_protocol.is_leaving(ordered)
        assert try_begin_step(ordered, boundary)[1] is StepDecision.END
        again, _ = handle_order(go_idle(ordered), form_world(2))
        assert not worker_protocol.is_leaving(try_take_order(again)[0])


def test_a_training_that_saves_nothing_stops_before_the_next_step_when_the_job_ends():
    protocol, _ = try_begin_step(make_training(1), 0)
    _, (answer,) = handle_order(protocol, Pause(generation=GenerationNumber(2), ends_job=True))
    assert isinstance(answer, WorkerReported)
    assert answer.report.earliest_stop_step == 1


def test_in_no_other_change_is_a_training_told_that_the_job_ends():
    protocol, _ = try_begin_step(worker_protocol.report_saving(make_training(1), None)[0], 0)
    protocol, _ = handle_order(protocol, Pause(generation=GenerationNumber(2)))
    protocol, _ = handle_order(protocol, RunToBoundary(generation=GenerationNumber(2), boundary_step=2))
    assert not worker_protocol.is_leaving(try_begin_step(protocol, 1)[0])


def make_worker(state: WorkerState) -> WorkerProtocol:
    """Return a worker in a state, whose newest generation is 1."""
    match state:
        case WorkerState.STARTING:
            return make_initial_protocol(polls_checkpoints=False)
        case WorkerState.IDLE:
            return go_idle(make_training(1))
        case WorkerState.PREPARING:
            return try_take_order(handle_order(make_idle(), take_seat(1))[0])[0]
        case _:
            return make_training(1)


ORDERS: dict[type, HandledOrder] = {
    FormWorld: form_world(2),
    TakeSeat: take_seat(2),
    Quiesce: Quiesce(generation=GenerationNumber(2)),
    Pause: Pause(generation=GenerationNumber(2)),
    RunToBoundary: RunToBoundary(generation=GenerationNumber(2), boundary_step=9),
    HoldTraining: HoldTraining(),
    SnapshotServerReady: SnapshotServerReady(endpoint="a:1"),
    WorkerAdmitted: WorkerAdmitted(),
    StopWorker: StopWorker(),
}


@pytest.mark.parametrize("row", ORDER_EFFECTS, ids=lambda row: f"{row.order.__name__}-{row.states[0]}")
def test_an_order_does_what_its_row_of_the_table_says(row: OrderEffect) -> None:
    for state in row.states:
        before = make_worker(state)
        after, answers = handle_order(before, ORDERS[row.order])
        assert (before.report.state, after.report.state) == (state, state)
        assert (before.is_interrupted, after.is_interrupted) == (False, row.interrupts)
        assert bool(answers) == row.is_answered


def test_the_table_says_what_each_order_does_in_each_state() -> None:
    rows = sorted((row.order.__name__, state) for row in ORDER_EFFECTS for state in row.states)
    orders = typing.get_args(HandledOrder)
    assert rows == sorted((order.__name__, state) for order in orders for state in ALIVE)
