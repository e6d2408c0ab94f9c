"""A real job of `tests/support/scripts/tiny.py`, held and broken at logical times, and its invariants."""

import collections
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from resilient_jax.events import EventKind
from resilient_jax.jax_runtime.worker_environment import Platform, make_worker_environment
from resilient_jax.protocol.failpoints import ANY_INDEX, FailPoint
from resilient_jax.protocol.generation import GenerationPhase
from resilient_jax.protocol.host_status import StandbyState, StandbyStatus
from tests.support.paths import SCRIPTS
from tests.support.patience import Deadline, patience, slowness, wait_until
from tests.support.patient_job import PatientJob
from tests.support.reference_runs import share_run

SCRIPT = SCRIPTS / "tiny.py"
FAST_TOLERANCE = 1e-3
"""Relative, with `fast`: the order of summation depends on the live hosts. Adam divides by small gradients, so rounding
errors grow over some hundred steps."""
LATE_S = 5.0
"""Time after which `hold` checks whether its order came too late."""
RECOVERY_S = patience(9)
"""A timeout for a busy machine, no measured recovery time."""

WITHOUT_PROTECTION = 'replicated_snapshot_interval_steps = "off"\n'
REPORT_SLOW_HOSTS = 'slow_hosts = "report"\n'
"""On two cores that tests share, hosts are really slow now and then. What is done about them has tests of its own."""
LEASE_TTL_S = 2.0
"""On an idle machine: the leases of hosts that nobody harms must not expire where the machine is slow."""


def lease(ttl_s: float) -> str:
    """Return the line of a configuration for leases of so long on an idle machine, and longer on a slower one."""
    return f"lease_ttl_s = {ttl_s * slowness():.1f}\n"


LEASE = lease(LEASE_TTL_S)
CONFIG = f"""
{LEASE}max_restarts = 1000
max_host_losses = 1000
restart_backoff_s = 0.0
forming_timeout_s = 20.0
{REPORT_SLOW_HOSTS}{WITHOUT_PROTECTION}"""
WITHOUT_STANDBYS = 'standby = "off"\n'
CONFIG_WITHOUT_STANDBYS = f"{CONFIG}{WITHOUT_STANDBYS}"
"""For most jobs, whose workers are forked from one zygote: to import everything in each host is most of what a test of
some seconds costs. With a zygote for each host, as on a pod, run test_host_zygote, test_rejoin, test_replace and
SIGKILL in the kill matrix."""
HANGS_ARE_NAMED = f"""{CONFIG_WITHOUT_STANDBYS}
hang_timeout_s = {5 * slowness():.1f}
user_code_timeout_s = {10 * slowness():.1f}
quiesce_timeout_s = {3 * slowness():.1f}
"""
"""A host that hangs is named after seconds, and one that is only slow is not."""


def protect(config: str, interval_steps: int) -> str:
    """Return the configuration with snapshots of a replicated state, for which each host runs one more process."""
    assert WITHOUT_PROTECTION in config
    return config.replace(WITHOUT_PROTECTION, f"replicated_snapshot_interval_steps = {interval_steps}\n")


def prolong_leases(config: str, ttl_s: float) -> str:
    """Return the configuration with leases of so long on an idle machine."""
    assert LEASE in config
    return config.replace(LEASE, lease(ttl_s))


def act_on_slow_hosts(config: str) -> str:
    """Return the configuration with which the policy may take a slow host out, or give it less to do."""
    assert REPORT_SLOW_HOSTS in config
    return config.replace(REPORT_SLOW_HOSTS, "")


TAIL_BYTES = 8192
"""Read of the end of a log, for its last complete line: several times as long as a line."""
EACH_DEVICE = "per_host=devices"
"""Each device computes microbatches of its own, with the same bits however many a host has."""
ONE_DEVICE = ("--devices-per-host", "1")
"""For tests that do not depend on the number of devices: less to compute."""


