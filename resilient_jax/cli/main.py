"""The command line `resilient-jax`: `COMMANDS` lists what it can do."""

import dataclasses
import importlib
import importlib.metadata
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from resilient_jax.errors import ExitCode, ResilientJaxError
from resilient_jax.telemetry.screen_output import unblocked_output


@dataclasses.dataclass(frozen=True, slots=True)
class CommandSpec:
    """Where a command is defined, and under which heading `--help` lists it.

    Attributes:
        module: the module with a function, or a group of commands, of the command's name.
        task: the heading, which says for what the command is used.
    """

    module: str
    task: str


TRY, TRAIN, OBSERVE, PLAN = "See it work", "Train", "Observe and test a job", "Plan"
COMMANDS = {
    "demo": CommandSpec("resilient_jax.cli.demo", TRY),
    "doctor": CommandSpec("resilient_jax.cli.doctor", TRY),
    "launch": CommandSpec("resilient_jax.cli.launch", TRAIN),
    "agent": CommandSpec("resilient_jax.cli.agent", TRAIN),
    "status": CommandSpec("resilient_jax.cli.status", OBSERVE),
    "logs": CommandSpec("resilient_jax.cli.logs", OBSERVE),
    "events": CommandSpec("resilient_jax.cli.events", OBSERVE),
    "hosts": CommandSpec("resilient_jax.cli.hosts", OBSERVE),
    "kill": CommandSpec("resilient_jax.cli.kill", OBSERVE),
    "replay": CommandSpec("resilient_jax.cli.replay", OBSERVE),
    "plan": CommandSpec("resilient_jax.cli.plan", PLAN),
}
"""All commands in the order of `--help`. Only the command that the command line names is imported: an agent starts in
half the time."""

SCRIPT_FOLLOWS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
HELP = """Train with JAX on many hosts: training continues when hosts die, and hosts rejoin when they return.

First example, this machine as four hosts, of which one loses its worker:

    resilient-jax launch --hosts 4 --run-dir runs/first train.py
    resilient-jax kill runs/first worker host-1
    resilient-jax status runs/first

On a pod, run `resilient-jax agent` on every host instead of `launch`. `resilient-jax COMMAND --help` explains one.
"""


def build_app(names: Iterable[str]) -> typer.Typer:
    """Return the command line with these commands."""
    app = typer.Typer(
        name="resilient-jax",
        help=HELP,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_take_options)  # without a callback, typer drops the name of a single command
    for name in names:
        spec = COMMANDS[name]
        command = getattr(importlib.import_module(spec.module), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=spec.task)
        else:
            settings = SCRIPT_FOLLOWS if name in ("launch", "agent") else None
            app.command(name, rich_help_panel=spec.task, context_settings=settings)(command)
    return app


def _print_versions(is_asked: bool) -> None:
    if is_asked:
        names = ("resilient_jax", "jax", "jaxlib")
        typer.echo(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
        raise typer.Exit


def _take_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_versions,
            is_eager=True,
            help="Print the versions of this package and of JAX, and exit.",
        ),
    ] = False,
) -> None:
    """Take the options that come before a command: each does all by itself."""


def main() -> None:
    """Run a command; this package's own errors become one line and an exit code, never a traceback."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        build_app([asked] if asked in COMMANDS else COMMANDS)()
    except ResilientJaxError as error:
        with unblocked_output():  # an agent ends, whoever reads its last line
            sys.stderr.write(f"resilient-jax: {error}\n")
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:  # while the command was imported, which takes a second: nothing has begun
        sys.exit(int(ExitCode.INTERRUPTED))


if __name__ == "__main__":
    main()
