"""What a generation means for a host: the agent's machine, alone."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.cluster import generation_orders
from resilient_jax.cluster.generation_orders import (
    CheckDue,
    CheckUnwound,
    EndJob,
    GenerationRead,
    KillWorker,
    LeaveJob,
    LeaveNoticed,
    OrdersCommand,
    OrdersConfig,
    OrdersState,
    RecordStale,
    RegistrationBegan,
    ReplaceWorker,
    SendIntoWorld,
    SendOrder,
    WorkerChanged,
    handle,
)
from resilient_jax.cluster.worker_view import WorkerView
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat
from resilient_jax.protocol.generation import (
    FailedAttempts,
    Generation,
    GenerationPhase,
    JobOutcome,
    JobOutcomeKind,
    Member,
    Membership,
    PlannedBoundary,
)
from resilient_jax.protocol.worker_messages import Pause, Quiesce, TakeStacks
from resilient_jax.protocol.worker_report import WorkerReport, WorkerState

HOST = HostName("a")
ME = Member(host=HOST, incarnation=Incarnation(1), seat=Seat(0))
OTHER = Member(host=HostName("b"), incarnation=Incarnation(1), seat=Seat(1))
PHASES = [phase for phase in GenerationPhase if phase is not GenerationPhase.FINISHED]


class Agent:
    """The machine with a worker, which a test changes."""

    def __init__(self, **config) -> None:
        self.config = OrdersConfig(host=HOST, quiesce_timeout_s=5.0, **config)
        self.state = OrdersState()
        self.worker: WorkerView | None = WorkerView(
            incarnation=Incarnation(1), report=WorkerReport(state=WorkerState.IDLE)
        )
        self.standby: WorkerView | None = None
        self.now_s = 0.0

    def tell(self, event) -> list[OrdersCommand]:
        self.state, commands = handle(self.state, event, self.worker, self.standby, self.now_s, self.config)
        return list(commands)

    def read(
        self, number: int, phase: GenerationPhase, *members: Member, newcomers=()
    ) -> list[OrdersCommand]:
        """Return the commands for a generation, without what concerns the host alone."""
        generation = Generation(
            number=GenerationNumber(number),
            phase=phase,
            membership=Membership(members=members, newcomers=newcomers),
            planned=PlannedBoundary(boundary_step=3 if phase is GenerationPhase.BOUNDARY else None),
        )
        commands = self.tell(GenerationRead(generation))
        return [c for c in commands if not type(c).__name__.startswith(("SetUrgency", "StopOther"))]

    def report(self, state: WorkerState) -> list[OrdersCommand]:
        assert self.worker is not None
        self.worker = dataclasses.replace(self.worker, report=WorkerReport(state=state))
        return self.tell(WorkerChanged())


def kinds(commands: list[OrdersCommand]) -> list[type]:
    return [type(command.order if isinstance(command, SendOrder) else command) for command in commands]


def test_a_worker_that_does_not_stop_is_killed_at_the_deadline():
    agent = Agent()
    agent.report(WorkerState.RUNNING)
    assert kinds(agent.read(2, GenerationPhase.QUIESCE, OTHER)) == [Quiesce, CheckUnwound]
    assert kinds(agent.read(3, GenerationPhase.FORM, OTHER)) == [Quiesce]  # the deadline stays
    agent.now_s = 5.0
    assert agent.tell(CheckDue()) == [CheckUnwound()]
    agent.now_s = 5.1
    assert kinds(agent.tell(CheckDue())) == [KillWorker]
    assert agent.tell(CheckDue()) == []


@pytest.mark.parametrize("state", [WorkerState.RUNNING, WorkerState.IDLE])
def test_stacks_are_kept_once_of_every_worker_before_it_unwinds(state: WorkerState):
    agent = Agent()
    agent.report(state)
    generation = Generation(
        number=GenerationNumber(2),
        phase=GenerationPhase.QUIESCE,
        membership=Membership(members=(ME, OTHER)),
        failures=FailedAttempts(hang="b hangs"),
    )
    assert kinds(agent.tell(GenerationRead(generation)))[-2:] == [TakeStacks, Quiesce]
    assert TakeStacks not in kinds(agent.tell(GenerationRead(generation)))


def test_a_worker_that_stopped_and_trains_again_is_not_killed():
    agent = Agent()
    agent.report(WorkerState.RUNNING)
    agent.read(2, GenerationPhase.QUIESCE, OTHER)
    agent.report(WorkerState.IDLE)
    # All of it before the next check.
    assert kinds(agent.read(3, GenerationPhase.FORM, ME, OTHER)) == [SendIntoWorld]
    agent.report(WorkerState.RUNNING)
    agent.now_s = 60.0
    assert agent.tell(CheckDue()) == []


def test_a_worker_that_stops_late_twice_has_a_deadline_of_its_own_each_time():
    agent = Agent()
    agent.report(WorkerState.RUNNING)
    agent.read(2, GenerationPhase.QUIESCE, OTHER)
    agent.report(WorkerState.IDLE)
    agent.read(3, GenerationPhase.FORM, ME, OTHER)
    agent.report(WorkerState.RUNNING)
    agent.now_s = 60.0
    assert kinds(agent.read(4, GenerationPhase.QUIESCE, OTHER)) == [Quiesce, CheckUnwound]
    assert agent.tell(CheckDue()) == [CheckUnwound()]


def test_the_successor_of_a_worker_that_did_not_stop_is_spared():
    agent = Agent()
    agent.report(WorkerState.RUNNING)
    agent.read(2, GenerationPhase.QUIESCE, OTHER)
    agent.worker = WorkerView(incarnation=Incarnation(2), report=WorkerReport(state=WorkerState.RUNNING))
    agent.now_s = 60.0
    assert agent.tell(CheckDue()) == []


def test_a_member_of_a_void_generation_gets_no_order_of_a_member():
    agent = Agent()
    agent.tell(
        RegistrationBegan(
            Generation(
                number=GenerationNumber(2), phase=GenerationPhase.PAUSE, membership=Membership(members=(ME,))
            )
        )
    )
    assert kinds(agent.read(2, GenerationPhase.PAUSE, ME)) == [Quiesce]
    assert kinds(agent.read(3, GenerationPhase.PAUSE, ME)) == [Pause]


def test_a_host_that_is_not_needed_leaves_at_once_and_a_member_when_the_others_go_on():
    assert kinds(Agent().tell(LeaveNoticed())) == [LeaveJob]
    agent = Agent()
    agent.read(2, GenerationPhase.ACTIVE, ME, OTHER)
    assert agent.tell(LeaveNoticed()) == []
    assert kinds(agent.read(3, GenerationPhase.PAUSE, ME, OTHER)) == [Pause]
    assert kinds(agent.read(3, GenerationPhase.FORM, OTHER)) == [LeaveJob]


def test_only_a_worker_that_was_in_a_world_is_replaced():
    agent = Agent(replaces_workers=True)
    assert kinds(agent.read(1, GenerationPhase.QUIESCE)) == [Quiesce]
    assert kinds(agent.read(1, GenerationPhase.FORM, ME, OTHER)) == [SendIntoWorld]
    assert kinds(agent.read(2, GenerationPhase.QUIESCE)) == [ReplaceWorker]
    agent.worker = WorkerView(incarnation=Incarnation(2), report=WorkerReport(state=WorkerState.IDLE))
    assert kinds(agent.read(2, GenerationPhase.QUIESCE)) == [Quiesce]


@given(
    script=st.lists(
        st.tuples(
            st.integers(1, 5),
            st.sampled_from(PHASES),
            st.booleans(),
            st.booleans(),
            st.sampled_from(WorkerState),
        ),
        max_size=12,
    )
)
def test_any_sequence_of_generations_sends_only_members_and_newcomers_into_a_world(script):
    agent = Agent()
    newest = 0
    for number, phase, is_member, is_newcomer, state in script:
        agent.report(state)
        members = (ME, OTHER) if is_member else (OTHER,)
        newcomers = (ME,) if is_newcomer and not is_member else ()
        commands = agent.read(number, phase, *members, newcomers=newcomers)
        if number < newest:
            assert commands == [RecordStale(GenerationNumber(number), GenerationNumber(newest))]
            continue
        newest = number
        sent = [c for c in commands if isinstance(c, SendIntoWorld)]
        forms = is_member and phase is GenerationPhase.FORM
        assert bool(sent) == (forms or (bool(newcomers) and phase is GenerationPhase.ACTIVE))
        assert all(c.is_newcomer == bool(newcomers) for c in sent)
        assert not [c for c in commands if isinstance(c, KillWorker)]


def end_job(number: int, kind: JobOutcomeKind) -> Generation:
    outcome = JobOutcome(kind=kind, exit_code=84)
    return Generation(number=GenerationNumber(number), phase=GenerationPhase.FINISHED, outcome=outcome)


@pytest.mark.parametrize("kind", JobOutcomeKind)
def test_a_host_that_starts_after_the_job_was_interrupted_waits_for_it_to_begin_anew(kind: JobOutcomeKind):
    agent, ended = Agent(), end_job(5, kind)
    agent.tell(RegistrationBegan(ended))
    commands = agent.tell(GenerationRead(ended))
    assert (EndJob in kinds(commands)) == (kind is not JobOutcomeKind.INTERRUPTED)
    assert EndJob in kinds(agent.tell(GenerationRead(end_job(6, kind)))), "its own end"


def test_a_host_that_was_there_ends_with_the_job_also_if_it_lost_the_store_then():
    agent, ended = Agent(), end_job(5, JobOutcomeKind.INTERRUPTED)
    agent.read(4, GenerationPhase.ACTIVE, ME)
    agent.tell(RegistrationBegan(ended))
    assert EndJob in kinds(agent.tell(GenerationRead(ended)))


WORDS_OF_CELLS = {
    "refused": "RecordStale",
    "the host ends": "EndJob",
    "other services stop": "StopOtherServices",
    "`Quiesce`": "Quiesce",
    "`Pause`": "Pause",
    "`RunToBoundary`": "RunToBoundary",
    "`FormWorld`": "SendIntoWorld",
    "`TakeSeat`": "SendIntoWorld",
}
"""What the machine commands where its table has these words. A condition follows them in some cells."""


def read_table() -> list[tuple[str, str, str]]:
    """Return (phase, kind of worker, cell) of each cell in the table of the machine's docstring."""
    lines = re.findall(r"^\| (.*) \|$", generation_orders.__doc__ or "", re.MULTILINE)
    header, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    return [(row[0], kind, cell) for row in rows for kind, cell in zip(header[1:], row[1:], strict=True)]


