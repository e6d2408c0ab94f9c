"""Commands that run anywhere see the logs and events of all hosts, and end processes of a host, by agents' ports."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from resilient_jax.cluster.agent_calls import send_signal
from resilient_jax.cluster.agent_messages import READ_LOG, SERVICE, ReadLog
from resilient_jax.cluster.job_report import JobComponent, JobReport, read_job_report
from resilient_jax.cluster.run_directory import HostLog, JobContact
from resilient_jax.errors import ExitCode, MessageError, PeerError, Unauthenticated
from resilient_jax.events import EventKind
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.telemetry.event_log import read_events
from resilient_jax.transport.channel import Channel
from resilient_jax.transport.credentials import TOKEN_VARIABLE, Credentials
from tests.support.agents import COMMAND, TOKEN, HandStartedAgent, run_command, served_store
from tests.support.patience import patience, wait_until

HOSTS = ("host-0", "host-1")
CONFIG = "lease_ttl_s = 60.0\nmax_restarts = 1000\nrestart_backoff_s = 0.0\n"
"""A host whose agent a test stops stays in the job meanwhile."""
STUB = """\
import os, time
print("worker", os.getpid(), flush=True)
time.sleep(1000)
"""


class StubJob:
    """Agents, each with a run folder and an address of its own, whose workers never get to `rj.run`."""

    def __init__(self, work: Path, store: str) -> None:
        self.where = ("--store", store, "--job", "stub")
        self.work = work
        (work / "job.toml").write_text(CONFIG)
        (work / "stub.py").write_text(STUB)
        self._contact = JobContact(job="stub", store=store, token=TOKEN, launcher_pid=os.getpid())
        self.agents = {host: self._start(host, f"127.0.1.{index + 2}") for index, host in enumerate(HOSTS)}

    def _start(self, host: str, address: str) -> HandStartedAgent:
        options = ["--host-name", host, "--address", address, "--num-hosts", str(len(HOSTS))]
        options += ["--run-dir", str(self.work / host), "--config", str(self.work / "job.toml")]
        options += ["--platform", "cpu", "--devices-per-host", "1", str(self.work / "stub.py")]
        return HandStartedAgent([*self.where, *options], self.work / f"{host}.out")

    def run(self, command: str, *words: str) -> tuple[int, str]:
        """Run a command that finds the job by its store; return the exit code and the output."""
        return run_command([command, *self.where, *words], {TOKEN_VARIABLE: TOKEN})

    @contextlib.contextmanager
    def follow(self, command: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command that follows the logs of the job, with its output in a file."""
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*COMMAND, command, *self.where, "-f"],
                env={**os.environ, TOKEN_VARIABLE: TOKEN},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def report(self) -> JobReport:
        return asyncio.run(read_job_report(self._contact))

    def host(self, name: str) -> HostStatus:
        return next(status for status in self.report().hosts if status.host == name)

    def worker_pid(self, host: str) -> int:
        """Return the process of a host's worker, which has printed its line, once it runs."""
        found: list[int] = []

        def has_printed() -> bool:
            worker = self.host(host).worker
            found[:] = [worker.pid] if worker is not None and worker.exit_code is None else []
            return bool(found) and f"worker {found[0]}\n" in (self.work / host / f"{host}.log").read_text()

        wait_until(f"a worker on {host}", has_printed)
        return found[0]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubJob]:
    with served_store() as store:
        running = StubJob(tmp_path_factory.mktemp("job"), store)
        try:
            wait_until("both hosts", lambda: len(running.report().hosts) == len(HOSTS))
            yield running
        finally:
            for agent in running.agents.values():
                agent.kill()


def test_logs_and_events_of_all_hosts_are_read_from_anywhere(job: StubJob) -> None:
    pids = {host: job.worker_pid(host) for host in HOSTS}
    code, shown = job.run("logs", "-n", "1")
    assert (code, shown) == (0, "".join(f"[{host}] worker {pid}\n" for host, pid in pids.items()))
    code, shown = job.run("events")
    times = [line.split(" ")[0] for line in shown.splitlines()]
    assert times == sorted(times)
    for host, agent in job.agents.items():
        assert f"{host} agent.started pid={agent.process.pid}\n" in shown
    assert job.run("logs", "--host", "host-7") == (
        ExitCode.USAGE,
        "resilient-jax: --host host-7: found no such host, expected one of: host-0, host-1\n",
    )


