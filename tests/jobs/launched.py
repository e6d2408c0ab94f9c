"""`resilient-jax launch` of any script on a few hosts, run to its end."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.compile_cache import CACHE
from tests.support.paths import SCRIPTS
from tests.support.patience import patience
from tests.support.patient_job import PatientJob

JOBS = SCRIPTS
END_S = patience(12)
"""Timeout of a job of a few steps on a busy machine."""


def make_environment(*, cold: bool = False) -> dict[str, str]:
    """Return the environment of a launcher, with one thread for each operation.

    Arguments:
        cold: programs of earlier jobs are not found. For tests about what is compiled when.
    """
    inherited = {name: value for name, value in os.environ.items() if not (cold and name in CACHE)}
    return {**inherited, "OMP_NUM_THREADS": "1"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a launch ended.

    Attributes:
        output: everything that the launcher printed.
        last_words: the part after the line that names the logs, which the user reads last.
        worker_starts: number of workers started over the job.
        leftovers: processes that were still alive afterwards.
    """

    code: int
    output: str
    last_words: str
    worker_starts: int
    leftovers: list[int]


def run_launch(
    command: Sequence[str],
    run_directory: Path,
    *,
    hosts: int = 2,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a job to its end; return its exit code and output."""
    with PatientJob(
        command,
        num_hosts=hosts,
        run_directory=run_directory,
        options=["--devices-per-host", "1", *options],
        environment={**make_environment(), **(environment or {})},
    ) as job:
        code = job.wait(END_S)
        output = job.read_output()
        return Ended(
            code=code,
            output=output,
            last_words=output.rpartition("\nlogs and events: ")[2].partition("\n")[2],
            worker_starts=sum(event.kind == "worker.started" for event in job.read_events()),
            leftovers=job.find_processes(),
        )


def run_alone(command: Sequence[str], timeout_s: float = END_S, devices: int = 2) -> str:
    """Run a job's script on so many devices of one host, without a launcher; return what it prints."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **flags},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
