"""The command line of the benchmarks: `python tests/benchmarks NAME [OPTIONS]`."""

import sys

import typer

from benchmarks.control.command import control
from benchmarks.decide.command import decide
from benchmarks.detect.command import detect
from benchmarks.erasure.command import erasure
from benchmarks.gpu.command import gpu
from benchmarks.hybrid.command import hybrid
from benchmarks.plan.command import plan
from benchmarks.resilience.command import resilience
from benchmarks.snapshot.command import snapshot
from benchmarks.stall.command import stall
from benchmarks.step.command import step
from resilient_jax.errors import ResilientJaxError

PROGRAM = "python tests/benchmarks"

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure. Each benchmark prints tables, and one line of JSON last.",
)
for command in (stall, step, erasure, snapshot, plan, decide, resilience, control, hybrid, detect, gpu):
    app.command(command.__name__)(command)


def main() -> None:
    """Run a benchmark; report an error of this package in one line and by its exit code, without a traceback."""
    try:
        app(prog_name=PROGRAM)
    except ResilientJaxError as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        sys.exit(int(error.exit_code))
