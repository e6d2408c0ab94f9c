"""A standby in a spare seat of the world takes the place of a worker that dies, in the very next generation.

The job that the last tests break has a spare host, too, and tells JAX's coordination service of deaths, as on a GPU.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import Generation, WorldChange
from resilient_jax.protocol.host_status import StandbyStatus
from resilient_jax.worker.unwinding_delay import UNWINDING_GRACE_S
from tests.support.kills import generation_of
from tests.support.patience import wait_until
from tests.support.process_ends import read_name
from tests.support.sharded_job import ShardedJob
from tests.support.tiny_job import CONFIG, ONE_DEVICE, RECOVERY_S, TinyJob

HOSTS = 3
MAX_REFORMS = 2
SPARE = "host-3"
SEATS = f'{CONFIG}standby = "seat"\n'


def wait_seated(tiny: TinyJob, *hosts: str) -> dict[str, StandbyStatus]:
    """Wait until all hosts train and these hosts' standbys are ready in seats of the world; return their statuses."""

    def find(report: JobReport) -> dict[str, StandbyStatus]:
        return {
            status.host: status.standby
            for status in report.hosts
            if status.standby is not None
            and status.standby.worker is not None
            and status.standby.worker.report.place.world == generation_of(report).membership.world
        }

    tiny.wait_training(HOSTS)
    report = tiny.wait_report("standbys in their seats", lambda report: set(hosts) <= set(find(report)))
    return find(report)


@pytest.mark.full  # a pair: see test_replace.py
def test_where_all_workers_are_replaced_the_standbys_that_are_left_go_on_in_the_same_world(
    tmp_path: Path,
) -> None:
    """The state is sharded, so that the lost host's part is decoded from parity."""
    # The lost host stays away, so that the others are seen without it, however long their first step takes.
    options = ("--host-restart-delay", "-1")
    with ShardedJob(tmp_path, HOSTS, parity=1, config=f'{SEATS}abort = "replace"\n', options=options) as tiny:
        tiny.wait_protected(HOSTS)
        standbys = wait_seated(tiny, *(f"host-{index}" for index in range(HOSTS)))
        before = tiny.read_report()
        victim = next(name for name in standbys if name != before.leader)
        tiny.signal(JobComponent.HOST, victim, signal.SIGKILL)
        after = tiny.wait_training(HOSTS - 1, generation_of(before).number)
        assert list_formed(tiny, generation_of(before))[0] == (HOSTS - 1, WorldChange.GROW)
        assert generation_of(after).membership.world == generation_of(before).membership.world
        pids = read_pids(after)
        members = [member.host for member in generation_of(after).membership.members]
        assert {host: pids[host] for host in members} == {host: standbys[host].pid for host in members}
        tiny.finish(more_steps=5)


@pytest.mark.full
def test_a_host_whose_script_cannot_run_twice_has_its_next_worker_from_its_zygote(tmp_path: Path) -> None:
    def list_failed() -> list[Event]:
        return [e for e in tiny.job.read_events() if e.kind is EventKind.STANDBY_FAILED]

    with TinyJob(tmp_path, 2, SEATS, options=ONE_DEVICE, words=["lock"]) as tiny:
        before = generation_of(tiny.wait_training(2))
        wait_until("standbys that have failed", lambda: len(list_failed()) >= 2, RECOVERY_S)
        assert {(e.host, e.detail["retried"]) for e in list_failed()} == {
            ("host-0", False),
            ("host-1", False),
        }
        assert all("BlockingIOError" in str(e.detail["reason"]) for e in list_failed())
        tiny.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        worker = read_pids(tiny.wait_training(2, before.number))["host-1"]
        assert read_name(psutil.Process(worker).ppid()) == "worker-parent"
        tiny.finish(more_steps=5)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    """Yield the job that the tests below break, one after the other; check its invariants after them.

    They come last: the job runs, and takes processor time, until the end of this file.
    """
    options, config = (*ONE_DEVICE, "--spares", "1"), f'{SEATS}live_nodes = "on"\n'
    with TinyJob(tmp_path_factory.mktemp("seats"), HOSTS, config, options) as tiny:
        yield tiny
        tiny.finish()


