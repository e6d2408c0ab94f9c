"""`logs`, `events` and `kill`: what they are asked for, what they print, and what they say of hosts that are silent."""

from pathlib import Path

import msgspec
import pytest

from resilient_jax.cli import main
from resilient_jax.cli.events import format_event, merge_events
from resilient_jax.cli.job_contact import RemoteJob, choose_job
from resilient_jax.cli.kill import KillTarget, parse_target
from resilient_jax.cli.log_printer import list_notes
from resilient_jax.cli.log_sources import LogRound, is_over
from resilient_jax.cli.logs import format_output
from resilient_jax.cli.options import read_versions
from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.cluster.run_directory import EndedJob, write_ended_job
from resilient_jax.errors import CallerError, ExitCode, OperatorError, Unauthenticated
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.generation import Generation, GenerationPhase, JobOutcome, JobOutcomeKind
from resilient_jax.protocol.host_status import AgentStatus, HostStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.telemetry.log_reader import LogPart
from resilient_jax.transport.credentials import TOKEN_VARIABLE

ETCD = "etcd://a:2379/training"


def make_event(host: str, wall_s: float, **detail: str | int | float | bool) -> Event:
    return Event(kind=EventKind.WORKER_EXITED, host=host, monotonic_s=0.0, wall_s=wall_s, detail=detail)


def encode(*events: Event) -> LogPart:
    return LogPart(data=b"".join(msgspec.json.encode(event) + b"\n" for event in events))


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["resilient-jax", *words])
    with pytest.raises(SystemExit) as end:
        main.main()
    return int(end.value.code or 0)


# Where a job is.


def test_a_job_is_named_by_its_folder_or_by_its_store_and_name() -> None:
    assert choose_job(Path("run"), None, None, None, None) == Path("run")
    found = choose_job(None, ETCD, "lm", Path("tls"), None)
    assert found == RemoteJob(store=ETCD, job="lm", tls=Path("tls"), store_tls=None)


@pytest.mark.parametrize("given", [(None, None, None), (None, ETCD, None), (Path("run"), ETCD, "lm")])
def test_half_a_name_or_two_are_refused(given: tuple[Path | None, str | None, str | None]) -> None:
    with pytest.raises(CallerError, match="expected either the run folder of a job on this machine"):
        choose_job(*given, None, None)


def test_agents_want_the_token_also_where_the_store_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    job = RemoteJob(store=ETCD, job="lm", tls=None, store_tls=None)
    assert job.make_contact(calls_agents=False).store == ETCD
    with pytest.raises(Unauthenticated, match=TOKEN_VARIABLE):
        job.make_contact(calls_agents=True)


@pytest.mark.parametrize(
    ("words", "has_folder", "expected"),
    [
        (["run", "worker"], True, ("run", JobComponent.WORKER, "leader")),
        (["run", "host", "node-7"], True, ("run", JobComponent.HOST, "node-7")),
        (["agent", "node-7"], False, (None, JobComponent.AGENT, "node-7")),
        (["service"], False, (None, JobComponent.COORDINATION_SERVICE, "leader")),
    ],
)
def test_kill_takes_a_run_folder_unless_the_job_is_named_by_its_store(words, has_folder, expected) -> None:
    folder, component, host = expected
    assert parse_target(words, has_folder=has_folder) == KillTarget(
        run_directory=Path(folder) if folder else None, component=component, host=host
    )


@pytest.mark.parametrize(
    ("words", "has_folder", "said"),
    [
        (
            ["worker", "node-7"],
            True,
            "found 'worker node-7', expected RUN_DIR PART .HOST.: RUN_DIR is missing",
        ),
        (
            ["run", "node-7"],
            True,
            "PART: found 'node-7', expected one of worker, agent, .* in RUN_DIR PART",
        ),
        (["run"], True, "found 'run', expected RUN_DIR PART"),
        (
            ["run", "worker", "node-7"],
            False,
            "found 'run worker node-7', expected PART .HOST. beside --store",
        ),
        (["gpu"], False, "PART: found 'gpu'"),
    ],
)
def test_wrong_arguments_of_kill_are_refused_in_words(words, has_folder, said) -> None:
    with pytest.raises(CallerError, match=said):
        parse_target(words, has_folder=has_folder)


# What is printed.


def test_lines_have_the_name_of_their_host() -> None:
    parts = {"host-0": LogPart(data=b"one\n\ntwo\n"), "host-1": LogPart(), "host-2": LogPart(data=b"piece")}
    assert format_output(parts) == b"[host-0] one\n[host-0] \n[host-0] two\n[host-2] piece\n"


