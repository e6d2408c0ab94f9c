"""Runs of the resilience benchmark: one job under agents, or under a supervisor that restarts all processes."""

import contextlib
import dataclasses
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from resilient_jax.cluster.child_process import bind_to_this_process
from resilient_jax.errors import InternalError
from resilient_jax.local_job.local_job import LocalJob
from tests.benchmarks.resilience.schedule import WARM_STEPS, ScheduledKill
from tests.benchmarks.resilience.timeline import InjectedKill, RunRecord, Timeline, read_timeline
from tests.benchmarks.runs import ERROR_CHARACTERS, script_environment

SHORT_HEARTBEAT_S: Final = 10
"""Of the tuned baseline, whose supervisor detects a death at once and does not wait for a heartbeat."""
DEFAULTS_TIMEOUT_S: Final = 240.0
"""Time for survivors to end by themselves with JAX's defaults, whose heartbeat takes 100 s; then they are killed."""
POLL_INTERVAL_S: Final = 0.01
MEMORY_INTERVAL_S: Final = 2.0
UNPLANNED_LIMIT: Final = 5
"""Attempts of the baseline that may end without an injected failure; without a limit, a bug would restart for ever."""
SNAPSHOT_EVERY: Final = 10
"""Snapshot interval of ours in steps, against the loss of the last host with the state; as often as Orbax usually."""
LIMIT_S_A_STEP, LIMIT_S_A_FAILURE, LIMIT_S_START = 15.0, 120.0, 180.0
"""A run that takes longer than their sum is taken to hang."""


class RestartableJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor and every job under it need to know.

    Attributes:
        steps: to train.
        hosts: names of the hosts.
        faults: in order of their steps.
        every: checkpoint interval of the baseline in steps; 0: no checkpoints.
        phase: the baseline saves when the number of finished steps, modulo `every`, is this.
        heartbeat_s: of the baseline; null: JAX's default.
        digest_after: numbers of steps after which the SHA-256 of the state is written.
    """

    steps: int
    hosts: tuple[str, ...]
    faults: tuple[ScheduledKill, ...] = ()
    every: int = 0
    phase: int = 0
    heartbeat_s: int | None = SHORT_HEARTBEAT_S
    digest_after: tuple[int, ...] = ()

    @property
    def timeout_s(self) -> float:
        """Time after which the run is taken to hang."""
        return LIMIT_S_START + LIMIT_S_A_STEP * self.steps + LIMIT_S_A_FAILURE * len(self.faults)


class BenchmarkJob(RestartableJob, frozen=True, kw_only=True):
    """Configuration file that the jobs of both systems read.

    Attributes:
        width: of the model.
        layers: of the model.
        microbatch: sequences per microbatch, of ours.
        reduction: of ours, "exact" or "fast".
    """

    width: int
    layers: int
    microbatch: int
    reduction: str = "exact"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run that finished.

    Attributes:
        timeline: commits and failures of the run.
        saves_s: time that each checkpoint blocked its process.
        digests: SHA-256 of the weights by number of steps; several, joined by spaces, if hosts disagree.
        host_mib: peak memory (Pss) per host, sampled every 2 s.
    """

    timeline: Timeline
    saves_s: tuple[float, ...]
    digests: Mapping[int, str]
    host_mib: float


def run_resilient(script: Path, file: BenchmarkJob, work: Path, cache: Path) -> FinishedRun:
    """Run the job under agents until it ends.

    Raises:
        InternalError: the job failed, or hangs.
    """
    _write_job(work, file)
    config = work / "job.toml"
    config.write_text(
        "max_restarts = 1000\nmax_host_losses = 1000\nrestart_backoff_s = 0.0\n"
        f"snapshot_interval_steps = {SNAPSHOT_EVERY}\n"
    )
    memory = _Memory(len(file.hosts))
    end_s = time.monotonic() + file.timeout_s
    with LocalJob(
        [str(script), str(work)],
        num_hosts=len(file.hosts),
        run_directory=work / "run",
        options=["--devices-per-host", "1", "--config", str(config)],
        environment=_environment(cache),
    ) as job:
        while job.process.poll() is None:
            if time.monotonic() > end_s:
                raise InternalError(
                    f"{work}: the job did not end within {file.timeout_s:g} s:\n{job.read_tail()}"
                )
            memory.look(job.find_processes)
            time.sleep(POLL_INTERVAL_S)
        if job.process.returncode:
            raise InternalError(
                f"{work}: found exit code {job.process.returncode}, expected 0:\n{job.read_tail()}"
            )
    return _read_run(work, file, {}, memory)


