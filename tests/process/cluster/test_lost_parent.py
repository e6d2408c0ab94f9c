"""An agent that writes the statuses of others is lost while the job forms: the others form all the same."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobReport, read_job_report
from resilient_jax.cluster.run_directory import HostLog, JobContact, make_log_path
from resilient_jax.events import EventKind
from resilient_jax.protocol.generation import GenerationPhase
from resilient_jax.protocol.worker_report import WorkerState
from resilient_jax.telemetry.event_log import read_events
from tests.benchmarks.paths import JOBS
from tests.support.agents import TOKEN, HandStartedAgent, served_store
from tests.support.patience import wait_until

NUM_HOSTS = 7
COMMAND = [sys.executable, str(Path(__file__).parent / "narrow_tree_agent.py")]
CONFIG = 'standby = "off"\nlease_ttl_s = 60.0\nforming_timeout_s = 60\nquiesce_timeout_s = 60\n'
"""A host whose agent is stopped stays in the job meanwhile."""


class FormingJob:
    """Agents with stub workers.

    Attributes:
        agents: by host.
        parent: a host to which two others report, `children`. Which hosts these are depends on who reports first.
    """

    def __init__(self, work: Path, store: str) -> None:
        self.agents: dict[str, HandStartedAgent] = {}
        self.parent = ""
        self.children: tuple[str, ...] = ()
        self._work = work
        self._store = store
        self._contact = JobContact(job="stub", store=store, token=TOKEN, launcher_pid=os.getpid())
        (work / "job.toml").write_text(CONFIG)

    def start(self, index: int) -> None:
        host = f"host-{index}"
        options = ["--store", self._store, "--job", "stub", "--host-name", host, "--address", "127.0.0.1"]
        options += ["--num-hosts", str(NUM_HOSTS), "--run-dir", str(self._work / host)]
        options += ["--config", str(self._work / "job.toml"), "--platform", "cpu", "--devices-per-host", "1"]
        options += ["--no-zygote"]  # it would import JAX, which the script does without
        script = str(JOBS / "control_stub_worker.py")
        self.agents[host] = HandStartedAgent([*options, script], self._work / f"{host}.out", command=COMMAND)

    def report(self) -> JobReport:
        return asyncio.run(read_job_report(self._contact))

    def wait_hosts(self, count: int) -> None:
        """Wait until so many hosts have a worker that waits for the job to form: for one without, all would wait."""

        def have_joined() -> bool:
            workers = [status.worker for status in self.report().hosts]
            return sum(w is not None and w.report.state is WorkerState.IDLE for w in workers) == count

        wait_until(f"{count} hosts have joined", have_joined)

    def wait_parent(self) -> None:
        """Wait until a host has two children."""

        def has_two() -> bool:
            said = {
                host: re.findall("^parent: (.*)$", a.output(), re.MULTILINE)
                for host, a in self.agents.items()
            }
            for status in self.report().hosts:
                children = [host for host, parents in said.items() if parents[-1:] == [status.agent.endpoint]]
                if len(children) == 2:
                    self.parent, self.children = status.host, tuple(children)
            return bool(self.parent)

        wait_until("two hosts report to a third", has_two)

    def wait_formed(self, hosts: set[str]) -> None:
        def have_formed() -> bool:
            found = {
                s.host
                for s in self.report().hosts
                if s.worker is not None and s.worker.report.place.has_formed
            }
            return found >= hosts

        wait_until(f"{hosts} formed", have_formed)

    def wait_trains(self, num_members: int) -> JobReport:
        def trains() -> bool:
            found = self.report().generation
            return (
                found is not None
                and found.phase is GenerationPhase.ACTIVE
                and len(found.membership.members) == num_members
            )

        wait_until(f"{num_members} hosts train", trains)
        return self.report()

    def count_events(self, host: str, kind: EventKind) -> int:
        events = read_events(make_log_path(self._work / host, host, HostLog.EVENTS))
        return sum(event.kind is kind for event in events)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FormingJob]:
    """All hosts but one, which know their parents."""
    with served_store() as store:
        running = FormingJob(tmp_path, store)
        try:
            running.start(0)
            running.wait_hosts(1)  # it leads
            for index in range(1, NUM_HOSTS - 1):
                running.start(index)
            running.wait_hosts(NUM_HOSTS - 1)
            running.wait_parent()
            yield running
        finally:
            for agent in running.agents.values():
                agent.kill()


def test_a_parent_that_is_stopped_costs_no_generation(job: FormingJob) -> None:
    job.agents[job.parent].process.send_signal(signal.SIGSTOP)
    job.start(6)
    job.wait_formed({f"host-{index}" for index in range(NUM_HOSTS)} - {job.parent})
    before = job.report().generation
    job.agents[job.parent].process.send_signal(signal.SIGCONT)
    after = job.wait_trains(NUM_HOSTS).generation
    assert before is not None
    assert after is not None
    assert before.number == after.number == 1
    assert [job.count_events(child, EventKind.TREE_PARENT_LOST) for child in job.children] == [1, 1]


def test_a_parent_that_is_killed_costs_the_generation_of_its_own_loss(job: FormingJob) -> None:
    job.agents[job.parent].kill()
    job.start(6)
    after = job.wait_trains(NUM_HOSTS - 1).generation
    assert after is not None
    assert after.number <= 2
    assert job.parent not in [member.host for member in after.membership.members]