def test_events_of_all_hosts_are_merged_in_order_of_time(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = make_event("b", 1.0), make_event("a", 2.0), make_event("b", 3.0)
    damaged = LogPart(data=b'{"kind": "worker.exited"}\n')
    merged = merge_events({"a": encode(second), "b": encode(first, third), "c": damaged})
    assert [event for event, _ in merged] == [first, second, third]
    assert [line for _, line in merged] == [msgspec.json.encode(event) for event in (first, second, third)]
    assert "a line of the event log of c does not decode as Event" in capsys.readouterr().err


def test_an_event_is_one_line() -> None:
    event = msgspec.structs.replace(
        make_event("host-1", 1795626871.4146, exit_code=-9, why="a reason", error="line\n" * 100), step=7
    )
    shown = format_event(event)
    assert shown.startswith(
        "2026-11-25T17:14:31.414Z host-1 worker.exited step=7 exit_code=-9 why='a reason' error='line\\nline"
    )
    assert shown.endswith("... (500 characters)'")
    assert "\n" not in shown


# What is said of hosts.


def make_round(*, parts: tuple[str, ...] = (), silent: tuple[str, ...] = ()) -> LogRound:
    return LogRound(
        parts=dict.fromkeys(parts, LogPart()),
        silent={host: f"{host} is silent" for host in silent},
        is_over=False,
    )


def test_a_silent_host_is_named_once_and_when_it_answers_again() -> None:
    found = make_round(parts=("a",), silent=("b",))
    assert list_notes(found, {}, is_first=True) == ["b is silent"]
    assert list_notes(found, found.silent, is_first=False) == []
    assert list_notes(make_round(parts=("a", "b")), found.silent, is_first=False) == ["host b answers again"]


def test_if_no_host_answers_that_is_an_error_that_names_some() -> None:
    with pytest.raises(
        OperatorError, match=r"^a is silent; b is silent; c is silent; and 1 more hosts did not$"
    ):
        list_notes(make_round(silent=("a", "b", "c", "d")), {}, is_first=True)


def test_a_part_that_was_cut_is_named() -> None:
    found = LogRound(parts={"a": LogPart(is_cut=True)}, silent={}, is_over=False)
    assert list_notes(found, {}, is_first=True) == ["host a: only the last 256 KiB of its log"]


def test_following_ends_when_the_job_has_ended_or_has_no_host() -> None:
    host = HostStatus(
        host=HostName("a"), agent=AgentStatus(id="", pid=1, address="", versions=read_versions())
    )
    training = Generation(number=GenerationNumber(1), phase=GenerationPhase.ACTIVE)
    outcome = JobOutcome(kind=JobOutcomeKind.DONE, exit_code=0)
    ended = change_fields(training, phase=GenerationPhase.FINISHED, outcome=outcome)
    cases = [((host,), None), ((host,), training), ((host,), ended), ((), training)]
    reports = [JobReport(job="lm", generation=found, leader=None, hosts=hosts) for hosts, found in cases]
    assert [is_over(report) for report in reports] == [False, False, True, True]


# The run folder.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the run folder of a job that is over."""
    for host in ("host-0", "host-1"):
        (tmp_path / f"{host}.log").write_bytes(b"".join(b"%s %d\n" % (host.encode(), n) for n in range(30)))
        (tmp_path / f"{host}.events.jsonl").write_bytes(encode(make_event(host, int(host[-1]))).data)
    outcome = JobOutcome(kind=JobOutcomeKind.DONE, exit_code=0)
    write_ended_job(tmp_path, EndedJob(job="first", outcome=outcome, step=7, metrics={}, wall_s=0.0))
    return tmp_path


def test_logs_of_a_job_that_is_over_are_read_in_its_folder_and_following_them_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(monkeypatch, "logs", str(folder), "-n", "2", "-f") == ExitCode.DONE
    shown = capfdbinary.readouterr().out.decode()
    assert shown.splitlines() == [f"[{host}] {host} {n}" for host in ("host-0", "host-1") for n in (28, 29)]


def test_the_newest_events_of_a_job_that_is_over_are_read_in_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "events", str(folder), "-n", "1", "--json") == ExitCode.DONE
    assert msgspec.json.decode(capfd.readouterr().out, type=Event) == make_event("host-1", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "host-7"), "--host host-7: found no such host, expected one of: host-0, host-1\n"),
        (("--store", ETCD), "expected either the run folder of a job on this machine"),
    ],
)
def test_what_is_not_there_is_refused(
    words: tuple[str, ...],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "logs", str(folder), *words) == ExitCode.USAGE
    assert said in capfd.readouterr().err


def test_a_folder_without_logs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "events", str(tmp_path)) == ExitCode.USAGE
    assert "found no file HOST.events.jsonl, expected a run folder" in capfd.readouterr().err
