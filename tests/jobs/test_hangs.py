"""Workers that hang without dying: the host is named, the stacks of all hosts are kept, and training goes on."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobReport
from resilient_jax.cluster.run_directory import HostLog, make_log_path
from resilient_jax.cluster.stacks_file import make_stacks_path
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import HostName
from resilient_jax.membership.severities import Action
from resilient_jax.protocol.failpoints import FailPoint, FailPointOrder, HangAction
from resilient_jax.telemetry.event_log import read_events
from tests.support.agents import run_command
from tests.support.patience import wait_until
from tests.support.tiny_job import HANGS_ARE_NAMED, ONE_DEVICE, RECOVERY_S, TinyJob

HOSTS = 3
AHEAD = 30
"""Steps from now at which a worker is to hang: it has read some of them ahead."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    """Yield the job that the tests below break, one after the other; check its invariants after them."""
    with TinyJob(tmp_path_factory.mktemp("hangs"), HOSTS, HANGS_ARE_NAMED, ONE_DEVICE) as job:
        yield job
        job.finish()


def events(job: TinyJob) -> list[Event]:
    """Return all events of the job in the order of their time."""
    run = job.work / "run"
    found = [event for path in run.glob(f"*.{HostLog.EVENTS}") for event in read_events(path)]
    return sorted(found, key=lambda event: event.monotonic_s)


def wait_event(job: TinyJob, kind: EventKind, since_s: float) -> Event:
    """Wait for the first event of a kind after a time, and return it."""

    def find() -> Event | None:
        return next((e for e in events(job) if e.kind is kind and e.monotonic_s > since_s), None)

    wait_until(f"{kind} after {since_s}:\n{job.job.read_tail()}", lambda: find() is not None, RECOVERY_S)
    found = find()
    assert found is not None
    return found


def hang(job: TinyJob, host: str, place: str) -> float:
    """Have the worker of a host hang once at a place; return the time before it."""
    job.wait_training(HOSTS)
    since_s = time.monotonic()
    order = job.work / "hang"
    order.write_text(f"{host} {place} {job.step() + AHEAD}")
    wait_until(f"{host} hangs in {place}", lambda: not order.exists(), RECOVERY_S)
    return since_s


def read_stacks(job: TinyJob, host: str) -> str:
    return make_stacks_path(job.work / "run", host).read_text()


@pytest.mark.parametrize(
    ("place", "task", "function"), [("input", "input", "batch"), ("user", "user code", "train")]
)
def test_a_worker_that_keeps_the_others_waiting_is_named_and_started_again(
    job: TinyJob, place: str, task: str, function: str
) -> None:
    since_s = hang(job, "host-1", place)
    named = wait_event(job, EventKind.HANG_NAMED, since_s)
    why = str(named.detail["why"])
    assert named.detail["hosts"] == "host-1"
    assert named.detail["action"] == Action.RESTART_WORKER
    assert why.startswith("host-1 has not entered the sum of step "), why
    assert "in `hang_if_ordered`, line " in why, why
    assert f"({task}, for " in why, why
    killed = wait_event(job, EventKind.WORKER_KILLED, since_s)
    for number in range(HOSTS):
        path = make_stacks_path(job.work / "run", f"host-{number}")
        assert why in path.read_text(), f"no stacks of host-{number} for this hang"
        assert path.stat().st_mtime <= killed.wall_s, "before anything is killed"
    assert f"in {function}\n" in read_stacks(job, "host-1")
    job.wait_training(HOSTS, named.generation or 0)
    hung = [e for e in events(job) if e.kind is EventKind.WORKER_OVERDUE and e.monotonic_s > since_s]
    assert {e.host for e in hung} == {"host-1"}, "the others wait, and are not overdue"
    deadline_s = hung[0].monotonic_s - float(hung[0].detail["silent_s"]) + float(hung[0].detail["deadline_s"])
    print(f"named {named.monotonic_s - deadline_s:.2f} s after the deadline")


def test_a_collective_that_hangs_is_broken_off_and_made_again_by_the_same_workers(job: TinyJob) -> None:
    before = job.wait_training(HOSTS)
    since_s = time.monotonic()
    job.job.failpoints.set_order(
        FailPointOrder(
            failpoint=FailPoint.IN_COLLECTIVE,
            step=job.step() + AHEAD,
            hosts=("host-2",),
            action=HangAction(duration_s=600.0),
            name="collective",
        )
    )
    named = wait_event(job, EventKind.HANG_NAMED, since_s)
    job.job.failpoints.release("collective")
    assert named.detail["hosts"] == ""
    assert named.detail["action"] == Action.RETRY_IN_PLACE
    assert named.generation is not None
    after = job.wait_training(HOSTS, named.generation - 1)
    assert pids(after) == pids(before)


def test_a_worker_that_holds_the_interpreter_is_described_from_outside(job: TinyJob) -> None:
    since_s = hang(job, "host-1", "interpreter")
    killed = wait_event(job, EventKind.WORKER_KILLED, since_s)
    assert "it does not respond" in read_stacks(job, "host-1")
    assert "State: S (sleeping)" in read_stacks(job, "host-1")
    output = make_log_path(job.work / "run", "host-1", HostLog.OUTPUT)
    assert "in hang_if_ordered" in Path(output).read_text(), "the stacks of Python, without the interpreter"
    job.wait_training(HOSTS, killed.generation or 0)


def test_a_drained_host_takes_no_part_until_its_quarantine_is_cleared(job: TinyJob) -> None:
    before = job.wait_training(HOSTS)
    assert before.generation is not None
    run = str(job.work / "run")
    assert run_command(["hosts", run, "drain", "host-2"])[0] == 0
    left = job.wait_training(HOSTS - 1, before.generation.number)
    assert left.generation is not None
    assert left.generation.membership.find_member(HostName("host-2")) is None
    code, listed = run_command(["hosts", run, "list"])
    assert (code, "host-2: for " in listed) == (0, True), listed
    assert run_command(["hosts", run, "clear", "host-2"]) == (0, "host-2: may take part again\n")
    after = job.wait_training(HOSTS, left.generation.number)
    assert pids(after) == pids(before), "its worker stayed ready"


def pids(report: JobReport) -> list[int | None]:
    return [host.worker and host.worker.pid for host in report.hosts]
