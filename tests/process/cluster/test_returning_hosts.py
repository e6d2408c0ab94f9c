"""A host that comes back to a healthy job never ends it, however its agent ends."""

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent, find_pids
from tests.process.cluster.gated_job import GatedJob


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
    # Not the leader, which needs descriptors for more than its worker.
    host, other = ("host-1", "host-0") if report.leader == "host-0" else ("host-0", "host-1")
    (agent,) = find_pids(report, JobComponent.AGENT, host)
    limits = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (3, limits[1]))
    gated.job.kill(JobComponent.WORKER, host, signal.SIGKILL)
    refused = f"{host}: no worker could be started: [Errno 24] Too many open files; trying again in "
    for pause in ("1 s", "2 s", "4 s"):
        gated.wait_said(refused + pause)
    gated.wait_members(other)
    resource.prlimit(agent, resource.RLIMIT_NOFILE, limits)
    gated.wait_members("host-0", "host-1")
    after = gated.job.read_report()
    assert after is not None
    assert list(find_pids(after, JobComponent.AGENT, host)) == [agent], "it lived on"
