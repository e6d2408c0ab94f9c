"""Runs of a benchmark's script: as a job under agents, as a bare multi-process JAX program, or alone on one host.

All hosts are processes of this machine, with one device and one thread each, so that they share its cores equally.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from resilient_jax.cluster.child_process import bind_to_this_process
from resilient_jax.cluster.job_report import JobReport
from resilient_jax.cluster.launcher import make_host_names
from resilient_jax.errors import InternalError
from resilient_jax.jax_runtime.worker_environment import Platform
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.recovery import wait_training
from tests.benchmarks.paths import IMPORT_PATHS
from tests.benchmarks.run_end import order_stop

HOSTS = 4
MANY_STEPS = 100_000
"""Steps of a job that the benchmark stops."""
AS_ON_A_POD = ("--zygote", "host")
"""Options of `launch`: each host forks its workers from a process of its own."""
HEALTHY_STEPS = 3
"""Steps that all hosts train together between two kills."""
AHEAD_STEPS = 3
"""An order must be for a step that no host has reached, and reports are slightly out of date."""
REPORT_TIMEOUT_S = 180.0
RUN_TIMEOUT_S = 600.0
"""More than any undisturbed run takes."""
COMPILING_STEPS = 3
"""The first steps of a process compile; their times are left out."""
ERROR_CHARACTERS = 2000
ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1",
    "OMP_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
}


def script_environment(platform: Platform = "cpu") -> dict[str, str]:
    """Return the environment of every run of a script: on CPU one thread and one device; folders to import from."""
    paths = [*map(str, IMPORT_PATHS), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = ONE_THREAD if platform == "cpu" else {}
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def run_job(
    command: Sequence[str],
    work: Path,
    num_hosts: int = HOSTS,
    cache: Path | None = None,
    config: str = "",
    devices_per_host: int = 1,
    options: Sequence[str] = (),
    platform: Platform = "cpu",
) -> Iterator[LocalJob]:
    """Run the script as a job on all hosts; on exit, interrupt the job, then kill the processes that remain.

    Args:
        command: the script and its arguments.
        work: the folder for the job's files.
        num_hosts: of the job.
        cache: of compiled programs; None: one in the job's run directory, which is empty at first.
        config: further lines of the job's configuration.
        devices_per_host: of the job.
        options: further ones of `launch`.
        platform: of the job's devices.
    """
    work.mkdir(parents=True, exist_ok=True)
    config_file = work / "job.toml"
    config_file.write_text(f"max_restarts = 1000\nmax_host_losses = 1000\nrestart_backoff_s = 0.0\n{config}")
    with LocalJob(
        command,
        num_hosts=num_hosts,
        run_directory=work / "run",
        options=[
            *("--platform", platform, "--devices-per-host", str(devices_per_host)),
            *("--config", str(config_file)),
            *options,
        ],
        environment=script_environment(platform)
        | ({} if cache is None else {"JAX_COMPILATION_CACHE_DIR": str(cache)}),
    ) as job:
        try:
            yield job
        finally:
            job.process.send_signal(signal.SIGINT)
            with contextlib.suppress(InternalError):
                job.wait(20.0)


def run_undisturbed(command: Sequence[str], work: Path, config: str = "") -> None:
    """Run the script as a job on all hosts until it ends; `config` has further lines of its configuration.

    Raises:
        InternalError: the job failed.
    """
    with run_job(command, work, config=config) as job:
        wait_success(job, "the undisturbed job")


def wait_success(job: LocalJob, what: str) -> None:
    """Wait until a job ends.

    Raises:
        InternalError: the job failed, or is still running after `RUN_TIMEOUT_S`.
    """
    if job.wait(RUN_TIMEOUT_S) != 0:
        raise InternalError(f"{what} failed:\n{job.read_tail()}")


def end_job(job: LocalJob, folder: Path, what: str) -> int:
    """Stop a job a few steps later, on all hosts at the same step, and return the number of steps.

    Raises:
        InternalError: the job failed, or is still running after `RUN_TIMEOUT_S`.
    """
    steps = max(status.progress.step for status in wait_healthy(job).hosts) + AHEAD_STEPS
    order_stop(folder, steps)
    wait_success(job, what)
    return steps


def run_bare(command: Sequence[str], work: Path) -> None:
    """Run the script on all hosts without this package; the variables BARE_* tell it how to connect.

    Raises:
        InternalError: a process failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    _run_processes(
        command,
        work,
        [
            {"BARE_COORDINATOR": address, "BARE_COUNT": str(HOSTS), "BARE_INDEX": str(index)}
            for index in range(HOSTS)
        ],
    )


def run_alone(
    command: Sequence[str],
    work: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = RUN_TIMEOUT_S,
) -> None:
    """Run the script on one host, without an agent.

    Raises:
        InternalError: the script failed.
    """
    _run_processes(command, work, [environment or {}], timeout_s)


def _run_processes(
    command: Sequence[str],
    work: Path,
    environments: Sequence[Mapping[str, str]],
    limit_s: float = RUN_TIMEOUT_S,
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as owned:
        processes: list[subprocess.Popen[bytes]] = []
        outputs = [work / f"output-{number}" for number in range(len(environments))]
        for output, environment in zip(outputs, environments, strict=True):
            process = subprocess.Popen(
                bind_to_this_process([sys.executable, *command]),
                env={**script_environment(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=owned.enter_context(output.open("wb")),
                stderr=subprocess.STDOUT,
            )
            owned.callback(process.wait)
            owned.callback(process.kill)
            processes.append(process)
        codes = [process.wait(limit_s) for process in processes]
    if any(codes):
        said = "\n".join(output.read_text(errors="replace")[-ERROR_CHARACTERS:] for output in outputs)
        raise InternalError(f"{' '.join(command)}: found exit codes {codes}, expected zeros:\n{said}")


def read_times(work: Path) -> list[float]:
    """Return the step times of all processes in seconds, without the first `COMPILING_STEPS` steps of each."""
    times: list[float] = []
    for path in work.glob("times-*.json"):
        times += msgspec.json.decode(path.read_bytes(), type=list[float])[COMPILING_STEPS:]
    return times


def wait_healthy(job: LocalJob) -> JobReport:
    """Return a report after all hosts have trained together for `HEALTHY_STEPS` steps."""
    return wait_training(job, make_host_names(HOSTS), HEALTHY_STEPS, REPORT_TIMEOUT_S)
