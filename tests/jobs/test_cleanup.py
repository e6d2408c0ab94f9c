"""However a job ends, it leaves nothing behind: no process, no contact file, no shared memory."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.generation_follower import RELAY_GRACE_S
from resilient_jax.cluster.job_report import JobComponent, find_pids
from tests.jobs.launched import JOBS, run_launch
from tests.support.agents import run_command
from tests.support.patience import patience, wait_until, watch
from tests.support.tiny_job import CONFIG, ONE_DEVICE, RECOVERY_S, TinyJob

FORMING_S = 8.0
SHORT_FORMING = CONFIG.replace("forming_timeout_s = 20.0", f"forming_timeout_s = {FORMING_S}")
"""For tests that wait until an agent no longer listens for the workers of a world that was left."""
assert SHORT_FORMING != CONFIG


@pytest.fixture(autouse=True)
def _no_shared_memory_stays() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    wait_until("the end of shared memory", lambda: set(os.listdir("/dev/shm")) <= before)


def last_steps(tiny: TinyJob) -> set[int]:
    return {rows[-1]["step"] for rows in tiny.logs().values()}


def test_ctrl_c_ends_all_processes_of_the_job(tmp_path: Path) -> None:
    with TinyJob(tmp_path, 2, options=ONE_DEVICE) as tiny:
        tiny.wait_training(2)
        tiny.job.process.send_signal(signal.SIGINT)
        assert tiny.job.wait(patience(3)) == 130, tiny.job.read_tail()
        tiny.check_nothing_left()
        words = r"\ninterrupted at step \d+, none saved as far as is known: its user pressed Ctrl-C\."
        assert re.search(words, tiny.job.read_output()), tiny.job.read_tail()
        assert "Traceback" not in tiny.job.read_output()
    code, shown = run_command(["status", str(tmp_path / "run")])
    assert (code, "exit code 130 | step " in shown, "its user pressed Ctrl-C" in shown) == (0, True, True), (
        shown
    )


def test_a_notice_to_all_ends_the_job_at_a_step_boundary(tmp_path: Path) -> None:
    with TinyJob(tmp_path, 2, options=ONE_DEVICE) as tiny:
        tiny.wait_training(2)
        tiny.job.process.send_signal(signal.SIGTERM)
        assert tiny.job.wait(patience(6)) == 84, tiny.job.read_tail()
        tiny.check_nothing_left()
        tiny.check_steps()
        assert len(last_steps(tiny)) == 1, "all stop after the same step"
        words = (
            r"\ninterrupted after \d+ steps, none of them saved as far as is known: all hosts got a notice"
        )
        assert re.search(words, tiny.job.read_output()), tiny.job.read_tail()
        kinds = {event.kind for event in tiny.job.read_events()}
        assert not kinds & {"collective.failed", "user.error", "worker.killed"}, tiny.job.read_tail()


def test_when_the_launcher_is_killed_all_processes_of_the_job_end(tmp_path: Path) -> None:
    with TinyJob(tmp_path, 2, options=ONE_DEVICE) as tiny:
        tiny.wait_training(2)
        tiny.job.process.kill()
        tiny.job.process.wait()
        wait_until("the end of all processes", lambda: tiny.job.find_processes() == [])
        # No process was left to remove the contact file, so commands must recognize it as stale.
        code, output = run_command(["status", str(tmp_path / "run")])
        assert code == 2, output
        assert f"found a job whose launcher (process {tiny.job.process.pid}) was killed" in output


def test_when_an_agent_is_killed_all_processes_of_its_host_end(tmp_path: Path) -> None:
    with TinyJob(tmp_path, 3, options=[*ONE_DEVICE, "--host-restart-delay", "-1"]) as tiny:
        report = tiny.wait_training(3)
        assert report.leader is not None
        of_host = list(find_pids(report, JobComponent.HOST, report.leader))
        assert len(of_host) == 3, "agent, worker and coordination service"
        os.kill(of_host[0], signal.SIGKILL)
        wait_until("the end of all on that host", lambda: not set(of_host) & set(tiny.job.find_processes()))
        # The store still has the host's record until its lease ends.
        code, output = run_command(["kill", str(tmp_path / "run"), "agent", report.leader])
        assert code in (0, 2), output
        assert "Traceback" not in output
        assert report.generation is not None
        after = tiny.wait_training(2, after_generation=report.generation.number)
        assert report.leader not in {host.host for host in after.hosts}
        tiny.finish()


def test_a_host_whose_worker_dies_too_often_ends_alone(tmp_path: Path) -> None:
    config = CONFIG.replace("max_restarts = 1000", "max_restarts = 1")
    with TinyJob(tmp_path, 2, config, ONE_DEVICE) as tiny:
        report = tiny.wait_training(2)
        tiny.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        assert report.generation is not None
        report = tiny.wait_training(2, after_generation=report.generation.number)
        tiny.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        words = (
            "[host-1] this host ends: the worker on host-1 died 2 times within 600 s, more often than "
            "max_restarts = 1 allows"
        )
        wait_until("the end of host-1", lambda: words in tiny.job.read_output())
        assert report.generation is not None
        tiny.wait_training(1, after_generation=report.generation.number)
        out = [event for event in tiny.job.read_events() if event.kind == "host.quarantined"]
        assert [event.detail["quarantined"] for event in out] == ["host-1"]
        code, listed = run_command(["hosts", str(tmp_path / "run"), "list"])
        assert (code, listed.startswith("host-1: for ")) == (0, True), listed
        assert "the worker on host-1 died 2 times within 600 s" in listed
        tiny.finish()


def test_a_job_whose_workers_all_die_too_often_ends(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("max_restarts = 1\n")
    command, options = [str(JOBS / "faulty.py"), "killed"], ["--config", str(tmp_path / "job.toml")]
    ended = run_launch(command, tmp_path / "run", options=options)
    assert ended.code == 81, ended.output
    assert ended.worker_starts == 4
    assert ended.last_words == (
        "the job ended: too_few_hosts\nno host is left: host-0 ended with RESTART_BUDGET_EXHAUSTED (81), host-1 ended "
        "with RESTART_BUDGET_EXHAUSTED (81); the output of each is above and in its log\n"
    )
    assert ended.leftovers == []


def test_a_worker_that_keeps_an_array_of_a_world_it_left_is_not_ended_by_it(tmp_path: Path) -> None:
    """The array keeps the world's client, which ends the process when its connection is closed (SIGABRT)."""
    with TinyJob(tmp_path, 2, SHORT_FORMING, ONE_DEVICE, words=["keep"]) as tiny:
        report = tiny.wait_training(2)
        serving = next(status.host for status in report.hosts if status.services)
        tiny.signal(
            JobComponent.COORDINATION_SERVICE, serving, signal.SIGKILL
        )  # else nobody leaves the world
        assert report.generation is not None
        report = tiny.wait_training(2, after_generation=report.generation.number)
        leaks = [
            event.detail["leaked_clients"] for event in tiny.job.read_events() if event.kind == "world.left"
        ]
        assert any(leaks), "the array keeps nothing, so this test shows nothing"
        pids = list(find_pids(report, JobComponent.WORKER, "host-0"))
        # So long the agent listens for an attempt to connect to the world that was left.
        for _ in watch(FORMING_S + RELAY_GRACE_S + 2.0):
            assert list(find_pids(tiny.read_report(), JobComponent.WORKER, "host-0")) == pids


@pytest.mark.full  # several deaths, for a leak that takes hours to hurt
def test_descriptors_of_an_agent_do_not_grow_with_its_workers(tmp_path: Path) -> None:
    def descriptors() -> list[str]:
        links = []
        for name in os.listdir(f"/proc/{agent}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                links.append(re.sub(r"\[\d+\]", "", os.readlink(f"/proc/{agent}/fd/{name}")))
        return sorted(links)

    with TinyJob(tmp_path, 2, SHORT_FORMING, ONE_DEVICE) as tiny:
        report = tiny.wait_training(2)
        (agent,) = find_pids(report, JobComponent.AGENT, "host-1")
        tiny.wait_zygote("host-1")
        at_first = descriptors()
        for _ in range(3):
            assert report.generation is not None
            tiny.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
            report = tiny.wait_training(2, after_generation=report.generation.number)
        # An agent listens for a world's workers for FORMING_S and RELAY_GRACE_S more, for one that has not left it yet.
        try:
            wait_until("the old descriptors' end", lambda: len(descriptors()) <= len(at_first), RECOVERY_S)
        except AssertionError:
            pytest.fail(f"{descriptors()} are left, and there were {at_first}")
        tiny.finish()
