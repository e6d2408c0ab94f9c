"""`resilient-jax doctor`: examine this machine, and show what works, what does not, and what to do."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from resilient_jax.cli.console import open_console
from resilient_jax.cli.ending_signals import ended_by_signals
from resilient_jax.cli.options import check_platform
from resilient_jax.doctor.check_result import CheckResult, CheckVerdict, Examination
from resilient_jax.doctor.examination import choose_platform, examine
from resilient_jax.doctor.gpu_inventory import read_gpus

MAX_WIDTH = 100
"""Columns of the table, also in a file: it is read in terminals and pasted into reports."""
STYLES = {
    CheckVerdict.OK: "green",
    CheckVerdict.WARNING: "yellow",
    CheckVerdict.PROBLEM: "bold red",
    CheckVerdict.NOT_RUN: "dim",
}
HAS_PROBLEM = 1
"""Exit code of a machine with a problem."""


def doctor(
    platform: Annotated[
        str | None,
        typer.Option(
            help="What workers would compute on: cpu or gpu. Default: gpu where nvidia-smi lists one, else cpu."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    no_experiments: Annotated[
        bool,
        typer.Option(
            "--no-experiments", help="Make checks only: experiments take 10 s on CPU, some minutes on GPUs."
        ),
    ] = False,
) -> None:
    """Examine this machine before a job runs on it: what is installed, what is allowed, and what survives.

    Run it once on every kind of host, with --json to keep the result or to report a problem. It checks versions of
    JAX, CUDA and NCCL; the environment and flags of a worker; memory, descriptors and system calls; ports, loopback and
    interfaces; the GPUs that nvidia-smi lists, how they are linked, and, with the extra gpu-health, whether they have
    errors.

    Then it makes experiments with up to three processes of its own, which share a GPU where there is only one: one is
    killed in a collective, and the others are released, and add up without it; a new one takes its place; one is
    stopped while the others meet; one leaves its backend and gives its memory back. Each has a deadline, and no process
    is left, also after Ctrl-C. On GPUs they take 128 MiB of the first three.

    Each line is ok, warning (jobs run, but slower, or recover in another way), problem (jobs do not run, or do not
    survive) or not run. The exit code is 0 without a problem, 1 with one.

    Example: resilient-jax doctor --platform cpu
    """
    chosen = check_platform(platform)
    with ended_by_signals():
        inventory = read_gpus()
        where = chosen or choose_platform(inventory)
        checks = examine(where, inventory, dict(os.environ), Path.cwd(), has_experiments=not no_experiments)
        with contextlib.closing(checks):
            results = tuple(_show_progress(result) for result in checks)
    found = Examination(platform=where, results=results)
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        with open_console() as console:
            console.width = min(console.width, MAX_WIDTH)
            print_examination(console, found)
    if found.count(CheckVerdict.PROBLEM):
        raise typer.Exit(HAS_PROBLEM)


def print_examination(console: Console, found: Examination) -> None:
    """Print a table of all checks, what to do, and a line that counts them."""
    table = Table(title=f"This machine, with workers on {found.platform}", show_lines=False)
    for name in ("check", "verdict", "found"):
        table.add_column(name, overflow="fold", no_wrap=name == "verdict")
    groups = list(dict.fromkeys(result.group for result in found.results))
    for group in groups:
        table.add_section()
        table.add_row(f"[bold]{group}", "", "")
        for result in (result for result in found.results if result.group == group):
            table.add_row(f"  {result.name}", _format_verdict(result), _describe(result))
    console.print(table)
    for result in found.results:
        if result.details:
            console.print(f"\n{result.name}:\n{escape(result.details)}", highlight=False, soft_wrap=True)
    counts = ", ".join(
        f"{found.count(verdict)} {verdict.replace('_', ' ')}"
        for verdict in CheckVerdict
        if found.count(verdict)
    )
    console.print(f"{counts}; what is known of GPUs: docs/gpus.md", highlight=False)


def _format_verdict(result: CheckResult) -> str:
    return f"[{STYLES[result.verdict]}]{result.verdict.replace('_', ' ')}"


def _describe(result: CheckResult) -> str:
    remedy = f"\n[bold]-> {escape(result.remedy)}" if result.remedy else ""
    return f"{escape(result.found)}{remedy}"


def _show_progress(result: CheckResult) -> CheckResult:
    """Write a result's name to standard error, if a person waits there for the others."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{result.group}: {result.name}: {result.verdict.replace('_', ' ')}\n")
    return result