def list_formed(tiny: TinyJob, after: Generation) -> list[tuple[float | str, float | str]]:
    """Return how many hosts each later generation had, and how it was formed."""
    return [
        (event.detail["hosts"], event.detail["change"])
        for event in tiny.job.read_events()
        if event.kind is EventKind.GENERATION_PHASE
        and event.detail["phase"] == "form"
        and (event.generation or 0) > after.number
    ]


def has_given_collective_up(tiny: TinyJob, before: Generation) -> bool:
    """Return whether a survivor left its collective by force, as it may on a busy machine: that ends its world."""
    events = tiny.job.read_events()
    began_s = min(
        event.monotonic_s
        for event in events
        if event.kind is EventKind.GENERATION_PHASE
        and event.detail["phase"] == "quiesce"
        and (event.generation or 0) > before.number
    )
    left_s = max(
        event.monotonic_s
        for event in events
        if event.kind is EventKind.WORKER_IDLE and event.generation == before.number
    )
    return left_s - began_s >= UNWINDING_GRACE_S


def read_pids(report: JobReport) -> dict[str, int]:
    return {status.host: status.worker.pid for status in report.hosts if status.worker is not None}


def kill_worker(place: str, victim: str, shared: TinyJob) -> tuple[JobReport, StandbyStatus, JobReport]:
    """Kill a worker whose standby is in its seat; return the report before, the standby, and the report afterwards."""
    standby = wait_seated(shared, victim)[victim]
    assert os.sched_getscheduler(standby.pid) == os.SCHED_IDLE
    before = shared.read_report()
    match place:
        case "in a collective":
            shared.hold(FailPoint.BEFORE_REDUCE, ["host-2"])
        case "between steps":
            shared.hold(FailPoint.AFTER_COMMIT, ["host-2", victim])
        case _:
            shared.wait_compiling([victim])
    shared.signal(JobComponent.WORKER, victim, signal.SIGKILL)
    shared.job.release()
    return before, standby, shared.wait_training(HOSTS, generation_of(before).number)


@pytest.mark.parametrize(
    ("place", "victim"),
    [
        ("in a collective", "host-1"),
        ("between steps", "host-0"),
        pytest.param("while compiling", "host-1", marks=pytest.mark.full),
    ],
)
def test_the_generation_after_a_death_has_all_hosts_with_the_standby_in_place(
    place: str, victim: str, shared: TinyJob
) -> None:
    before, standby, after = kill_worker(place, victim, shared)
    for _ in range(MAX_REFORMS):
        if not has_given_collective_up(shared, generation_of(before)):
            break
        before, standby, after = kill_worker(place, victim, shared)
    assert list_formed(shared, generation_of(before)) == [(HOSTS, WorldChange.GROW)]
    assert generation_of(after).membership.world == generation_of(before).membership.world
    assert read_pids(after) == read_pids(before) | {victim: standby.pid}
    assert os.sched_getscheduler(standby.pid) == os.SCHED_OTHER


@pytest.mark.full
def test_a_worker_whose_standby_is_gone_leaves_its_place_to_the_spare_and_spares_when_it_is_back(
    shared: TinyJob,
) -> None:
    standby = wait_seated(shared, "host-2")["host-2"]
    before = generation_of(shared.wait_report("a spare that is ready", lambda now: is_ready(now, SPARE)))
    os.kill(standby.pid, signal.SIGKILL)
    shared.wait_report("its end", lambda now: all(s.standby != standby for s in now.hosts))
    shared.signal(JobComponent.WORKER, "host-2", signal.SIGKILL)
    after = generation_of(shared.wait_training(HOSTS, before.number))
    assert list_formed(shared, before) == [(HOSTS, WorldChange.GROW)]
    assert {member.host for member in after.membership.members} == {"host-0", "host-1", SPARE}
    shared.wait_report("its worker in a seat", lambda now: is_ready(now, "host-2"))
    wait_seated(shared, SPARE)


def is_ready(report: JobReport, host: str) -> bool:
    """Return whether the worker of this host has taken a seat of the world."""
    workers = [status.worker for status in report.hosts if status.host == host and status.worker]
    return any(worker.report.place.world == generation_of(report).membership.world for worker in workers)
