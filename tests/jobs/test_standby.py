"""A standby replaces the worker of its host; whatever happens to it costs no more than its own start."""

import os
import signal
from collections.abc import Iterator

import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.host_status import HostStatus, StandbyStatus
from resilient_jax.protocol.worker_report import WorkerState
from tests.support.patience import wait_until
from tests.support.process_ends import is_gone
from tests.support.tiny_job import CONFIG, ONE_DEVICE, RECOVERY_S, TinyJob

HOSTS = 2
VICTIM, OTHER = "host-1", "host-0"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    """Yield the job that the tests below break, one after the other; check its invariants after them."""
    with TinyJob(tmp_path_factory.mktemp("standby"), HOSTS, CONFIG, options=ONE_DEVICE) as tiny:
        yield tiny
        tiny.finish()


def find_host(report: JobReport, host: str) -> HostStatus | None:
    return next((status for status in report.hosts if status.host == host), None)


def wait_ready(tiny: TinyJob, host: str) -> StandbyStatus:
    """Wait until all hosts train and this host's standby is ready; return its status."""
    tiny.wait_training(HOSTS)
    return tiny.wait_standby(host)


def replace_worker(tiny: TinyJob, host: str) -> int:
    """Kill the worker of a host, and wait until all hosts train again; return the id of the new worker's process."""
    before = tiny.wait_training(HOSTS).generation
    assert before is not None
    tiny.signal(JobComponent.WORKER, host, signal.SIGKILL)
    status = find_host(tiny.wait_training(HOSTS, before.number), host)
    assert status is not None
    assert status.worker is not None
    return status.worker.pid


def find_starting_pid(tiny: TinyJob, host: str) -> int | None:
    """Return the process of this host's worker while it imports its libraries; None before and after."""
    report = tiny.job.read_report()
    status = find_host(report, host) if report is not None else None
    worker = status.worker if status is not None else None
    is_starting = worker is not None and worker.is_alive and worker.report.state is WorkerState.STARTING
    return worker.pid if worker is not None and is_starting else None


def list_events(tiny: TinyJob, kind: EventKind, host: str) -> list[Event]:
    return [event for event in tiny.job.read_events() if event.kind is kind and event.host == host]


def test_a_killed_worker_is_replaced_by_its_standby(shared: TinyJob) -> None:
    waiting = wait_ready(shared, VICTIM)
    assert waiting.memory_mib > 50, "the libraries are imported"
    assert os.sched_getscheduler(waiting.pid) == os.SCHED_IDLE
    assert replace_worker(shared, VICTIM) == waiting.pid
    assert os.sched_getscheduler(waiting.pid) == os.SCHED_OTHER
    (promoted,) = list_events(shared, EventKind.WORKER_PROMOTED, VICTIM)
    started = list_events(shared, EventKind.WORKER_STARTED, VICTIM)[-1]
    assert (promoted.detail["pid"], promoted.detail["incarnation"]) == (
        waiting.pid,
        started.detail["incarnation"],
    )


def test_a_second_death_before_the_next_standby_is_ready_costs_an_ordinary_start(shared: TinyJob) -> None:
    waiting = wait_ready(shared, VICTIM)
    assert replace_worker(shared, VICTIM) == waiting.pid
    promotions = len(list_events(shared, EventKind.WORKER_PROMOTED, VICTIM))
    before = shared.wait_training(HOSTS).generation
    assert before is not None
    assert before.record.losses_left == 1
    shared.signal(JobComponent.WORKER, VICTIM, signal.SIGKILL)
    wait_until("an ordinary start", lambda: find_starting_pid(shared, VICTIM) not in (waiting.pid, None))
    pid = find_starting_pid(shared, VICTIM)
    assert pid is not None
    # The other host has the last copy of the state.
    wait_until("normal priority", lambda: os.sched_getscheduler(pid) == os.SCHED_OTHER)
    assert find_starting_pid(shared, VICTIM) == pid, "it got normal priority by itself, when it had started"
    shared.wait_training(HOSTS, before.number)
    losses = [e.detail["losses"] for e in shared.job.read_events() if e.kind is EventKind.STATE_REDUNDANCY]
    assert losses[-2:] == [0, 1]
    assert len(list_events(shared, EventKind.WORKER_PROMOTED, VICTIM)) == promotions


def test_a_standby_that_is_killed_or_stopped_costs_nothing(shared: TinyJob) -> None:
    waiting = wait_ready(shared, OTHER)
    before = shared.wait_training(HOSTS).generation
    os.kill(waiting.pid, signal.SIGKILL)
    shared.wait_report(
        "the end of the standby", lambda r: (s := find_host(r, OTHER)) is not None and s.standby is None
    )
    after = shared.wait_training(HOSTS).generation
    assert before is not None
    assert after is not None
    assert after.number == before.number
    (failed,) = list_events(shared, EventKind.STANDBY_FAILED, OTHER)
    assert failed.detail == {"pid": waiting.pid, "reason": "it was ended by SIGKILL", "retried": True}
    stopped = wait_ready(shared, VICTIM)
    os.kill(stopped.pid, signal.SIGSTOP)
    assert replace_worker(shared, VICTIM) != stopped.pid
    wait_until("the end of the stopped standby", lambda: is_gone(stopped.pid), RECOVERY_S)


def test_a_standby_ends_with_its_agent(shared: TinyJob) -> None:
    waiting = wait_ready(shared, VICTIM)
    shared.signal(JobComponent.AGENT, VICTIM, signal.SIGKILL)
    wait_until("the end of the standby", lambda: is_gone(waiting.pid), RECOVERY_S)
    shared.wait_training(HOSTS)