@pytest.mark.parametrize(("phase", "kind", "cell"), read_table())
def test_an_idle_worker_gets_what_the_table_says(phase: str, kind: str, cell: str) -> None:
    agent = Agent()
    agent.state = dataclasses.replace(
        agent.state, generation=Generation(number=GenerationNumber(2), phase=GenerationPhase.ACTIVE)
    )
    number, members, newcomers = (1 if phase == "older" else 3), (OTHER,), ()
    match kind.removeprefix("for "):
        case "a seated worker":
            members = (ME, OTHER)
        case "a newcomer":
            newcomers = (ME,)
        case _:
            pass
    generation = Generation(
        number=GenerationNumber(number),
        phase=GenerationPhase.ACTIVE if phase == "older" else GenerationPhase(phase.lower()),
        membership=Membership(members=members, newcomers=newcomers),
        planned=PlannedBoundary(boundary_step=3 if phase == "BOUNDARY" else None),
        outcome=JobOutcome(kind=JobOutcomeKind.DONE, exit_code=0) if phase == "FINISHED" else None,
    )
    commands = [kind.__name__ for kind in kinds(agent.tell(GenerationRead(generation)))]
    expected = next(name for words, name in WORDS_OF_CELLS.items() if cell.startswith(words))
    assert [name for name in commands if name != "SetUrgency"] == [expected]


def test_the_table_has_every_phase() -> None:
    phases = [phase for phase, _ in itertools.groupby(read_table(), key=lambda cell: cell[0])]
    assert sorted(phases) == sorted(["older", *(phase.name for phase in GenerationPhase)])
