"""Collectives that cannot be aborted: all workers are replaced, and go on from the snapshots in memory."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent, find_pids
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import ANY_STEP, FailPoint
from resilient_jax.protocol.snapshots import SnapshotPhase
from resilient_jax.protocol.worker_report import WorkerState
from tests.support.sharded_job import ShardedJob
from tests.support.tiny_job import CONFIG, CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, RECOVERY_S, TinyJob, protect

HOSTS = tuple(f"host-{index}" for index in range(4))
REPLACING = f'{CONFIG.replace("max_restarts = 1000", "max_restarts = 4")}\nabort = "replace"\n'
"""With fewer restarts than there are replacements, which must not count: the tests kill host-1's worker four times, and
have it replaced three times more."""

Faults = tuple[tuple[JobComponent, str, signal.Signals], ...]


def test_a_replicated_state_is_restored_from_a_snapshot_of_the_first_steps(tmp_path: Path) -> None:
    config = protect(CONFIG_WITHOUT_STANDBYS, interval_steps=1) + 'abort = "replace"\n'
    with TinyJob(tmp_path, 2, options=ONE_DEVICE, config=config, words=["pace=0.3"]) as tiny:
        report = tiny.job.wait_report(
            "a snapshot of the first generation",
            lambda now: any(s.phase is SnapshotPhase.COMMITTED for h in now.hosts for s in h.snapshots),
            RECOVERY_S,
        )
        before = {host.host: host.worker for host in report.hosts}
        tiny.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        assert report.generation is not None
        after = tiny.wait_training(2, report.generation.number)
        assert all(host.worker != before[host.host] for host in after.hosts)
        tiny.finish(more_steps=3)
        restored = [e.detail["step"] for e in tiny.job.read_events() if e.kind is EventKind.SNAPSHOT_RESTORED]
    promised = max(s.id.step for h in report.hosts for s in h.snapshots if s.phase is SnapshotPhase.COMMITTED)
    assert min(map(int, restored)) >= promised


@pytest.mark.full
def test_workers_that_have_the_only_state_outlive_one_that_stops_before_there_is_a_snapshot(
    tmp_path: Path,
) -> None:
    config = CONFIG_WITHOUT_STANDBYS + 'abort = "replace"\n'
    with TinyJob(tmp_path, 3, options=ONE_DEVICE, config=config, words=["pace=0.3"]) as tiny:
        report = tiny.wait_training(3)
        assert report.generation is not None
        before = {host.host: host.worker for host in report.hosts}
        tiny.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        after = tiny.wait_training(3, report.generation.number)
        workers = {host.host: host.worker for host in after.hosts}
        for host in before.keys() - {HOSTS[1]}:
            old, new = before[host], workers[host]
            assert old is not None
            assert new is not None
            assert new.pid == old.pid, f"the worker of {host} had the only state, and was replaced"
        tiny.finish(more_steps=3)
        kinds = {event.kind for event in tiny.job.read_events()}
    assert not kinds & {EventKind.STATE_LOST, EventKind.SNAPSHOT_RESTORED}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedJob]:
    """Yield the job that the tests below break, one after the other; check its invariants after them.

    They come last: the job runs, and takes processor time, until the end of this file.
    """
    with ShardedJob(tmp_path_factory.mktemp("replace"), 4, parity=1, config=REPLACING) as job:
        yield job
        job.finish(more_steps=5)


def lose(job: ShardedJob, faults: Faults) -> None:
    """Cause these faults at once; check that all workers are replaced, and that at most one step is done again."""
    promised = job.promised_step()
    report = job.read_report()
    before, generation = {status.host: status.worker for status in report.hosts}, report.generation
    assert generation is not None
    # Found before the first one is hit: upon that the agents replace the workers of all.
    pids = [(pid, number) for part, host, number in faults for pid in find_pids(report, part, host)]
    assert len(pids) >= len(faults), f"some of these do not run: {faults}"
    for pid, number in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    job.job.release()
    job.wait_protected(4, after_generation=generation.number)
    job.wake_all()
    for status in job.read_report().hosts:
        old, new = before[status.host], status.worker
        assert old is not None
        assert new is not None
        if old.report.state is not WorkerState.RUNNING:
            continue  # it came too late for the world that was left
        assert new.pid != old.pid, f"the worker of {status.host} was in the world that was left"
    went_on = [row["step"] + 1 for row in job.restored() if row["generation"] > generation.number]
    assert min(went_on) >= promised, f"went back to step {min(went_on)}, {promised} was committed"


@pytest.mark.parametrize(
    "faults",
    [
        ((JobComponent.WORKER, "host-2", signal.SIGKILL),),
        ((JobComponent.WORKER, "host-1", signal.SIGSTOP),),
        (
            *((JobComponent.WORKER, host, signal.SIGKILL) for host in HOSTS[:3]),
            (JobComponent.HOST, "host-3", signal.SIGKILL),
        ),
    ],
    ids=["a worker dies", "a worker hangs", "all workers and a host die"],
)
def test_all_workers_are_replaced_after(faults: Faults, job: ShardedJob) -> None:
    job.wait_protected(4)
    lose(job, faults)


@pytest.mark.parametrize("place", [FailPoint.BEFORE_CONNECT, FailPoint.DURING_RESTORE])
def test_all_workers_are_replaced_again_after_a_death_at(place: FailPoint, job: ShardedJob) -> None:
    job.wait_protected(4)
    job.job.hold(place, ["host-1"], ANY_STEP)
    job.signal(JobComponent.WORKER, "host-2", signal.SIGKILL)
    job.job.wait_held(["host-1"], RECOVERY_S)
    lose(job, ((JobComponent.WORKER, "host-1", signal.SIGKILL),))
