"""`resilient-jax status` and `kill`: look at a running job, and break it on purpose."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from resilient_jax.errors import CallerError
from resilient_jax.world.inspection import JobReport, Part, pids_of, read_report
from resilient_jax.world.run_directory import read_contact


RunDirectoryArgument = Annotated[
    Path, typer.Argument(help="Run folder of the job, as `launch` printed it.", metavar="RUN_DIR")
]


def status(
    run_dir: RunDirectoryArgument,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Show generation, hosts, workers and services of a running job."""
    report = asyncio.run(read_report(read_contact(run_dir)))
    if json_output:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        return
    _print_report(report)


def kill(
    run_dir: RunDirectoryArgument,
    part: Annotated[Part, typer.Argument(help="What to kill.")],
    host: Annotated[
        str, typer.Argument(help="Which host; `leader` for the one that leads, and for its service.")
    ] = "leader",
    stop: Annotated[bool, typer.Option("--stop", help="SIGSTOP instead of SIGKILL.")] = False,
) -> None:
    """Break a part of a job on this machine, to see that training goes on."""
    report = asyncio.run(read_report(read_contact(run_dir)))
    number = signal.SIGSTOP if stop else signal.SIGKILL
    killed = list(pids_of(report, part, host))
    if not killed:
        raise CallerError(f"host {host} runs no {part} now; see `resilient-jax status {run_dir}`")
    for pid in killed:
        os.kill(pid, number)
    sys.stdout.write(f"{number.name} to {part} on {host}: process {', '.join(map(str, killed))}\n")


def _print_report(report: JobReport) -> None:
    console = Console()
    generation = report.generation
    if generation is None:
        console.print(f"job {report.job}: no generation yet, {len(report.hosts)} hosts registered")
    else:
        console.print(
            f"job {report.job}: generation {generation.number} ({generation.phase}, {generation.change}), "
            f"world {generation.world}, {len(generation.members)} hosts live, leader {report.leader}"
        )
    table = Table("host", "process", "worker", "incarnation", "pid", "step", "services", "notes")
    for host in report.hosts:
        member = generation.member(host.host) if generation else None
        worker = host.worker
        notes = ["draining"] if host.draining else []
        notes += ["stopped"] if worker and worker.stopped else []
        table.add_row(
            host.host,
            str(member.process_index) if member else "-",
            str(worker.report.state) if worker else "-",
            str(worker.incarnation) if worker else "-",
            str(worker.pid) if worker else "-",
            str(host.step),
            ", ".join(f"world {s.world}" for s in host.services) or "-",
            ", ".join(notes),
        )
    console.print(table)
