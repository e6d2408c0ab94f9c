"""`resilient-jax status` prints a table of a running job without truncated words, or how the last one ended."""

import io
import re
import sys
import time

import msgspec
import pytest
from rich.console import Console

from resilient_jax.cli import main, status
from resilient_jax.cli.options import read_versions
from resilient_jax.cli.progress import StepRate, describe_steps
from resilient_jax.cluster.job_report import JobReport, find_redundancy
from resilient_jax.cluster.run_directory import EndedJob, HostLog, make_log_path, write_ended_job
from resilient_jax.errors import ExitCode, StoreUnreachable
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat, WorldId
from resilient_jax.membership.redundancy import Redundancy
from resilient_jax.protocol.generation import (
    Generation,
    GenerationPhase,
    JobOutcome,
    JobOutcomeKind,
    LeaderNotes,
    Member,
    Membership,
)
from resilient_jax.protocol.host_status import (
    AgentStatus,
    CoordinationServiceStatus,
    HostStatus,
    StandbyState,
    StandbyStatus,
    WorkerStatus,
)
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryDecision, RecoveryOption
from resilient_jax.protocol.slow_hosts import SlowHost, SlownessRecord
from resilient_jax.protocol.snapshots import ParityGroup, SnapshotId, SnapshotPhase, SnapshotStatus
from resilient_jax.protocol.worker_report import (
    HeldState,
    TrainingProgress,
    WorkerFindings,
    WorkerReport,
    WorkerState,
    WorldPlace,
)

HOST = HostName("ip-10-0-0-17.compute.internal")
HOSTS = (HOST, HostName("host-1"))
SNAPSHOT = SnapshotStatus(
    id=SnapshotId(generation=GenerationNumber(1), step=12),
    phase=SnapshotPhase.COMMITTED,
    group=ParityGroup(hosts=HOSTS, parity=1),
    group_index=0,
    num_groups=1,
    nbytes=2**20,
    wall_s=0.0,
)
REPORT = JobReport(
    job="folder[/name]",
    generation=None,
    leader=None,
    hosts=(
        HostStatus(
            host=HOST,
            agent=AgentStatus(id="", pid=1, address="", versions=read_versions()),
            worker=WorkerStatus(incarnation=Incarnation(3), pid=1795312),
            services=(
                CoordinationServiceStatus(world=WorldId(11), num_processes=2, num_seats=2, address="", pid=2),
            ),
            snapshots=(SNAPSHOT,),
            standby=StandbyStatus(state=StandbyState.READY, pid=3, memory_mib=186),
            progress=TrainingProgress(step=123456),
            is_draining=True,
        ),
    ),
    redundancy=Redundancy(losses=1, step=123456, copies=1, snapshot=SNAPSHOT.id),
)
WHOLE = [
    "folder[/name]",
    "process",
    "worker",
    "incarnation",
    "snapshots",
    HOST,
    "starting",
    "1795312",
    "123456",
    "draining",
    "standby",
    "186",
    "survives",
]


@pytest.fixture
def _running(monkeypatch):
    async def read_report(contact):
        return REPORT

    monkeypatch.setattr(status, "read_live_contact", lambda folder: None)
    monkeypatch.setattr(status, "read_job_report", read_report)


@pytest.mark.usefixtures("_running")
def test_no_word_is_truncated_in_a_pipe(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["resilient-jax", "status", "run"])
    with pytest.raises(SystemExit) as end:
        main.main()
    shown, errors = capsys.readouterr()
    assert (end.value.code, errors) == (ExitCode.DONE, "")
    assert [word for word in WHOLE if word not in shown] == []
    assert "…" not in shown


def test_no_word_is_truncated_in_a_narrow_terminal():
    shown = io.StringIO()
    status.print_report(Console(file=shown, width=20), REPORT)
    assert [word for word in WHOLE if word != HOST and word not in shown.getvalue()] == []
    assert "…" not in shown.getvalue()


@pytest.mark.parametrize(("parity", "said"), [(1, "1 of 2"), (0, "0 of 2")])
def test_the_losses_that_a_snapshot_survives_are_its_parity(parity, said):
    group = ParityGroup(hosts=HOSTS, parity=parity)
    snapshot = msgspec.structs.replace(SNAPSHOT, group=group)
    host = change_fields(REPORT.hosts[0], snapshots=(snapshot,))
    shown = io.StringIO()
    status.print_report(Console(file=shown, width=300), msgspec.structs.replace(REPORT, hosts=(host,)))
    assert f"survives the loss of {said} hosts" in shown.getvalue()


