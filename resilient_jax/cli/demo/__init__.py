"""`resilient-jax demo`: train on four hosts, kill six things in turn, show how it went on."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from resilient_jax.cli.checkout import find_in_checkout
from resilient_jax.cli.demo.results import (
    TrainingResult,
    parse_result,
    tabulate_recoveries,
    train_without_faults,
)
from resilient_jax.cli.demo.scenarios import HOSTS, Recovery, Scenario
from resilient_jax.cluster.local_job import LocalJob
from resilient_jax.errors import InternalError

DEVICES_PER_HOST: Final = 2
PARITY: Final = 2
"""Of four hosts any two may be lost at once."""
LOSS_TOLERANCE: Final = 1e-3
"""Part of the loss by which trainings under other plans may differ after some dozens of steps."""


def demo(
    steps: Annotated[int, typer.Option(help="Steps to train, each time.")] = 50,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Where logs and events go. Default: a new folder in /tmp."),
    ] = None,
) -> None:
    """Train a small language model on 4 hosts x 2 devices, kill things, show how training went on.

    First every host has the whole state; then each has a quarter of it (FSDP), and what is lost comes back from parity
    in the memory of the others; then the trainer follows the fastest plan for the hosts at hand, which changes when one
    dies. Takes about seven minutes on two cores. Ends with a table: each incident, what noticed it, the phases of the
    stall, and the weights beside those of runs that nobody touched: the same, bit for bit; of the planned run the
    loss, within 0.1 %.
    """
    console = Console(width=None if sys.stdout.isatty() else 150)
    directory = run_dir or Path(tempfile.mkdtemp(prefix="resilient-jax-demo-"))
    script = [str(find_in_checkout("examples/train_lm.py")), "--steps", str(steps), "--digest"]
    sharded = [*script, "--config", str(find_in_checkout("configs/lm_tiny_fsdp.toml"))]
    incidents: list[Recovery] = []
    console.print("[bold]every host has the whole state[/]")
    whole = _act(console, directory / "whole", script, steps, Scenario.run_replicated_state, incidents)
    console.print("[bold]each host has a part of the state[/]")
    cut = _act(console, directory / "sharded", sharded, steps, Scenario.run_sharded_state, incidents)
    console.print("[bold]a plan says how the devices work together[/]")
    planned = [*script, "--config", str(find_in_checkout("configs/lm_tiny_planned.toml"))]
    loss = _break(console, directory / "planned", planned, steps, Scenario.run_planned_job, incidents).loss
    console.print(tabulate_recoveries(incidents, DEVICES_PER_HOST))
    is_equal = [_compare(console, *endings) for endings in (("whole state", *whole), ("sharded state", *cut))]
    is_equal.append(_compare_losses(console, float(loss), float(whole[1].loss)))
    console.print(f"logs and events: {directory}")
    if not all(is_equal):
        raise InternalError("the weights differ from those of the undisturbed run: please report it")


def _act(
    console: Console,
    directory: Path,
    command: list[str],
    steps: int,
    play: Callable[[Scenario], None],
    incidents: list[Recovery],
) -> tuple[TrainingResult, TrainingResult]:
    """How a job ended that was broken, and how the same ends that was not."""
    found = _break(console, directory, command, steps, play, incidents)
    console.print("the same training again, undisturbed, on one host")
    return found, train_without_faults(command, DEVICES_PER_HOST)


def _break(
    console: Console,
    directory: Path,
    command: list[str],
    steps: int,
    play: Callable[[Scenario], None],
    incidents: list[Recovery],
) -> TrainingResult:
    """How a job ended that was broken."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "job.toml"
    config.write_text(f"snapshot_parity = {PARITY}\n")
    options = ["--devices-per-host", str(DEVICES_PER_HOST), "--config", str(config)]
    with LocalJob(command, num_hosts=HOSTS, run_directory=directory, options=options) as job:
        story = Scenario(job, console, steps)
        play(story)
        story.wait_done()
        found = parse_result(job.read_output())
    incidents += story.recoveries
    return found


def _compare(console: Console, what: str, found: TrainingResult, expected: TrainingResult) -> bool:
    console.print(f"{what}, with kills:   loss {found.loss}, SHA-256 of all weights {found.digest}")
    console.print(f"{what}, undisturbed:  loss {expected.loss}, SHA-256 of all weights {expected.digest}")
    if found.digest == expected.digest:
        console.print("[bold green]all weights are equal, bit for bit[/]")
    return found == expected


def _compare_losses(console: Console, found: float, expected: float) -> bool:
    """Of the same training under other plans: other orders of addition, which grow over the steps."""
    console.print(f"planned, with kills:   loss {found}; the same without plan or kill: {expected}")
    return abs(found - expected) <= LOSS_TOLERANCE * expected
