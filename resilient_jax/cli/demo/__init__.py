"""`resilient-jax demo`: train on four hosts, kill parts of the job, show how training resumes."""

import enum
import importlib.resources
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from resilient_jax.cli.demo.results import (
    TrainingResult,
    parse_result,
    tabulate_recoveries,
    train_without_faults,
)
from resilient_jax.cli.demo.scenarios import NUM_HOSTS, ProgressPrinter, Recovery, Scenario
from resilient_jax.errors import CallerError, InternalError
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.observed_job import JobObserver

FILE_WIDTH: Final = 100
"""Columns of output that does not go to a terminal."""
DEVICES_PER_HOST: Final = 2
STAGE_DEVICES: Final = 1
"""A stage of a pipeline computes on one device."""
PARITY: Final = 2
"""Any two of the four hosts may be lost at once."""
LOSS_TOLERANCE: Final = 1e-3
"""The relative difference between losses under different plans after some dozens of steps."""
STEPS: Final = 60
SHARDED_STEPS: Final = 80
"""More than of the others: two hosts are killed only when the programs for two hosts fewer are compiled."""
PAUSE_S: Final = 0.25
"""Between two steps: on a fast machine the job would otherwise be done before the killed hosts are back."""
MESH_SETTINGS: Final = "configs/lm_tiny_mesh_planned.toml"
REPORT_INTERVAL_S: Final = 0.1
"""A poll of the store takes processor time from the stalls that are shown."""


class Act(enum.StrEnum):
    """One of the demo's scenarios, each with a job of its own, or all of them in turn."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    PLANNED = "planned"
    PIPELINED = "pipelined"
    MESH = "mesh"
    ALL = "all"


ActArgument = Annotated[
    Act,
    typer.Argument(
        help="replicated: every host has the complete state. sharded: each host has a quarter (FSDP); lost "
        "quarters are decoded from parity in the memory of other hosts. planned: training follows the fastest "
        "plan for the live hosts. pipelined: two hosts make a replica, each has half of the layers. mesh: two hosts "
        "make a replica with the state in shards; without one, three do. all: one after the other (some ten minutes).",
    ),
]


def demo(
    act: ActArgument = Act.REPLICATED,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of each training. Default: 60; for sharded 80."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Folder for logs and events. Default: a new folder in /tmp."),
    ] = None,
) -> None:
    """Train a small language model on 4 hosts, kill parts of the job, show how training resumes.

    By default a worker is killed, then the host of the leader, and both return. The demo compares all weights with
    those of the same training without faults: they are equal, bit for bit. (Losses are equal within 0.1 % where plans
    change.) It ends with a table of the faults and the phases of their stalls. Takes less than two minutes on
    two cores. Each host has 2 devices, in the pipelined act 1.
    """
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH, highlight=False)
    directory = run_dir or Path(tempfile.mkdtemp(prefix="resilient-jax-demo-"))
    stage = _Stage(console, directory, steps)
    chosen = list(_ACTS) if act is Act.ALL else [act]
    are_equal = [_ACTS[name](stage) for name in chosen]
    console.print(tabulate_recoveries(stage.recoveries))
    console.print(f"logs and events: {directory}")
    if act is Act.REPLICATED:
        console.print("more: resilient-jax demo sharded | planned | pipelined | mesh | all")
    if not all(are_equal):
        raise InternalError("the weights differ from those of the run without faults: please report it")


class _Stage:
    """Where the acts play: runs trainings with and without faults, and collects the recoveries.

    Attributes:
        console: where all is printed.
        recoveries: the recoveries of all jobs so far.
    """

    def __init__(self, console: Console, directory: Path, steps: int | None) -> None:
        self.console = console
        self.recoveries: list[Recovery] = []
        self._directory = directory
        self._steps = steps

    def choose_steps(self, default: int = STEPS) -> int:
        """Return how many steps the user wants, or this default."""
        return self._steps or default

    def make_command(self, steps: int, settings: str | None = None) -> list[str]:
        """Return the training script with its arguments, and with a file of settings in `configs`."""
        script = [str(find_bundled_file("examples/train_lm.py")), "--steps", str(steps)]
        # Of a mesh over hosts nobody has all weights.
        script += ["--digest"] if settings != MESH_SETTINGS else []
        return script if settings is None else [*script, "--config", str(find_bundled_file(settings))]

    def train(
        self,
        name: str,
        command: Sequence[str],
        steps: int,
        run: Callable[[Scenario], None],
        devices_per_host: int = DEVICES_PER_HOST,
    ) -> TrainingResult:
        """Run a job of so many steps under the faults of a scenario, and return the job's result."""
        directory = self._directory / name
        directory.mkdir(parents=True, exist_ok=True)
        config = directory / "job.toml"
        config.write_text(f"snapshot_parity = {PARITY}\n")
        with LocalJob(
            [*command, "--pause-s", str(PAUSE_S)],
            num_hosts=NUM_HOSTS,
            run_directory=directory,
            options=["--devices-per-host", str(devices_per_host), "--config", str(config)],
            observer=JobObserver(
                on_report=ProgressPrinter(self.console, steps).show, report_interval_s=REPORT_INTERVAL_S
            ),
        ) as job:
            scenario = Scenario(job, devices_per_host, self.console)
            run(scenario)
            scenario.wait_done()
            self.recoveries.extend(scenario.recoveries)
            return parse_result(job.read_output())

    def train_again(self, command: Sequence[str], devices_per_host: int = DEVICES_PER_HOST) -> TrainingResult:
        """Return the result of the same training on one host without faults."""
        self.console.print("[dim]the same training again, without faults, on one host[/]")
        return train_without_faults(command, devices_per_host)

    def compare_weights(self, found: TrainingResult, expected: TrainingResult) -> bool:
        """Print both results, and return whether they are equal."""
        for name, result in (("with kills:   ", found), ("without kills:", expected)):
            self.console.print(f"{name} loss {result.loss}, SHA-256 of all weights {result.digest or ''}")
        are_equal = found == expected and found.digest is not None
        if are_equal:
            self.console.print("[bold green]all weights are equal, bit for bit[/]")
        return are_equal

    def compare_losses(self, found: TrainingResult, expected: TrainingResult, which: str) -> bool:
        """Print both losses, and return whether they are equal but for the order in which plans add up."""
        self.console.print(f"loss with kills {found.loss}; without {which} {expected.loss}")
        # Rounding errors grow with the steps.
        return abs(float(found.loss) - float(expected.loss)) <= LOSS_TOLERANCE * float(expected.loss)