@pytest.mark.parametrize(
    ("redundancy", "said"),
    [
        (None, "state: none committed, or none left"),
        (
            Redundancy(losses=2, step=7, copies=3),
            "state of step 7: on 3 hosts; survives the loss of 2 more hosts",
        ),
        (
            Redundancy(losses=0, step=7, copies=1),
            "state of step 7: on 1 host; the loss of one more host may lose it",
        ),
        (
            Redundancy(losses=1, step=7, copies=0, snapshot=SnapshotId(7, GenerationNumber(1))),
            "state of step 7: in the snapshot of step 7; survives the loss of 1 more host",
        ),
        (
            Redundancy(losses=1, step=7, copies=2, is_in_parts=True),
            "state of step 7: each part on 2 hosts; survives the loss of 1 more host",
        ),
    ],
)
def test_how_many_more_losses_the_state_survives_is_said(redundancy, said):
    assert status.describe_redundancy(redundancy) == said


IDLE = WorkerReport(state=WorkerState.IDLE, place=WorldPlace(world=WorldId(3)))
TRAINING = Generation(
    number=GenerationNumber(3),
    phase=GenerationPhase.ACTIVE,
    membership=Membership(
        world=WorldId(3),
        members=(Member(host=HostName("host-1"), incarnation=Incarnation(3), seat=Seat(0)),),
        spares=(HostName("host-2"),),
    ),
)


@pytest.mark.parametrize(
    ("host", "is_spare", "report", "said"),
    [
        ("host-1", False, IDLE, ""),
        ("host-1", True, IDLE, "spare that takes part"),
        ("host-3", False, IDLE, ""),
        ("host-3", True, IDLE, "spare, ready, 412 MiB: no part of the state"),
        ("host-2", False, IDLE, "spare, ready, 412 MiB: no part of the state"),
        (
            "host-3",
            True,
            WorkerReport(state=WorkerState.IDLE),
            "spare, ready, joins by a re-form, 412 MiB: no part of the state",
        ),
        ("host-3", True, WorkerReport(state=WorkerState.PREPARING), "spare, getting ready"),
        ("host-3", True, None, "spare, without a worker"),
    ],
)
def test_of_a_host_that_spares_it_is_said_whether_it_is_ready(host, is_spare, report, said):
    worker = (
        WorkerStatus(incarnation=Incarnation(3), pid=1, memory_mib=412, report=report) if report else None
    )
    changes = {"host": HostName(host), "is_spare": is_spare, "worker": worker, "standby": None}
    changed = change_fields(REPORT.hosts[0], is_draining=False, **changes)
    assert status.describe_spare(changed, TRAINING) == said
    shown = io.StringIO()
    report = msgspec.structs.replace(REPORT, hosts=(changed,), generation=TRAINING)
    status.print_report(Console(file=shown, width=400), report)
    assert ("spare" in shown.getvalue()) == bool(said)
    assert said in shown.getvalue()


def test_the_last_decision_is_a_line_and_is_not_parsed_as_markup():
    decision = RecoveryDecision(
        action=RecoveryAction.SHRINK, number=GenerationNumber(7), reason="the job goes on: [3] hosts"
    )
    generation = Generation(
        number=GenerationNumber(7), phase=GenerationPhase.ACTIVE, record=LeaderNotes(decision=decision)
    )
    shown = io.StringIO()
    status.print_report(
        Console(file=shown, width=200), msgspec.structs.replace(REPORT, generation=generation)
    )
    assert "last decision, in generation 7: shrink: the job goes on: [3] hosts\n" in shown.getvalue()


def test_the_options_of_a_decision_are_lines_below_it():
    options = (
        RecoveryOption(action=RecoveryAction.SHRINK, score=0.75, pause_s=0.2, speed=0.75),
        RecoveryOption(
            action=RecoveryAction.REPLACE, score=0.0, pause_s=0.0, speed=0.0, why_not="no host is ready"
        ),
    )
    decision = RecoveryDecision(
        action=RecoveryAction.SHRINK, number=GenerationNumber(7), reason="the job goes on", options=options
    )
    report = msgspec.structs.replace(REPORT, generation=change_fields(TRAINING, decision=decision))
    shown = io.StringIO()
    status.print_report(Console(file=shown, width=400), report)
    lines = [line.strip() for line in shown.getvalue().splitlines()]
    first = lines.index("last decision, in generation 7: shrink: the job goes on")
    assert lines[first + 2 : first + 4] == [option.describe() for option in options]


