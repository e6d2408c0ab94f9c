"""Hosts of the tiny job as on a pod: agents started by hand, with a store of its own process."""

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agents import TOKEN, HandStartedAgent, wait_until
from tiny_job import CONFIG, RECOVERY_S, SCRIPT, check_steps, is_training, newest_step, read_logs

from resilient_jax.errors import ResilientJaxError
from resilient_jax.events import Event
from resilient_jax.telemetry.event_log import read_events
from resilient_jax.world.inspection import JobReport, read_report
from resilient_jax.world.run_directory import Contact


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a host is: its address, and the words before a command that make it run there."""

    host: str
    address: str
    prefix: tuple[str, ...] = ()


def loopback_sites(hosts: int) -> list[Site]:
    """Hosts on this machine's loopback device, each with an address of its own."""
    return [Site(host=f"host-{index}", address=f"127.0.1.{index + 2}") for index in range(hosts)]


class Pod:
    """A job whose hosts come and go as the test says."""

    def __init__(self, work: Path, store: str, sites: Sequence[Site]) -> None:
        self.work = work
        self.agents: dict[str, HandStartedAgent] = {}
        self._store = store
        self._sites = {site.host: site for site in sites}
        (work / "job.toml").write_text(CONFIG)

    def __enter__(self) -> "Pod":
        for host in self._sites:
            self.start(host)
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            agent.__exit__()

    def start(self, host: str) -> None:
        """Starts a host's agent, also again."""
        site = self._sites[host]
        options = {
            "--store": self._store,
            "--job": "pod",
            "--host-name": host,
            "--address": site.address,
            "--expected-hosts": str(len(self._sites)),
            "--run-dir": str(self.work / host),
            "--config": str(self.work / "job.toml"),
            "--platform": "cpu",
            "--devices-per-host": "1",
        }
        words = [word for pair in options.items() for word in pair]
        self.agents[host] = HandStartedAgent(
            [*words, str(SCRIPT), str(self.work)], self.work / f"{host}.out", prefix=site.prefix
        )

    def report(self) -> JobReport | None:
        contact = Contact(job="pod", store=self._store, token=TOKEN, launcher_pid=os.getpid())
        try:
            return asyncio.run(read_report(contact))
        except ResilientJaxError:
            return None

    def wait_training(self, hosts: int, after_generation: int = 0) -> JobReport:
        """Waits until so many hosts train together and have finished a step."""
        end_s = time.monotonic() + RECOVERY_S
        while True:
            report = self.report()
            if report is not None and is_training(report, hosts, after_generation):
                return report
            assert time.monotonic() < end_s, f"{hosts} hosts do not train: {report}\n{self.output()}"
            time.sleep(0.05)

    def step(self) -> int:
        return newest_step(self.work)

    def steps_of(self, host: str) -> list[int]:
        """Every step that this host's workers committed, in order."""
        logs = read_logs(self.work)
        return sorted(row["step"] for name, rows in logs.items() if name.startswith(host) for row in rows)

    def events(self) -> list[Event]:
        logs = self.work.glob("*/*.events.jsonl")
        return sorted((e for log in logs for e in read_events(log)), key=lambda event: event.monotonic_s)

    def output(self) -> str:
        return "\n".join(agent.output()[-3000:] for agent in self.agents.values())

    def finish(self) -> None:
        """Lets the job end, and checks that every step was done once, as in an undisturbed run."""
        (self.work / "stop").write_text(str(self.step() + 20))
        codes = {host: agent.wait(RECOVERY_S) for host, agent in self.agents.items()}
        assert set(codes.values()) == {0}, f"{codes}\n{self.output()}"
        check_steps(self.work)


class Network:
    """Namespaces with a link each to one bridge, whose other end is this machine."""

    def __init__(self, hosts: int) -> None:
        number = os.getpid() % 50_000
        self._bridge = f"rjb{number}"
        self._subnet = f"10.{200 + number // 250 % 50}.{number % 250}"
        self.gateway = f"{self._subnet}.1"
        self._names = {f"host-{index}": f"rj{number}-{index}" for index in range(hosts)}

    def sites(self) -> list[Site]:
        return [
            Site(host=host, address=f"{self._subnet}.{index + 2}", prefix=("ip", "netns", "exec", name))
            for index, (host, name) in enumerate(self._names.items())
        ]

    def cut(self, host: str) -> None:
        """Takes the host's link down: packets vanish, and nobody is told."""
        _ip("link", "set", self._names[host], "down")

    def mend(self, host: str) -> None:
        _ip("link", "set", self._names[host], "up")

    def build(self) -> None:
        """Raises CalledProcessError where this is not permitted."""
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for site, name in zip(self.sites(), self._names.values(), strict=True):
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", self._bridge, "up")
            _ip("-n", name, "address", "add", f"{site.address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Undoes `build`, also half of it."""
        for words in (
            *(("netns", "delete", name) for name in self._names.values()),
            ("link", "delete", self._bridge),
        ):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*words)


@contextlib.contextmanager
def network(hosts: int) -> Iterator[Network]:
    """A network of namespaces for the time of the block."""
    built = Network(hosts)
    try:
        built.build()
        yield built
    finally:
        built.remove()


def may_build_networks() -> str | None:
    """None if this process may; else why not."""
    probe = Network(1)
    try:
        probe.build()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', '') or error}"
    finally:
        probe.remove()
    return None


def wait_steps(pod: Pod, count: int) -> None:
    """Waits until so many more steps are done."""
    goal = pod.step() + count
    wait_until(f"step {goal}", lambda: pod.step() >= goal, RECOVERY_S)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)
