"""After training: scripts that still save, and hosts that still need the store that another host serves."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from resilient_jax.cli.options import read_versions
from resilient_jax.cluster import worker_supervisor
from resilient_jax.cluster.agent import Agent
from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.config import JobConfig
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, JobName
from resilient_jax.jax_runtime.worker_environment import make_worker_environment
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import GenerationPhase, JobOutcome, JobOutcomeKind
from resilient_jax.store.interface import NO_LEASE
from resilient_jax.store.memory import MemoryStore
from resilient_jax.transport.credentials import Credentials
from tests.jobs.launched import make_environment
from tests.support.agents import TOKEN, start_agents
from tests.support.paths import SCRIPTS
from tests.support.patience import patience, wait_until, watch
from tests.support.patient_job import PatientJob
from tests.support.tiny_job import LEASE, newest_step, read_logs

SCRIPT = SCRIPTS / "afterwards.py"
LAST_STEP = 2
LEASE_S = 1.0


def launch(work: Path, hosts: int, config: str = "", words: Sequence[str] = ()) -> PatientJob:
    (work / "job.toml").write_text(config)
    return PatientJob(
        [str(SCRIPT), str(work), *words],
        num_hosts=hosts,
        run_directory=work / "run",
        options=["--devices-per-host", "1", "--config", str(work / "job.toml")],
        environment=make_environment(),
    )


def wait_working(work: Path, host: str) -> int:
    """Wait until the script on this host works after training; return its process id."""
    file = work / f"works-{host}"
    wait_until(f"{host} works on", lambda: file.exists() and file.read_text() != "")
    return int(file.read_text())


def let_end(work: Path, host: str) -> None:
    (work / f"end-{host}").touch()


def test_a_crash_of_pythons_shutdown_is_no_failure_of_the_script(tmp_path: Path) -> None:
    with launch(tmp_path, 2, words=["crash"]) as job:
        for host in ("host-0", "host-1"):
            wait_working(tmp_path, host)
            let_end(tmp_path, host)
        assert job.wait(patience(6)) == 0, job.read_tail()
        output, events = job.read_output(), job.read_events()
    codes = [event.detail["exit_code"] for event in events if event.kind is EventKind.WORKER_EXITED]
    assert codes == [-signal.SIGSEGV] * 2
    for host in ("host-0", "host-1"):
        assert f"{host}: Python's shutdown was ended by SIGSEGV; the script had come to its end" in output


@pytest.mark.parametrize(("victim", "code"), [("host-0", 128 + signal.SIGKILL), ("host-1", 0)])
def test_a_job_is_done_if_the_script_that_saves_comes_to_its_end_and_another_one_is_killed(
    tmp_path: Path, victim: str, code: int
) -> None:
    """By the documentation it is that of the host with index 0."""
    other = "host-0" if victim == "host-1" else "host-1"
    with launch(tmp_path, 2) as job:
        wait_working(tmp_path, other)
        os.kill(wait_working(tmp_path, victim), signal.SIGKILL)
        let_end(tmp_path, other)
        assert job.wait(patience(6)) == code, job.read_tail()
        output = job.read_output()
    assert f"[{other}] saved" in output
    assert "training is done, but the script was ended by SIGKILL before its end" in output
    assert (f"user_error on {victim}" in output) == (code != 0)


def test_a_job_has_failed_if_all_scripts_are_killed_after_training(tmp_path: Path) -> None:
    with launch(tmp_path, 2) as job:
        pids = [wait_working(tmp_path, host) for host in ("host-0", "host-1")]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert job.wait(patience(6)) == 128 + signal.SIGKILL, job.read_tail()
        assert "training is done, but the script was ended by SIGKILL before its end" in job.read_output()
        assert "the job ended: user_error on host-0, host-1\ntraining was done, but then" in job.read_output()


def is_done(report: JobReport, host: str) -> bool:
    workers = {status.host: status.worker for status in report.hosts}
    worker = workers.get(HostName(host))
    return worker is not None and worker.report.is_done


def test_a_host_that_dies_when_it_is_done_comes_back_for_the_others(tmp_path: Path) -> None:
    """The other host needs it: with fewer than `min_hosts` hosts training does not resume."""
    with launch(tmp_path, 2, f"min_hosts = 2\n{LEASE}") as job:
        job.hold(FailPoint.AFTER_COMMIT, ["host-1"], LAST_STEP)
        job.wait_held(["host-1"])
        job.wait_report("host-0 is done", lambda now: is_done(now, "host-0"))
        job.kill(JobComponent.WORKER, "host-0")
        job.wait_report(
            "the death is known",
            lambda now: now.generation is not None and now.generation.phase is not GenerationPhase.ACTIVE,
        )
        job.release()
        for host in ("host-0", "host-1"):
            wait_working(tmp_path, host)
            let_end(tmp_path, host)
        assert job.wait(patience(6)) == 0, job.read_tail()
        starts = [event for event in job.read_events() if event.kind is EventKind.WORKER_STARTED]
        assert [event.host for event in starts].count("host-0") == 2


def test_a_job_is_done_if_a_host_dies_when_it_is_done_and_the_others_come_to_the_end(
    tmp_path: Path,
) -> None:
    """Either host may be the leader; the exit code is, as above, that of the script of index 0."""
    with launch(tmp_path, 2, "lease_ttl_s = 60.0\n") as job:
        leader = job.wait_report("a leader", lambda now: now.leader is not None).leader
        assert leader is not None
        victim = "host-0" if leader == "host-1" else "host-1"
        job.hold(FailPoint.AFTER_COMMIT, [leader], LAST_STEP)
        job.wait_report("it is done", lambda now: is_done(now, victim))
        job.kill(JobComponent.AGENT, victim, signal.SIGSTOP)
        job.kill(JobComponent.WORKER, victim)
        job.release()
        wait_working(tmp_path, leader)
        job.kill(JobComponent.AGENT, victim, signal.SIGCONT)
        let_end(tmp_path, leader)
        code = 128 + signal.SIGKILL if victim == "host-0" else 0
        assert job.wait(patience(6)) == code, job.read_tail()
        assert "training is done, but the script was ended by SIGKILL before its end" in job.read_output()
        assert not (tmp_path / f"works-{victim}").exists(), "nothing after `run` without what it trained"


def test_ctrl_c_ends_scripts_that_still_work(tmp_path: Path) -> None:
    with launch(tmp_path, 2) as job:
        for host in ("host-0", "host-1"):
            wait_working(tmp_path, host)
        job.process.send_signal(signal.SIGINT)
        assert job.wait(patience(6)) == 130, job.read_tail()
        assert job.find_processes() == []
        assert "interrupted after training was done, while scripts still worked" in job.read_output()


def test_a_script_may_work_without_a_time_limit_after_training_and_this_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_supervisor, "FINISH_REMINDER_INTERVAL_S", 0.2)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if sum("the script still works" in line for line in said) == 3:
            let_end(tmp_path, "host-0")

    async def main() -> JobOutcome:
        settings = AgentSettings(
            job=JobName("afterwards"),
            host=HostName("host-0"),
            address="127.0.0.2",
            command=(str(SCRIPT), str(tmp_path)),
            environment={
                **os.environ,
                **make_worker_environment(
                    platform="cpu",
                    devices_per_host=1,
                    cache_dir=str(tmp_path / "cache"),
                    collective_timeout_s=60.0,
                    base=os.environ,
                ),
            },
            devices_per_host=1,
            num_hosts=1,
            versions=read_versions(),
            credentials=Credentials(TOKEN),
            config=JobConfig(),
            run_directory=tmp_path,
        )
        async with MemoryStore() as store:
            outcome = await Agent(settings, store, say).run()
            _, records = await store.range("/")
            # In a store that outlives the job nothing of it is left for good.
            assert records
            assert all(record.lease != NO_LEASE for record in records)
            return outcome

    assert asyncio.run(main()).kind is JobOutcomeKind.DONE
    assert "saved" in (tmp_path / "host-0.log").read_text()


def test_the_store_is_served_until_the_last_host_has_ended(tmp_path: Path) -> None:
    serving, other = start_agents(tmp_path, [str(SCRIPT), str(tmp_path)], config=f"lease_ttl_s = {LEASE_S}\n")
    with serving, other:
        wait_working(tmp_path, "host-0")
        wait_working(tmp_path, "host-1")
        let_end(tmp_path, "host-0")
        serving.wait_said("serving the store until these have ended: host-1")
        for _ in watch(3 * LEASE_S):
            assert serving.process.poll() is None
        let_end(tmp_path, "host-1")
        assert (other.wait(), serving.wait()) == (0, 0), serving.output() + other.output()
        assert "training stops here" not in other.output()


def test_a_host_with_an_exhausted_restart_budget_still_serves_the_store(tmp_path: Path) -> None:
    config = f"lease_ttl_s = {LEASE_S}\nmax_restarts = 0\n"
    serving, other = start_agents(tmp_path, [str(SCRIPT.with_name("tiny.py")), str(tmp_path)], config=config)
    with serving, other:
        wait_until("both train", lambda: len(read_logs(tmp_path)) == 2)
        (worker,) = (name for name in read_logs(tmp_path) if name.startswith("host-0-"))
        os.kill(int(worker.removeprefix("host-0-")), signal.SIGKILL)
        serving.wait_said("serving the store until these have ended: host-1")
        (tmp_path / "stop").write_text(str(newest_step(tmp_path) + 20))
        assert other.wait() == 0, other.output()
        assert serving.wait() == 81, serving.output()
