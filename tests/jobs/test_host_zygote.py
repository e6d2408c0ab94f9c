"""A host forks its next worker from its zygote; whatever happens to that costs no more than an ordinary start."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import Event, EventKind
from tests.support.kills import generation_of
from tests.support.patience import wait_until
from tests.support.process_ends import is_gone, read_name
from tests.support.tiny_job import CONFIG, ONE_DEVICE, RECOVERY_S, TinyJob

HOSTS = 2
VICTIM, OTHER = "host-1", "host-0"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    """Yield the job that the tests below break, one after the other; check its invariants after them."""
    with TinyJob(tmp_path_factory.mktemp("zygotes"), HOSTS, CONFIG, options=ONE_DEVICE) as tiny:
        yield tiny
        tiny.finish()


def find_worker(tiny: TinyJob, host: str) -> int:
    """Return the process of a host's worker, when all hosts train."""
    found = {str(s.host): s.worker.pid for s in tiny.wait_training(HOSTS).hosts if s.worker is not None}
    return found[host]


def replace_worker(tiny: TinyJob, host: str) -> int:
    """Kill the worker of a host, and wait until all hosts train again; return the id of the new worker's process."""
    before = generation_of(tiny.wait_training(HOSTS))
    tiny.signal(JobComponent.WORKER, host, signal.SIGKILL)
    tiny.wait_training(HOSTS, before.number)
    return find_worker(tiny, host)


def is_forked(pid: int) -> bool:
    return read_name(psutil.Process(pid).ppid()) == "worker-parent"


def list_events(tiny: TinyJob, kind: EventKind, host: str) -> list[Event]:
    return [event for event in tiny.job.read_events() if event.kind is kind and event.host == host]


def test_workers_are_forked_the_first_and_those_that_follow_at_once_one_after_the_other(
    shared: TinyJob,
) -> None:
    workers = [find_worker(shared, VICTIM), *(replace_worker(shared, VICTIM) for _ in range(2))]
    assert len(set(workers)) == 3
    assert len(list_events(shared, EventKind.WORKER_STARTED, VICTIM)) == 3
    assert list_events(shared, EventKind.WORKER_NOT_FORKED, VICTIM) == []
    assert is_forked(workers[-1])
    assert os.sched_getscheduler(workers[-1]) == os.SCHED_OTHER


def test_a_zygote_that_is_killed_or_stopped_costs_nothing(shared: TinyJob) -> None:
    before, worker = generation_of(shared.wait_training(HOSTS)), find_worker(shared, OTHER)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        ready = len(list_events(shared, EventKind.ZYGOTE_READY, OTHER))
        os.kill(shared.wait_zygote(OTHER), number)
        wait_until(
            "another zygote",
            lambda ready=ready: len(list_events(shared, EventKind.ZYGOTE_READY, OTHER)) > ready,
            RECOVERY_S,
        )
    assert generation_of(shared.wait_training(HOSTS)).number == before.number
    assert find_worker(shared, OTHER) == worker
    assert is_forked(replace_worker(shared, OTHER))


def test_a_zygote_and_a_forked_worker_end_with_their_agent(shared: TinyJob) -> None:
    zygote, worker = shared.wait_zygote(VICTIM), find_worker(shared, VICTIM)
    parent = psutil.Process(worker).ppid()
    shared.signal(JobComponent.AGENT, VICTIM, signal.SIGKILL)
    for pid in (zygote, worker, parent):
        wait_until("the end of what the agent had", lambda pid=pid: is_gone(pid), RECOVERY_S)
    shared.wait_training(HOSTS)
