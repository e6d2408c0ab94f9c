"""The workers of `launch` are forked from one zygote, whose death costs a job nothing."""

import os
import signal
from pathlib import Path

import psutil

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.events import Event, EventKind
from tests.support.patience import wait_until
from tests.support.process_ends import read_name
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, RECOVERY_S, TinyJob

HOSTS = 2
VICTIM = "host-1"


def read_workers(report: JobReport) -> dict[str, int]:
    return {str(status.host): status.worker.pid for status in report.hosts if status.worker is not None}


def test_workers_outlive_the_zygote_and_a_host_that_loses_its_worker_has_another_zygote(
    tmp_path: Path,
) -> None:
    def list_events(kind: EventKind) -> list[Event]:
        return [event for event in tiny.job.read_events() if event.kind is kind]

    def is_forked(pid: int) -> bool:
        return read_name(psutil.Process(pid).ppid()) == "worker-parent"

    with TinyJob(tmp_path, HOSTS, CONFIG_WITHOUT_STANDBYS, options=ONE_DEVICE) as tiny:
        before = tiny.wait_training(HOSTS)
        assert all(map(is_forked, read_workers(before).values()))
        (started,) = list_events(EventKind.ZYGOTE_STARTED)
        os.kill(int(started.detail["pid"]), signal.SIGKILL)
        wait_until(
            "zygotes of the hosts", lambda: len(list_events(EventKind.ZYGOTE_READY)) == 1 + HOSTS, RECOVERY_S
        )
        report = tiny.wait_training(HOSTS)
        assert before.generation is not None
        assert report.generation is not None
        assert report.generation.number == before.generation.number
        assert read_workers(report) == read_workers(before)
        tiny.signal(JobComponent.WORKER, VICTIM, signal.SIGKILL)
        after = read_workers(tiny.wait_training(HOSTS, report.generation.number))
        assert after[VICTIM] != read_workers(before)[VICTIM]
        assert all(map(is_forked, after.values()))
        assert list_events(EventKind.WORKER_NOT_FORKED) == []
        tiny.finish()
