"""`resilient-jax demo`: train on four hosts, inject six faults one after the other, show how training resumes."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from resilient_jax.chaos.local_job import LocalJob
from resilient_jax.cli.bundled_files import find_bundled_file
from resilient_jax.cli.demo.results import (
    TrainingResult,
    parse_result,
    tabulate_recoveries,
    train_without_faults,
)
from resilient_jax.cli.demo.scenarios import NUM_HOSTS, ProgressPrinter, Recovery, Scenario
from resilient_jax.errors import InternalError

FILE_WIDTH: Final = 150
"""Columns of output that does not go to a terminal."""
DEVICES_PER_HOST: Final = 2
PARITY: Final = 2
"""Any two of the four hosts may be lost at once."""
LOSS_TOLERANCE: Final = 1e-3
"""The relative difference between losses under different plans after some dozens of steps."""
REPORT_INTERVAL_S: Final = 0.1
"""A poll of the store takes processor time from the stalls that are shown."""


def demo(
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 50,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Folder for logs and events. Default: a new folder in /tmp."),
    ] = None,
) -> None:
    """Train a small language model on 4 hosts x 2 devices, kill parts of the job, show how training resumes.

    First the state is replicated on every host. Then the state is sharded (FSDP): each host has a quarter, and lost
    quarters are decoded from parity in the memory of the other hosts. Then the trainer follows the fastest plan for the
    live hosts, which changes when a host dies. Takes about seven minutes on two cores. Ends with a table of the faults,
    their detectors and the phases of their stalls. The weights are those of runs without faults, bit for bit; the loss
    of the planned run is equal within 0.1 %.
    """
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    directory = run_dir or Path(tempfile.mkdtemp(prefix="resilient-jax-demo-"))
    script = [str(find_bundled_file("examples/train_lm.py")), "--steps", str(steps), "--digest"]
    sharded = [*script, "--config", str(find_bundled_file("configs/lm_tiny_fsdp.toml"))]
    planned = [*script, "--config", str(find_bundled_file("configs/lm_tiny_planned.toml"))]
    recoveries: list[Recovery] = []

    def train(name: str, command: list[str], scenario: Callable[[Scenario], None]) -> TrainingResult:
        progress = ProgressPrinter(console, steps)
        result, found = _train_with_faults(console, directory / name, command, progress, scenario)
        recoveries.extend(found)
        return result

    console.print("[bold]every host has the complete state[/]")
    replicated_found = train("replicated", script, Scenario.run_replicated_state)
    replicated_expected = _train_again(console, script)
    console.print("[bold]each host has a part of the state[/]")
    sharded_found = train("sharded", sharded, Scenario.run_sharded_state)
    sharded_expected = _train_again(console, sharded)
    console.print("[bold]a plan shards the state over the devices of each host[/]")
    planned_loss = train("planned", planned, Scenario.run_planned_job).loss
    console.print(tabulate_recoveries(recoveries, DEVICES_PER_HOST))
    are_equal = [
        _compare(console, "replicated state", replicated_found, replicated_expected),
        _compare(console, "sharded state", sharded_found, sharded_expected),
        _compare_losses(console, float(planned_loss), float(replicated_expected.loss)),
    ]
    console.print(f"logs and events: {directory}")
    if not all(are_equal):
        raise InternalError("the weights differ from those of the run without faults: please report it")


def _train_with_faults(
    console: Console,
    directory: Path,
    command: list[str],
    progress: ProgressPrinter,
    run_scenario: Callable[[Scenario], None],
) -> tuple[TrainingResult, list[Recovery]]:
    """Run a job under the faults of a scenario, and return the job's result and recoveries."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "job.toml"
    config.write_text(f"snapshot_parity = {PARITY}\n")
    with LocalJob(
        command,
        num_hosts=NUM_HOSTS,
        run_directory=directory,
        options=["--devices-per-host", str(DEVICES_PER_HOST), "--config", str(config)],
        on_report=progress.show,
        report_interval_s=REPORT_INTERVAL_S,
    ) as job:
        scenario = Scenario(job, console)
        run_scenario(scenario)
        scenario.wait_done()
        return parse_result(job.read_output()), scenario.recoveries


def _train_again(console: Console, command: list[str]) -> TrainingResult:
    console.print("the same training again, without faults, on one host")
    return train_without_faults(command, DEVICES_PER_HOST)


def _compare(console: Console, name: str, found: TrainingResult, expected: TrainingResult) -> bool:
    """Print both results, and return whether they are equal."""
    console.print(f"{name}, with kills:     loss {found.loss}, SHA-256 of all weights {found.digest}")
    console.print(f"{name}, without kills:  loss {expected.loss}, SHA-256 of all weights {expected.digest}")
    if found.digest == expected.digest:
        console.print("[bold green]all weights are equal, bit for bit[/]")
    return found == expected


def _compare_losses(console: Console, found: float, expected: float) -> bool:
    """Print both losses, and return whether they are close: plans sum in different orders, and rounding errors grow."""
    console.print(f"planned, with kills:   loss {found}; the same without plan or kill: {expected}")
    return abs(found - expected) <= LOSS_TOLERANCE * expected
