"""A real job of `tests/e2e/jobs/tiny.py`, held and broken at logical times, and what must be true of it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from resilient_jax.protocol.fault_points import Place
from resilient_jax.protocol.records import Phase
from resilient_jax.world.inspection import JobReport, Part, pids_of
from resilient_jax.world.local_job import LocalJob

SCRIPT = Path(__file__).parent.parent / "e2e" / "jobs" / "tiny.py"
LOSS_TOLERANCE = 1e-4
"""Relative. The order of summation depends on who is alive; over some hundred steps of this well-conditioned
problem float32 rounding stays two orders below this (seen: 2e-6)."""
RECOVERY_S = 90.0
"""A deadline for a machine that is busy with other things, not a figure."""

CONFIG = """
lease_ttl_s = 2.0
restart_limit = 1000
restart_backoff_s = 0.0
forming_deadline_s = 20.0
store_deadline_s = 30.0
"""
ONE_DEVICE = ("--devices-per-host", "1")
"""For tests whose promise is not about devices: less to compute."""


class TinyJob:
    """The job, and the checks of the promise."""

    def __init__(self, work: Path, hosts: int = 4, config: str = CONFIG, options: Sequence[str] = ()) -> None:
        self.work = work
        self.hosts = hosts
        work.mkdir(parents=True, exist_ok=True)
        (work / "job.toml").write_text(config)
        self.job = LocalJob(
            [str(SCRIPT), str(work)],
            hosts=hosts,
            run_directory=work / "run",
            options=["--config", str(work / "job.toml"), "--devices-per-host", "2", *options],
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._stopped: list[int] = []

    def __enter__(self) -> Self:
        self.job.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.job.__exit__(kind, error, trace)

    # Looking.

    def report(self) -> JobReport:
        return self.job.wait_report("the job's report", lambda report: report.generation is not None)

    def step(self) -> int:
        """The newest step that any host committed."""
        return newest_step(self.work)

    def logs(self) -> dict[str, list[dict]]:
        """What each worker process wrote, by `host-pid`."""
        return read_logs(self.work)

    def wait_training(self, hosts: int, after_generation: int = 0) -> JobReport:
        """Waits until so many hosts train together and have finished a step."""

        return self.job.wait_report(
            f"{hosts} hosts training", lambda report: is_training(report, hosts, after_generation), RECOVERY_S
        )

    # Breaking.

    def hold(self, place: Place, hosts: Sequence[str], *, ahead: int = 4) -> None:
        """Holds these hosts at `place`, a few steps from now, and waits until they are there."""
        self.job.hold(place, hosts, self.step() + ahead)
        self.job.wait_held(hosts, RECOVERY_S)

    def wait_compiling(self, hosts: Sequence[str], *, ahead: int = 4) -> None:
        """Has everybody compile for a while, a few steps from now, and waits until these hosts do."""
        for path in self.work.glob("compiling-*"):
            path.unlink()
        (self.work / "compile").write_text(str(self.step() + ahead))
        end_s = time.monotonic() + RECOVERY_S
        while not all((self.work / f"compiling-{host}").exists() for host in hosts):
            assert time.monotonic() < end_s, f"not all of {hosts} compile:\n{self.job.tail()}"
            assert self.job.process.poll() is None, f"the job ended:\n{self.job.tail()}"
            time.sleep(0.005)

    def signal(self, part: Part, host: str, number: signal.Signals) -> None:
        """Sends a signal; what was stopped is noted, to be woken up later."""
        pids = list(pids_of(self.report(), part, host))
        assert pids, f"{host} runs no {part}:\n{self.job.tail()}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number is signal.SIGSTOP:
            self._stopped += pids

    def wake_all(self) -> None:
        """SIGCONT to whatever was stopped and still exists: the zombies that must be fenced."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped = []

    # The promise.

    def finish(self) -> None:
        """Lets the job end, and checks everything that must be true of it."""
        (self.work / "stop").write_text(str(self.step() + 40))
        code = self.job.wait(RECOVERY_S)
        assert code == 0, self.job.tail()
        self.check_steps()
        self.check_generations()
        self.check_nothing_left()

    def check_steps(self) -> None:
        """No step skipped, none done twice by a process, every loss that of an undisturbed run."""
        check_steps(self.work)

    def check_generations(self) -> None:
        """Generation numbers were given out once, and nobody committed in two at a time."""
        formed: dict[int, set[int]] = {}
        for event in self.job.events():
            if event.kind == "generation.phase" and event.detail.get("phase") == "form":
                formed.setdefault(event.generation or 0, set()).add(int(event.detail["hosts"]))
        assert all(len(sizes) == 1 for sizes in formed.values()), f"a number given out twice: {formed}"

    def check_nothing_left(self) -> None:
        """No process, no contact file, no shared memory."""
        end_s = time.monotonic() + 10.0
        while self.job.processes() and time.monotonic() < end_s:
            time.sleep(0.02)
        assert self.job.processes() == [], "processes were left behind"
        assert not (self.work / "run" / "job.json").exists()


def is_training(report: JobReport, hosts: int, after_generation: int = 0) -> bool:
    """Whether so many hosts train together and have finished a step, in a later generation."""
    generation = report.generation
    if generation is None or generation.phase is not Phase.ACTIVE:
        return False
    if generation.number <= after_generation or len(generation.members) != hosts:
        return False
    by_host = {status.host: status for status in report.hosts}
    workers = [by_host[m.host].worker for m in generation.members if m.host in by_host]
    return len(workers) == hosts and all(w is not None and w.report.steady for w in workers)


def read_logs(work: Path) -> dict[str, list[dict]]:
    """What each worker process wrote, by `host-pid`."""
    found: dict[str, list[dict]] = {}
    for path in work.glob("steps-*.jsonl"):
        lines = path.read_text().split("\n")[:-1]
        found[path.stem.removeprefix("steps-")] = [json.loads(line) for line in lines]
    return found


def newest_step(work: Path) -> int:
    """How many steps any host has committed."""
    return max((row["step"] for rows in read_logs(work).values() for row in rows), default=-1) + 1


def check_steps(work: Path) -> None:
    """No step skipped, none done twice by a process, every loss that of an undisturbed run."""
    logs = read_logs(work)
    losses: dict[int, list[float]] = {}
    for process, rows in logs.items():
        steps = [row["step"] for row in rows]
        assert steps == sorted(set(steps)), f"{process} did a step twice: {steps}"
        for row in rows:
            losses.setdefault(row["step"], []).append(row["loss"])
    total = max(losses) + 1
    assert sorted(losses) == list(range(total)), f"skipped: {sorted(set(range(total)) - set(losses))}"
    expected = _undisturbed(work, total)
    for step, found in losses.items():
        for loss in found:
            assert abs(loss - expected[step]) <= LOSS_TOLERANCE * abs(expected[step]), (
                f"step {step}: loss {loss}, undisturbed {expected[step]}"
            )


def _undisturbed(work: Path, total: int) -> dict[int, float]:
    """The losses of the same job on one host that nobody touches."""
    alone = work / "undisturbed"
    alone.mkdir(exist_ok=True)
    (alone / "stop").write_text(str(total))
    subprocess.run(
        [sys.executable, str(SCRIPT), str(alone)],
        check=True,
        timeout=120,
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
        },
    )
    (log,) = alone.glob("steps-*.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}
