"""`resilient-jax kill`: kill a part of a running job on purpose."""

import asyncio
import contextlib
import os
import signal
import sys
from typing import Annotated

import typer

from resilient_jax.cli.job_contact import RunDirectoryArgument, find_contact
from resilient_jax.cluster.job_report import JobComponent, find_pids, read_job_report
from resilient_jax.errors import CallerError


def kill(
    run_dir: RunDirectoryArgument,
    part: Annotated[JobComponent, typer.Argument(help="What to kill.")],
    host: Annotated[
        str, typer.Argument(help="Which host; `leader` for the one that leads, and for its service.")
    ] = "leader",
    stop: Annotated[bool, typer.Option("--stop", help="SIGSTOP instead of SIGKILL.")] = False,
) -> None:
    """Kill a part of a job on this machine, to see training continue."""
    report = asyncio.run(read_job_report(find_contact(run_dir)))
    number = signal.SIGSTOP if stop else signal.SIGKILL
    killed = list(find_pids(report, part, host))
    if not killed:
        raise CallerError(f"host {host} runs no {part} now; see `resilient-jax status {run_dir}`")
    for pid in killed:
        # The store's records lag behind, so the process may be dead already.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    sys.stdout.write(f"{number.name} to {part} on {host}: process {', '.join(map(str, killed))}\n")