class TinyJob:
    """The job, its faults, and the checks of its invariants."""

    def __init__(
        self,
        work: Path,
        hosts: int = 4,
        config: str = CONFIG_WITHOUT_STANDBYS,
        options: Sequence[str] = (),
        words: Sequence[str] = (),
        script: Path = SCRIPT,
        platform: Platform = "cpu",
    ) -> None:
        self.work = work
        self.words = tuple(words)
        self.platform: Platform = platform
        self.hosts = hosts
        work.mkdir(parents=True, exist_ok=True)
        (work / "job.toml").write_text(config)
        self.job = PatientJob(
            [str(script), str(work), *words],
            num_hosts=hosts,
            run_directory=work / "run",
            options=[
                *("--config", str(work / "job.toml"), "--devices-per-host", "2", "--platform", platform),
                *([] if WITHOUT_STANDBYS in config else ["--zygote", "host"]),
                *options,
            ],
            environment={**os.environ, "OMP_NUM_THREADS": "1", "TINY_JOB_HOSTS": str(hosts)},
        )
        self.patience_s = RECOVERY_S
        self._stopped: list[int] = []

    def __enter__(self) -> Self:
        self.job.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.job.__exit__(kind, error, trace)

    # Observing the job.

    def read_report(self) -> JobReport:
        return self.job.wait_report("the job's report", lambda report: report.generation is not None)

    def step(self) -> int:
        """Return how many steps any host has committed."""
        return newest_step(self.work)

    def logs(self) -> dict[str, list[dict]]:
        """Return the log lines of each worker process, by `host-pid`."""
        return read_logs(self.work)

    def wait_training(self, hosts: int, after_generation: int = 0) -> JobReport:
        """Wait until so many hosts train together and have finished a step; return the job's report."""

        return self.wait_report(
            f"{hosts} hosts training", lambda report: is_training(report, hosts, after_generation)
        )

    def wait_report(self, what: str, holds: Callable[[JobReport], bool]) -> JobReport:
        """Wait until `holds` is true of the store's report."""
        return self.job.wait_report(what, holds, self.patience_s)

    def wait_zygote(self, host: str) -> int:
        """Wait until this host has a zygote that is ready; return its process id."""

        def find() -> list[int]:
            events = self.job.read_events()
            return [
                int(e.detail["pid"]) for e in events if e.kind is EventKind.ZYGOTE_READY and e.host == host
            ]

        wait_until(f"a zygote on {host}", lambda: bool(find()), self.patience_s)
        return find()[-1]

    def wait_standby(self, host: str) -> StandbyStatus:
        """Wait until this host has a standby that is ready; return its status."""

        def find(report: JobReport) -> StandbyStatus | None:
            found = next((status.standby for status in report.hosts if status.host == host), None)
            return found if found is not None and found.state is StandbyState.READY else None

        standby = find(self.wait_report(f"a standby on {host}", lambda report: find(report) is not None))
        assert standby is not None
        return standby

    # Breaking the job.

    def hold(self, place: FailPoint, hosts: Sequence[str], *, ahead: int = 4, index: int = ANY_INDEX) -> int:
        """Hold these hosts at `place`, a few steps from now, and wait until all are held; return the step."""
        deadline = Deadline(self.patience_s)
        step = self.step() + ahead
        self.job.hold(place, hosts, step, index)
        while True:
            if self.job.arrives(hosts, LATE_S):
                return step
            assert deadline.find_rest_s() > 0, f"{hosts} were not held at {place}:\n{self.job.read_tail()}"
            if self.step() > step + 1:  # the order came too late: the hosts had passed the failpoint
                ahead *= 2
                step = self.step() + ahead
                self.job.hold(place, hosts, step, index)

    def wait_compiling(self, hosts: Sequence[str], *, ahead: int = 4) -> None:
        """Have all hosts compile for a second, a few steps from now, and wait until these hosts have begun.

        The order is repeated if a host has not begun: it read the order too late, or was out of the job because its
        lease had expired on a busy machine.
        """
        deadline = Deadline(self.patience_s)
        ordered: int | None = None
        while not all((self.work / f"compiling-{host}-{ordered}").exists() for host in hosts):
            assert deadline.find_rest_s() > 0, f"not all of {hosts} compile:\n{self.job.read_tail()}"
            assert self.job.process.poll() is None, f"the job ended:\n{self.job.read_tail()}"
            step = self.step()
            if ordered is None or (step > ordered and is_training(self.read_report(), self.hosts)):
                ordered = step + ahead
                ahead *= 2
                (self.work / "compile").write_text(str(ordered))
            time.sleep(0.02)

    def signal(self, part: JobComponent, host: str, number: signal.Signals) -> None:
        """Send a signal to a component; `wake_all` continues the processes that were stopped."""
        pids = list(find_pids(self.read_report(), part, host))
        assert pids, f"{host} runs no {part}:\n{self.job.read_tail()}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number is signal.SIGSTOP:
            self._stopped += pids

    def wake_all(self) -> None:
        """Send SIGCONT to the stopped processes that still exist: the zombies that must be fenced."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped = []

    # Invariants.

    def finish(self, more_steps: int = 10) -> None:
        """Let the job end so many steps later, and check all its invariants.

        The margin is for the harness: every host has to read the number of the last step before reaching that step.
        """
        (self.work / "stop").write_text(str(self.step() + more_steps))
        code = self.job.wait(self.patience_s)
        assert code == 0, self.job.read_tail()
        self.check_steps()
        self.check_generations()
        self.check_nothing_left()

    def check_steps(self) -> None:
        """Check the logs of all steps: see the function of this name."""
        check_steps(self.work, self.words, self.platform)

    def check_generations(self) -> None:
        """Check that each generation number was given out once."""
        formed: dict[int, set[int]] = {}
        for event in self.job.read_events():
            if event.kind == "generation.phase" and event.detail.get("phase") == "form":
                formed.setdefault(event.generation or 0, set()).add(int(event.detail["hosts"]))
        assert all(len(sizes) == 1 for sizes in formed.values()), f"a number given out twice: {formed}"

    def check_nothing_left(self) -> None:
        """Check that no process and no contact file is left."""
        wait_until("the end of all processes of the job", lambda: not self.job.find_processes())
        assert not (self.work / "run" / "job.json").exists()


def is_training(report: JobReport, hosts: int, after_generation: int = 0) -> bool:
    """Return whether so many hosts train together in a later generation and have finished a step."""
    generation = report.generation
    if generation is None or generation.phase is not GenerationPhase.ACTIVE:
        return False
    if generation.number <= after_generation or len(generation.membership.members) != hosts:
        return False
    by_host = {status.host: status for status in report.hosts}
    workers = [by_host[m.host].worker for m in generation.membership.members if m.host in by_host]
    return len(workers) == hosts and all(w is not None and w.report.place.has_finished_step for w in workers)


def read_logs(work: Path) -> dict[str, list[dict]]:
    """Return the log lines of each worker process, by `host-pid`."""
    found: dict[str, list[dict]] = {}
    for path in work.glob("steps-*.jsonl"):
        lines = path.read_text().split("\n")[:-1]
        found[path.stem.removeprefix("steps-")] = [json.loads(line) for line in lines]
    return found


def newest_step(work: Path) -> int:
    """Return how many steps any host has committed; read only the last lines, because tests poll this."""
    newest = -1
    for path in work.glob("steps-*.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, os.stat(file.fileno()).st_size - TAIL_BYTES))
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            newest = max(newest, json.loads(whole.rpartition(b"\n")[2])["step"])
    return newest + 1


def check_steps(work: Path, words: Sequence[str] = (), platform: Platform = "cpu") -> None:
    """Check every line that any process has logged.

    No step is skipped, and none is committed twice by a process. After each step the weights and the optimizer state
    equal those of an undisturbed run, bit for bit, or within FAST_TOLERANCE. Every microbatch is committed once, and
    was computed by the owner that all hosts agree on. No process traces a function twice.
    """
    logs = read_logs(work)
    by_step: dict[int, list[dict]] = {}
    for process, rows in logs.items():
        steps = [row["step"] for row in rows]
        assert steps == sorted(set(steps)), f"{process} did a step twice: {steps}"
        # Two replicas of a host may trace at once at their start, and a host without a replica has not traced yet.
        assert len({row["traced"] for row in rows} - {0}) <= 1, f"{process} traced again"
        replicas = _count_replicas(words, max(row["devices"] for row in rows)) if rows else 1
        # A replica on several hosts has other devices in another generation, each with a program of its own.
        if not any(word.startswith("hosts=") for word in words):
            assert max((row["programs"] for row in rows), default=0) <= replicas, f"{process} compiled again"
        for row in rows:
            assert row["processes"] == row["hosts"], f"{process}: JAX counts others than the members"
            by_step.setdefault(row["step"], []).append(row)
    total = max(by_step) + 1
    assert sorted(by_step) == list(range(total)), f"skipped: {sorted(set(range(total)) - set(by_step))}"
    _check_microbatches(work, by_step)
    devices = {row["devices"] for rows in logs.values() for row in rows}
    assert len(devices) == 1 or EACH_DEVICE in words, devices
    alone = _undisturbed(work, total, words, platform, max(devices))
    for step, rows in by_step.items():
        for row in rows:
            if "fast" in words:
                expected = alone.rows[step]["loss"]
                assert abs(row["loss"] - expected) <= FAST_TOLERANCE * abs(expected)
            else:
                assert row["digest"] == alone.rows[step]["digest"], f"step {step}: other bits on {row}"
    for path in work.glob("final-*.npz"):
        found = read_final(path)
        if "fast" in words:
            for leaf, expected in zip(found, alone.final, strict=True):
                np.testing.assert_allclose(leaf, expected, rtol=FAST_TOLERANCE, atol=FAST_TOLERANCE)
        else:
            assert digest_leaves(found) == alone.rows[total - 1]["digest"], (
                f"{path}: other bits than after the last step"
            )


def _count_replicas(words: Sequence[str], num_devices: int) -> int:
    """Return how many replicas a host with so many devices has."""
    given = [word.removeprefix("per_host=") for word in words if word.startswith("per_host=")]
    return num_devices if EACH_DEVICE in words else max(map(int, given), default=1)


def _check_microbatches(work: Path, by_step: dict[int, list[dict]]) -> None:
    """Check that each committed microbatch was computed by its owner, and that all hosts agree on the owners."""
    computed: dict[str, set[tuple[int, int]]] = {}
    for path in work.glob("microbatches-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        begun = [(line["step"], line["index"]) for line in lines]
        host = path.stem.removeprefix("microbatches-").rpartition("-")[0]
        computed.setdefault(host, set()).update(begun)
    for step, rows in by_step.items():
        for row in rows:
            for index, host in enumerate(row["owners"]):
                assert (step, index) in computed[host], (
                    f"step {step}: {host} is said to have computed {index}"
                )
        by_generation = {row["generation"]: row["owners"] for row in rows}
        assert all(row["owners"] == by_generation[row["generation"]] for row in rows), f"step {step}: {rows}"


def read_final(path: Path) -> list[np.ndarray]:
    """Return the leaves of a host's last state, in order."""
    with np.load(path) as found:
        return [found[f"arr_{number}"] for number in range(len(found))]