def _show_replicated_state(stage: _Stage) -> bool:
    stage.console.print("[bold]every host has the complete state[/]")
    steps = stage.choose_steps()
    command = stage.make_command(steps)
    found = stage.train("replicated", command, steps, Scenario.run_replicated_state)
    return stage.compare_weights(found, stage.train_again(command))


def _show_sharded_state(stage: _Stage) -> bool:
    stage.console.print("[bold]each host has a quarter of the state, and parity of the other quarters[/]")
    steps = stage.choose_steps(SHARDED_STEPS)
    command = stage.make_command(steps, "configs/lm_tiny_fsdp.toml")
    found = stage.train("sharded", command, steps, Scenario.run_sharded_state)
    return stage.compare_weights(found, stage.train_again(command))


def _show_plan(stage: _Stage) -> bool:
    stage.console.print("[bold]a plan shards the state over the devices of each host[/]")
    steps = stage.choose_steps()
    command = stage.make_command(steps, "configs/lm_tiny_planned.toml")
    found = stage.train("planned", command, steps, Scenario.run_planned_job)
    return stage.compare_losses(found, stage.train_again(stage.make_command(steps)), "plan and kills")


def _show_pipeline(stage: _Stage) -> bool:
    stage.console.print("[bold]two hosts make a replica: each has the parameters of its own layers alone[/]")
    steps = stage.choose_steps()
    command = stage.make_command(steps, "configs/lm_tiny_pipelined.toml")
    found = stage.train("pipelined", command, steps, Scenario.run_pipelined_job, STAGE_DEVICES)
    return stage.compare_weights(found, stage.train_again(command, STAGE_DEVICES))


def _show_mesh(stage: _Stage) -> bool:
    stage.console.print("[bold]two hosts make a replica: its devices share one copy of the state[/]")
    steps = stage.choose_steps()
    command = stage.make_command(steps, MESH_SETTINGS)
    found = stage.train("mesh", command, steps, Scenario.run_planned_job)
    stage.console.print("[dim]the same training again, without faults[/]")
    return stage.compare_losses(
        found, stage.train("mesh-undisturbed", command, steps, lambda _: None), "them"
    )


_ACTS: Final = {
    Act.REPLICATED: _show_replicated_state,
    Act.SHARDED: _show_sharded_state,
    Act.PLANNED: _show_plan,
    Act.PIPELINED: _show_pipeline,
    Act.MESH: _show_mesh,
}
"""Each prints what it does, and returns whether the training with faults had the expected result."""


def find_bundled_file(path: str) -> Path:
    """Return a file below `examples`, `configs` or `meshes`.

    A wheel has these folders inside the package (see `pyproject.toml`), a checkout beside the package. In both they are
    neighbors, so paths between them such as `../meshes/local_4x2.toml` are valid.

    Raises:
        CallerError: neither place has the file.
    """
    package = Path(str(importlib.resources.files("resilient_jax")))
    for root in (package, package.parent):
        if (root / path).is_file():
            return root / path
    raise CallerError(
        f"{path}: found no such file in {package} or beside it; expected one of the package's examples, configs or "
        "meshes. Check the name"
    )