def test_watching_shows_the_job_until_it_is_over(monkeypatch, capsys):
    """Also while its store does not answer: a job that ends takes it away before it says how it ended."""
    outcome = JobOutcome(kind=JobOutcomeKind.DONE, exit_code=0)
    training = msgspec.structs.replace(REPORT, generation=TRAINING)
    over = change_fields(TRAINING, phase=GenerationPhase.FINISHED, outcome=outcome)
    answers = [
        training,
        StoreUnreachable("the store is gone"),
        training,
        msgspec.structs.replace(REPORT, generation=over),
    ]

    async def read_report(contact):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(status, "read_live_contact", lambda folder: None)
    monkeypatch.setattr(status, "read_job_report", read_report)
    monkeypatch.setattr(status, "WATCH_INTERVAL_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["resilient-jax", "status", "run", "--watch"])
    with pytest.raises(SystemExit) as end:
        main.main()
    shown, errors = capsys.readouterr()
    assert (end.value.code, errors, answers) == (ExitCode.DONE, "", [])
    assert (shown.count("(active"), shown.count("the store is gone"), shown.count("(finished")) == (2, 1, 1)


def test_how_far_a_job_is_comes_with_its_speed_and_the_time_left():
    assert describe_steps(12, 0, None) == ["step 12"]
    assert describe_steps(12, 60, None) == ["step 12 of 60"]
    assert describe_steps(12, 60, 1.5) == ["step 12 of 60", "1.5 steps/s", "32 s left"]
    assert describe_steps(60, 60, 1.5) == ["step 60 of 60", "1.5 steps/s"]


def test_the_speed_is_that_of_the_last_minute():
    rate = StepRate()
    assert [rate.measure(0, 0.0), rate.measure(0, 50.0), rate.measure(1, 100.0)] == [None, None, None]
    assert rate.measure(11, 105.0) == 2.0
    assert rate.measure(11, 110.0) == 1.0, "a pause counts"
    last = None
    for second in range(100):
        last = rate.measure(12 + second, 200.0 + second)
    assert last == 1.0


def test_a_slow_host_is_shown_as_the_first_host_found_it():
    found = SlowHost(host=HostName("host-2"), kind="compute", factor=2.1, since_step=83)
    outdated = SlowHost(host=HostName("host-1"), kind="input", factor=1.5, since_step=12)
    hosts = tuple(
        change_fields(
            REPORT.hosts[0],
            host=HostName(name),
            is_draining=False,
            standby=None,
            worker=WorkerStatus(
                incarnation=Incarnation(3),
                pid=1,
                report=WorkerReport(findings=WorkerFindings(slow_hosts=(slow,))),
            ),
        )
        for name, slow in (("host-1", found), ("host-2", outdated))
    )
    shown = io.StringIO()
    report = msgspec.structs.replace(REPORT, hosts=hosts, generation=TRAINING)
    status.print_report(Console(file=shown, width=400), report)
    said = "slow (compute): 2.1 times since step 83"
    assert [said in line for line in shown.getvalue().splitlines() if "host-2" in line] == [True]
    assert outdated.describe() not in shown.getvalue()


def test_the_last_decision_about_slow_hosts_is_shown_beside_that_about_members():
    number = GenerationNumber(7)
    members = RecoveryDecision(action=RecoveryAction.JOIN, number=number, reason="they joined")
    slow = RecoveryDecision(
        action=RecoveryAction.KEEP, number=number, reason="host-2 is slow", slow=HostName("host-2")
    )
    generation = change_fields(TRAINING, decision=members, slowness=SlownessRecord(decision=slow))
    shown = io.StringIO()
    report = msgspec.structs.replace(REPORT, generation=generation)
    status.print_report(Console(file=shown, width=400), report)
    assert "last decision, in generation 7: join: they joined\n" in shown.getvalue()
    assert "last decision about slow hosts, in generation 7: keep: host-2 is slow\n" in shown.getvalue()


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (JobOutcome(kind=JobOutcomeKind.DONE, exit_code=0), "exit code 0 | step 7 | loss 0.25000\ndone\n"),
        (
            JobOutcome(kind=JobOutcomeKind.STATE_LOST, exit_code=85, message="too many hosts"),
            "exit code 85 | step 7 | loss 0.25000\nthe job ended: state_lost\ntoo many hosts\n",
        ),
    ],
)
def test_of_a_job_that_is_over_the_end_is_shown(outcome, said, tmp_path, monkeypatch, capfd):
    ended = EndedJob(job="first", outcome=outcome, step=7, metrics={"loss": 0.25}, wall_s=time.time() - 5)
    write_ended_job(tmp_path, ended)
    monkeypatch.setattr(sys, "argv", ["resilient-jax", "status", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main.main()
    shown = capfd.readouterr().out
    assert end.value.code == ExitCode.DONE
    assert shown.startswith("job first: ended ")
    assert shown.endswith(said)
    monkeypatch.setattr(sys, "argv", ["resilient-jax", "status", str(tmp_path), "--json"])
    with pytest.raises(SystemExit):
        main.main()
    assert msgspec.json.decode(capfd.readouterr().out, type=EndedJob) == ended


def test_of_agents_that_were_started_by_hand_each_end_is_shown_once_the_newest_first(
    tmp_path, monkeypatch, capfd
):
    told = JobOutcome(
        kind=JobOutcomeKind.INTERRUPTED, exit_code=130, message="interrupted at step 7: as told"
    )
    left = JobOutcome(kind=JobOutcomeKind.INTERRUPTED, exit_code=84, message="this host left")
    ends = {}
    for host, outcome, step, ago_s in (
        ("host-0", told, 6, 5),
        ("host-1", left, 3, 50),
        ("host-2", told, 7, 4),
    ):
        ends[host] = EndedJob(job="lm", outcome=outcome, step=step, metrics={}, wall_s=time.time() - ago_s)
        write_ended_job(tmp_path, ends[host], host)
    for host in (*ends, "host-3"):
        make_log_path(tmp_path, host, HostLog.EVENTS).touch()
    monkeypatch.setattr(sys, "argv", ["resilient-jax", "status", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == ExitCode.DONE
    assert re.sub(r"ended \d+ s", "ended some s", capfd.readouterr().out).splitlines() == [
        "host-0, host-2: job lm: ended some s ago, exit code 130 | step 7",
        "interrupted at step 7: as told",
        "host-1: job lm: ended some s ago, exit code 84 | step 3",
        "this host left",
        "host-3: no end is recorded here: still running, or killed",
    ]
    monkeypatch.setattr(sys, "argv", ["resilient-jax", "status", str(tmp_path), "--json"])
    with pytest.raises(SystemExit):
        main.main()
    assert msgspec.json.decode(capfd.readouterr().out, type=EndedJob) == ends["host-2"]


MEMBERS = tuple(
    Member(host=host, incarnation=Incarnation(1), seat=Seat(index)) for index, host in enumerate(HOSTS)
)


def make_member_status(host: HostName, step: int) -> HostStatus:
    """Return the status of a host whose worker has reported its first commit alone, and whose agent tells of more."""
    held = HeldState(step=1, holds_state=True)
    place = WorldPlace(has_formed=True)
    report = WorkerReport(state=WorkerState.RUNNING, generation=GenerationNumber(2), held=held, place=place)
    return change_fields(
        REPORT.hosts[0],
        host=host,
        worker=WorkerStatus(incarnation=Incarnation(1), pid=1, report=report),
        snapshots=(),
        progress=TrainingProgress(step=step),
    )


@pytest.mark.parametrize(
    ("phase", "step"), [(GenerationPhase.ACTIVE, 40), (GenerationPhase.QUIESCE, 1)], ids=["active", "quiesce"]
)
def test_the_state_that_may_be_lost_is_of_the_newest_step_that_all_have(phase: GenerationPhase, step: int):
    generation = Generation(number=GenerationNumber(2), phase=phase, membership=Membership(members=MEMBERS))
    statuses = tuple(make_member_status(host, 40 + index) for index, host in enumerate(HOSTS))
    redundancy = find_redundancy(generation, statuses)
    assert redundancy is not None
    assert (redundancy.step, redundancy.copies) == (step, 2)


def test_a_generation_says_why_it_is_there_unless_its_decision_does():
    generation = Generation(number=GenerationNumber(2), phase=GenerationPhase.FORM, reason="lost host-1")
    decision = RecoveryDecision(
        number=GenerationNumber(2), action=RecoveryAction.SHRINK, reason="lost host-1: the job goes on"
    )
    for report, said in (
        (generation, "why generation 2: lost host-1"),
        (
            change_fields(generation, decision=decision),
            "in generation 2: shrink: lost host-1: the job goes on",
        ),
    ):
        shown = io.StringIO()
        status.print_report(
            Console(file=shown, width=300), msgspec.structs.replace(REPORT, generation=report)
        )
        assert said in shown.getvalue()
        assert shown.getvalue().count("lost host-1") == 1