def run_restarting(
    script: Path, file: RestartableJob, work: Path, cache: Path, *, waits_for_all: bool = False
) -> FinishedRun:
    """Run the job under a supervisor that, when a process dies, ends the others and restarts all at once.

    Args:
        script: of the job.
        file: configuration of the job.
        work: a new folder.
        cache: folder of compiled programs.
        waits_for_all: do not end the others, but restart when JAX has ended them.

    Raises:
        InternalError: the job failed, or hangs.
    """
    _write_job(work, file)
    memory = _Memory(len(file.hosts))
    end_s = (
        time.monotonic() + file.timeout_s + (DEFAULTS_TIMEOUT_S * len(file.faults) if waits_for_all else 0)
    )
    began_s: dict[int, float] = {}
    unplanned = 0
    for attempt in range(1, 10_000):
        began_s[attempt] = time.monotonic()
        struck = len(_read_struck(work))
        with _start_all(script, file, work, cache, attempt) as processes:
            ended = _wait_end(processes, end_s, memory, waits_for_all=waits_for_all)
        if ended:
            return _read_run(work, file, began_s, memory)
        unplanned += len(_read_struck(work)) == struck
        if unplanned > UNPLANNED_LIMIT or time.monotonic() > end_s:
            raise InternalError(
                f"{work}: found {attempt} attempts, {unplanned} of which ended without a failure of ours, after "
                f"{file.timeout_s:g} s at most; expected all {file.steps} steps:\n{_tail(work)}"
            )
    raise AssertionError("bounded by the deadline")


@contextlib.contextmanager
def _start_all(
    script: Path, file: RestartableJob, work: Path, cache: Path, attempt: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start all processes of an attempt; on exit, kill those that remain."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index, host in enumerate(file.hosts):
            bare = {
                "BARE_COORDINATOR": address,
                "BARE_COUNT": str(len(file.hosts)),
                "BARE_INDEX": str(index),
                "BARE_ATTEMPT": str(attempt),
            }
            with (work / f"output-{host}").open("ab") as output:
                processes.append(
                    subprocess.Popen(
                        bind_to_this_process([sys.executable, str(script), str(work)]),
                        env={**_environment(cache), **bare},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _wait_end(
    processes: Sequence[subprocess.Popen[bytes]], end_s: float, memory: "_Memory", *, waits_for_all: bool
) -> bool:
    """Return whether all succeed; return at the first failure or, with `waits_for_all`, when all have ended."""
    give_up_s: float | None = None
    while time.monotonic() < end_s:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return True
        if any(codes):
            if not waits_for_all or None not in codes:
                return False
            give_up_s = give_up_s or time.monotonic() + DEFAULTS_TIMEOUT_S
            if time.monotonic() > give_up_s:
                return False
        memory.look(lambda: [process.pid for process in processes])
        time.sleep(POLL_INTERVAL_S)
    return False


class _Memory:
    """Peak memory of all processes of a run together."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._most_kib = 0
        self._next_s = 0.0

    def look(self, pids: Callable[[], Sequence[int]]) -> None:
        """Sample the memory if `MEMORY_INTERVAL_S` has passed: a sample takes some milliseconds of a core."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + MEMORY_INTERVAL_S
        self._most_kib = max(self._most_kib, sum(map(_proportional_kib, pids())))

    @property
    def host_mib(self) -> float:
        """Peak memory per host in MiB."""
        return self._most_kib / 1024 / self._hosts


def _proportional_kib(pid: int) -> int:
    """Return the proportional set size (Pss) of a process in KiB; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _environment(cache: Path) -> dict[str, str]:
    cache.mkdir(parents=True, exist_ok=True)
    return {
        **script_environment(),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _write_job(work: Path, file: RestartableJob) -> None:
    work.mkdir(parents=True)
    (work / "job.json").write_bytes(msgspec.json.encode(file))


def _read_run(work: Path, file: RestartableJob, began_s: Mapping[int, float], memory: _Memory) -> FinishedRun:
    rows = [
        msgspec.json.decode(line, type=RunRecord)
        for path in work.glob("rows-*.jsonl")
        for line in path.read_bytes().split(b"\n")[:-1]
    ]
    digests: dict[int, str] = {}
    for steps in file.digest_after:
        found = sorted({path.read_text() for path in work.glob(f"digest-{steps}-*.txt")})
        digests[steps] = " ".join(found)
    struck = _read_struck(work)
    if len(struck) != len(file.faults):
        raise InternalError(f"{work}: found {len(struck)} failures that struck, expected {len(file.faults)}")
    return FinishedRun(
        timeline=read_timeline(rows, struck, began_s, file.steps, WARM_STEPS),
        saves_s=tuple(row.seconds for row in rows if row.kind == "saved"),
        digests=digests,
        host_mib=memory.host_mib,
    )


def _read_struck(work: Path) -> list[InjectedKill]:
    return [msgspec.json.decode(path.read_bytes(), type=InjectedKill) for path in work.glob("fault-*.json")]


def _tail(work: Path) -> str:
    outputs = sorted(work.glob("output-*"))
    return "\n".join(f"{p.name}:\n{p.read_text(errors='replace')[-ERROR_CHARACTERS:]}" for p in outputs)