def test_a_worker_is_killed_from_anywhere_and_what_follows_is_seen(job: StubJob, tmp_path: Path) -> None:
    before = job.worker_pid("host-1")
    with job.follow("logs", tmp_path / "shown") as follower:
        wait_until("the line of the worker", lambda: f"[host-1] worker {before}\n" in read(tmp_path))
        code, shown = job.run("kill", "worker", "host-1")
        assert (code, shown) == (0, f"SIGKILL to worker on host-1: process {before}\n")
        wait_until("its end", lambda: not psutil.pid_exists(before))
        after = job.worker_pid("host-1")
        wait_until("the line of the next", lambda: f"[host-1] worker {after}\n" in read(tmp_path))
        follower.send_signal(signal.SIGINT)
        assert follower.wait(patience(3)) == ExitCode.INTERRUPTED
    assert read(tmp_path).count(f"[host-1] worker {before}\n") == 1
    assert "Traceback" not in read(tmp_path)
    _, shown = job.run("events", "--host", "host-1")
    assert f"host-1 signal.ordered component=worker signal=SIGKILL pids={before}\n" in shown
    assert f"host-1 worker.started pid={after} " in shown


def read(folder: Path) -> str:
    """Return what a follower has printed."""
    return (folder / "shown").read_text()


def test_a_host_whose_agent_is_stopped_is_named_beside_what_the_others_answer(
    job: StubJob, tmp_path: Path
) -> None:
    pid, worker = job.agents["host-1"].process.pid, job.worker_pid("host-1")
    with job.follow("events", tmp_path / "shown"):
        wait_until("the first events", lambda: "host-1 agent.started" in read(tmp_path))
        code, shown = job.run("kill", "agent", "host-1", "--stop")
        assert (code, shown) == (0, f"SIGSTOP to agent on host-1: process {pid}\n")
        silent = f"resilient-jax: host host-1: its agent (process {pid}) did not answer: "
        try:
            wait_until("the notice", lambda: silent in read(tmp_path))
            code, shown = job.run("kill", "worker", "host-1")
            assert code == ExitCode.USAGE
            assert shown.startswith(silent)
            assert shown.endswith("On it `kill -KILL PROCESS` does the same\n")
            assert psutil.pid_exists(worker)
            code, shown = job.run("kill", "worker", "host-0")
            assert code == 0, shown
            wait_until("an event of the other", lambda: "host-0 signal.ordered" in read(tmp_path))
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until("the answer", lambda: "host host-1 answers again" in read(tmp_path))
        wait_until(
            "what was missed",
            lambda: f"host-1 signal.ordered component=agent signal=SIGSTOP pids={pid}\n" in read(tmp_path),
        )
        assert read(tmp_path).count(silent) == 1


def test_an_agent_obeys_no_caller_without_the_token_and_no_order_that_is_meant_for_another(
    job: StubJob,
) -> None:
    host, other, worker = job.host("host-0"), job.host("host-1"), job.worker_pid("host-0")
    request = ReadLog(log=HostLog.EVENTS, lines=1, offset=None)
    malformed = ReadLog(log=HostLog.EVENTS, lines=-1, offset=None)

    async def call() -> None:
        async with Channel(host.agent.endpoint, Credentials("wrong")) as channel:
            with pytest.raises(Unauthenticated):
                await channel.call(SERVICE, READ_LOG, request, timeout_s=patience(2))
            with pytest.raises(Unauthenticated):
                await send_signal(channel, host, JobComponent.WORKER, is_stop=False)
        async with Channel(host.agent.endpoint, Credentials(TOKEN)) as channel:
            with pytest.raises(PeerError, match="host host-0: found another agent at this address"):
                await send_signal(channel, other, JobComponent.WORKER, is_stop=False)
            with pytest.raises(MessageError):
                await channel.call(SERVICE, READ_LOG, malformed, timeout_s=patience(2))

    asyncio.run(call())
    assert psutil.pid_exists(worker)
    kinds = [event.kind for event in read_events(job.work / "host-0" / "host-0.events.jsonl")]
    assert kinds.count(EventKind.REQUEST_UNAUTHENTICATED) == 1
    assert EventKind.REQUEST_MALFORMED in kinds


def test_all_processes_of_a_host_are_killed_from_anywhere_and_the_answer_arrives(job: StubJob) -> None:
    agent, worker = job.agents["host-0"].process, job.worker_pid("host-0")
    code, shown = job.run("kill", "host", "host-0")
    assert (code, shown) == (0, f"SIGKILL to host on host-0: process {agent.pid}, {worker}\n")
    assert agent.wait(patience(3)) == -signal.SIGKILL
    wait_until("the end of the worker", lambda: not psutil.pid_exists(worker))
