"""Hosts of the tiny job as on a pod: agents started one by one, with a store in a process of its own."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

from resilient_jax.cluster.job_report import JobReport, read_job_report
from resilient_jax.cluster.launcher import HostSite
from resilient_jax.cluster.run_directory import JobContact
from resilient_jax.errors import ResilientJaxError
from resilient_jax.events import Event
from resilient_jax.telemetry.event_log import read_events
from tests.chaos.network import Network
from tests.support.agents import TOKEN, HandStartedAgent, free_port
from tests.support.patience import Deadline, wait_until
from tests.support.tiny_job import (
    CONFIG_WITHOUT_STANDBYS,
    RECOVERY_S,
    SCRIPT,
    check_steps,
    is_training,
    newest_step,
    read_logs,
)


def loopback_sites(hosts: int) -> list[HostSite]:
    """Return hosts on this machine's loopback device, each with an address of its own."""
    return [HostSite(address=f"127.0.1.{index + 2}") for index in range(hosts)]


class Pod:
    """A job whose hosts the test starts and ends; it begins with `num_hosts` of them, by default with all.

    Without a store the agent of host-0 serves it.
    """

    def __init__(
        self,
        work: Path,
        store: str | None,
        sites: Sequence[HostSite],
        num_hosts: int | None = None,
        *,
        script: Path = SCRIPT,
        words: Sequence[str] = (),
        config: str = CONFIG_WITHOUT_STANDBYS,
        patience_s: float = RECOVERY_S,
    ) -> None:
        self.work = work
        self.agents: dict[str, HandStartedAgent] = {}
        self._serving = "host-0" if store is None else None
        self._store = store or f"{sites[0].address}:{free_port()}"
        self._sites = {f"host-{index}": site for index, site in enumerate(sites)}
        self._num_hosts = num_hosts or len(sites)
        self._script = script
        self._words = tuple(words)
        self.patience_s = patience_s
        (work / "job.toml").write_text(config)

    def __enter__(self) -> "Pod":
        for host in list(self._sites)[: self._num_hosts]:
            self.start(host)
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            agent.__exit__()

    def start(self, host: str, words: Sequence[str] = ()) -> None:
        """Start a host's agent, for the first time or again; `words` are further arguments of the script."""
        site = self._sites[host]
        options = {
            "--store": self._store,
            "--job": "pod",
            "--host-name": host,
            "--address": site.address,
            "--num-hosts": str(self._num_hosts),
            "--run-dir": str(self.work / host),
            "--config": str(self.work / "job.toml"),
            "--platform": "cpu",
            "--devices-per-host": "1",
        }
        flags = [word for pair in options.items() for word in pair]
        flags += ["--serve-store"] if host == self._serving else []
        self.agents[host] = HandStartedAgent(
            [*flags, str(self._script), str(self.work), *self._words, *words],
            self.work / f"{host}.out",
            prefix=site.command_prefix,
        )

    def report(self) -> JobReport | None:
        contact = JobContact(job="pod", store=self._store, token=TOKEN, launcher_pid=os.getpid())
        try:
            return asyncio.run(read_job_report(contact))
        except ResilientJaxError:
            return None

    def wait_training(self, hosts: int, after_generation: int = 0) -> JobReport:
        """Wait until so many hosts train together and have finished a step; return the job's report."""
        deadline = Deadline(self.patience_s)
        while True:
            report = self.report()
            if report is not None and is_training(report, hosts, after_generation):
                return report
            assert deadline.find_rest_s() > 0, f"{hosts} hosts do not train: {report}\n{self.output()}"
            time.sleep(0.05)

    def step(self) -> int:
        return newest_step(self.work)

    def steps_of(self, host: str) -> list[int]:
        """Return every step that this host's workers committed, in order."""
        logs = read_logs(self.work)
        return sorted(row["step"] for name, rows in logs.items() if name.startswith(host) for row in rows)

    def events(self) -> list[Event]:
        logs = self.work.glob("*/*.events.jsonl")
        return sorted((e for log in logs for e in read_events(log)), key=lambda event: event.monotonic_s)

    def output(self) -> str:
        return "\n".join(agent.output()[-3000:] for agent in self.agents.values())

    def finish(self, words: Sequence[str] = ()) -> None:
        """Let the job end; check that every step was done once, as in an undisturbed run with these words."""
        self.end()
        check_steps(self.work, words)

    def end(self) -> None:
        """Let the job end."""
        (self.work / "stop").write_text(str(self.step() + 20))
        codes = {host: agent.wait(self.patience_s) for host, agent in self.agents.items()}
        assert set(codes.values()) == {0}, f"{codes}\n{self.output()}"


def may_build_networks() -> str | None:
    """Return None if this process may build network namespaces, else the reason why not."""
    probe = Network(1)
    try:
        probe.build()
    except OSError as error:
        return f"no network namespaces here: {error}"
    finally:
        probe.remove()
    return None


def wait_steps(pod: Pod, count: int) -> None:
    """Wait until so many more steps are committed."""
    goal = pod.step() + count
    wait_until(f"step {goal}", lambda: pod.step() >= goal, pod.patience_s)
