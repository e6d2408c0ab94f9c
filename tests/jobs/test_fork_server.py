"""The workers of `launch` are forked from one process, whose death costs a job nothing that was committed."""

import os
import signal
from pathlib import Path

from resilient_jax.cluster.job_report import JobReport
from resilient_jax.events import EventKind
from resilient_jax.protocol.snapshots import SnapshotPhase
from tests.support.process_ends import list_children
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, TinyJob, protect

HOSTS = 2


def find_server(tiny: TinyJob) -> int:
    (started,) = (e for e in tiny.job.read_events() if e.kind is EventKind.FORK_SERVER_STARTED)
    return int(started.detail["pid"])


def have_snapshots(report: JobReport) -> bool:
    return all(any(s.phase is SnapshotPhase.COMMITTED for s in host.snapshots) for host in report.hosts)


def test_when_the_fork_server_dies_all_workers_go_on_from_memory_as_processes_of_their_own(
    tmp_path: Path,
) -> None:
    with TinyJob(tmp_path, HOSTS, protect(CONFIG_WITHOUT_STANDBYS, 1), options=ONE_DEVICE) as tiny:
        tiny.wait_training(HOSTS)
        before = tiny.wait_report("a snapshot of every host", have_snapshots)
        server = find_server(tiny)
        workers = {status.worker.pid for status in before.hosts if status.worker is not None}
        assert workers <= set(list_children(server))
        assert before.generation is not None
        os.kill(server, signal.SIGKILL)
        after = tiny.wait_training(HOSTS, before.generation.number)
        assert workers.isdisjoint(s.worker.pid for s in after.hosts if s.worker is not None)
        told = [e.detail["why"] for e in tiny.job.read_events() if e.kind is EventKind.WORKER_NOT_FORKED]
        assert told == ["the fork server: it has ended"] * HOSTS
        tiny.finish()
