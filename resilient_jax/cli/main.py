"""The command line: `resilient-jax launch | agent | status | kill | bench | demo`."""

import sys

import typer

from resilient_jax.cli import agent, bench, demo, launch, status
from resilient_jax.errors import ResilientJaxError

app = typer.Typer(
    name="resilient-jax",
    help="Train with JAX on many hosts; go on when hosts die, and take them back when they return.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
SCRIPT_FOLLOWS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
app.command("launch", context_settings=SCRIPT_FOLLOWS)(launch.launch)
app.command("agent", context_settings=SCRIPT_FOLLOWS)(agent.agent)
app.command("status")(status.status)
app.command("kill")(status.kill)
app.command("demo")(demo.demo)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Runs a command; our own errors become one line and an exit code, never a traceback."""
    try:
        app()
    except ResilientJaxError as error:
        sys.stderr.write(f"resilient-jax: {error}\n")
        sys.exit(int(error.exit_code))


if __name__ == "__main__":
    main()