def digest_leaves(leaves: Sequence[np.ndarray]) -> str:
    """Return the digest of the leaves, as the job computes it."""
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def count_lines(work: Path, pattern: str) -> collections.Counter[tuple[int, int]]:
    """Return how often each (step, microbatch) is in the logs: "microbatches-*", begun; "reads-*", read."""
    return collections.Counter(
        (line["step"], line["index"])
        for path in work.glob(f"{pattern}.jsonl")
        for line in map(json.loads, path.read_text().split("\n")[:-1])
    )


class Undisturbed(NamedTuple):
    """A run without failures: the row of each step, and the leaves of the last state."""

    rows: Mapping[int, dict]
    final: list[np.ndarray]


def _undisturbed(
    work: Path, total: int, words: Sequence[str], platform: Platform, devices: int
) -> Undisturbed:
    """Return a run of the same job for at least `total` steps, on as few hosts as a replica needs.

    The result of a step does not depend on when the job ends, so tests share a run; but where only the last state can
    be compared (`fast`), it must be that of the same step, and steps over several hosts are too slow for more of them.
    """
    if "fast" in words or any(word.startswith("hosts=") for word in words):
        _run_undisturbed(work / "undisturbed", total, words, platform, devices)
        return _read_undisturbed(work / "undisturbed")
    words = [word for word in words if not word.startswith("pace=")]
    alone = share_run(
        (SCRIPT, *words, platform, devices),
        total,
        lambda folder, steps: _run_undisturbed(folder, steps, words, platform, devices),
    )
    return _read_undisturbed(alone)


def _run_undisturbed(alone: Path, total: int, words: Sequence[str], platform: Platform, devices: int) -> None:
    alone.mkdir(exist_ok=True)
    (alone / "stop").write_text(str(total))
    script = [str(SCRIPT), str(alone), *words, "pace=0"]
    (hosts,) = [word.removeprefix("hosts=") for word in words if word.startswith("hosts=")] or ["1"]
    launch = [sys.executable, "-m", "resilient_jax.cli.main", "launch", "--hosts", hosts]
    launch += ["--platform", platform, "--devices-per-host", str(devices), "--run-dir", str(alone / "run")]
    environment = make_worker_environment(
        platform=platform,
        devices_per_host=devices,
        cache_dir=None,
        collective_timeout_s=60.0,
        base=os.environ,
    )
    done = subprocess.run(
        [*launch, *script] if hosts != "1" else [sys.executable, *script],
        timeout=patience(20),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert sorted(_read_undisturbed(alone).rows) == list(range(total))


def _read_undisturbed(alone: Path) -> Undisturbed:
    rows = {row["step"]: row for rows in read_logs(alone).values() for row in rows}
    return Undisturbed(rows=rows, final=read_final(next(alone.glob("final-*.npz"))))
