"""A host that comes back to a healthy job never ends it, however its agent ends."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from resilient_jax.protocol.records import GenerationPhase
from tests.benchmarks.paths import JOBS
from tests.support.patience import wait_until
from tests.support.patient_job import PatientJob

STUB = str(JOBS / "control_stub_worker.py")
GATE = """
if [ -e "$1" ]; then exit "$(cat "$1")"; fi
shift
exec "$@"
"""
"""Stands before each agent's command: the agent ends with the code in a file of its host, if there is one."""


class GatedJob:
    """`launch` of two hosts with stub workers, whose agents end at their start with a code that a test chooses."""

    def __init__(self, work: Path) -> None:
        self._work = work
        (work / "gate.sh").write_text(GATE)
        (work / "job.toml").write_text(
            'standby = "off"\nlease_ttl_s = 2.0\nmin_hosts = 1\nmax_restarts = 1\n'
        )
        sites = [
            f'[[sites]]\naddress = "127.0.0.{index + 2}"\n'
            f'command_prefix = ["sh", "{work}/gate.sh", "{work}/host-{index}.code"]\n'
            for index in range(2)
        ]
        (work / "sites.toml").write_text("".join(sites))
        options = ["--devices-per-host", "1", "--host-restart-delay", "0"]
        options += ["--config", str(work / "job.toml"), "--sites", str(work / "sites.toml")]
        self.job = PatientJob([STUB], num_hosts=2, run_directory=work / "run", options=options)

    def refuse(self, host: str, code: int) -> None:
        """Have the host's next agents end with this code."""
        (self._work / "code").write_text(str(code))
        os.replace(self._work / "code", self._work / f"{host}.code")

    def let_in(self, host: str) -> None:
        """Have the host's next agent start."""
        (self._work / f"{host}.code").unlink()

    def wait_members(self, *hosts: str) -> None:
        """Wait until these hosts train."""

        def train() -> bool:
            report: JobReport | None = self.job.read_report()
            generation = report.generation if report is not None else None
            assert self.job.exit_code() is None, self.job.read_tail()
            return (
                generation is not None
                and generation.phase is GenerationPhase.ACTIVE
                and sorted(member.host for member in generation.members) == sorted(hosts)
            )

        wait_until(f"{hosts} train", train)

    def wait_said(self, words: str) -> None:
        """Wait until `launch` has printed these words; fail if it ends."""

        def is_said() -> bool:
            said = words in self.job.read_output()
            assert said or self.job.exit_code() is None, self.job.read_tail()
            return said

        wait_until(f"{words!r} is printed", is_said)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[GatedJob]:
    gated = GatedJob(tmp_path)
    with gated.job:
        yield gated


def test_a_host_that_comes_back_is_tried_again_whatever_its_agent_ends_with(gated: GatedJob) -> None:
    gated.wait_members("host-0", "host-1")
    gated.refuse("host-1", 2)
    gated.job.kill(JobComponent.AGENT, "host-1", signal.SIGKILL)
    ends = {
        2: "its agent ended with USAGE (2)",
        83: "its agent ended with JOIN_REFUSED (83)",
        89: "its agent ended with INTERNAL_ERROR (89)",
        1: "its agent exited with code 1",
    }
    for code, words in ends.items():
        gated.refuse("host-1", code)
        gated.wait_said(f"[host-1] {words}; its output is above. The job goes on; trying again in ")
    gated.wait_members("host-0")
    gated.let_in("host-1")
    gated.wait_members("host-0", "host-1")


def test_a_host_that_never_came_ends_the_job_with_its_agents_code(tmp_path: Path) -> None:
    (tmp_path / "host-1.code").write_text("83")
    gated = GatedJob(tmp_path)
    with gated.job:
        assert gated.job.wait() == 83, gated.job.read_tail()
        assert "no host is left: " in gated.job.read_output()
        assert "host-1 ended with JOIN_REFUSED (83)" in gated.job.read_output()


def test_a_worker_that_cannot_be_started_for_a_while_costs_its_host_no_restarts(gated: GatedJob) -> None:
    gated.wait_members("host-0", "host-1")
    report = gated.job.read_report()
    assert report is not None
    (agent,) = find_pids(report, JobComponent.AGENT, "host-1")
    limits = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (3, limits[1]))
    gated.job.kill(JobComponent.WORKER, "host-1", signal.SIGKILL)
    refused = "host-1: no worker could be started: [Errno 24] Too many open files; trying again in "
    for pause in ("1 s", "2 s", "4 s"):
        gated.wait_said(refused + pause)
    gated.wait_members("host-0")
    resource.prlimit(agent, resource.RLIMIT_NOFILE, limits)
    gated.wait_members("host-0", "host-1")
    after = gated.job.read_report()
    assert after is not None
    assert list(find_pids(after, JobComponent.AGENT, "host-1")) == [agent], "it lived on"
