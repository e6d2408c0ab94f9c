"""`resilient-jax launch` of any script on a few hosts, run to its end."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilient_jax.chaos.local_job import LocalJob

JOBS = Path(__file__).parent.parent / "e2e" / "jobs"
END_S = 120.0
"""Timeout of a job of a few steps on a busy machine."""


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
    with LocalJob(
        command,
        num_hosts=hosts,
        run_directory=run_directory,
        options=["--devices-per-host", "1", *options],
        environment={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
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
