"""The command line: `resilient-jax launch | agent | status | kill | plan | chaos | demo`."""

import importlib
import sys
from collections.abc import Iterable

import typer

from resilient_jax.errors import ResilientJaxError

COMMAND_MODULES = {
    "launch": "resilient_jax.cli.launch",
    "agent": "resilient_jax.cli.agent",
    "status": "resilient_jax.cli.status",
    "kill": "resilient_jax.cli.kill",
    "plan": "resilient_jax.cli.plan",
    "chaos": "resilient_jax.cli.chaos",
    "demo": "resilient_jax.cli.demo",
}
"""Modules with a function, or a group of commands, of the command's name. Only the command that the command line names
is imported: an agent starts in half the time."""

SCRIPT_FOLLOWS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
HELP = "Train with JAX on many hosts: training continues when hosts die, and hosts rejoin when they return."


def build_app(names: Iterable[str]) -> typer.Typer:
    """Return the command line with these commands."""
    app = typer.Typer(
        name="resilient-jax",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # without a callback, typer drops the name of a single command
    for name in names:
        command = getattr(importlib.import_module(COMMAND_MODULES[name]), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, context_settings=SCRIPT_FOLLOWS if name in ("launch", "agent") else None)(
                command
            )
    return app


def main() -> None:
    """Run a command; this package's own errors become one line and an exit code, never a traceback."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        build_app([asked] if asked in COMMAND_MODULES else COMMAND_MODULES)()
    except ResilientJaxError as error:
        sys.stderr.write(f"resilient-jax: {error}\n")
        sys.exit(int(error.exit_code))


if __name__ == "__main__":
    main()
