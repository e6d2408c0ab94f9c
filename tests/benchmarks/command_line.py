"""The command line of the benchmarks: `python tests/benchmarks NAME [OPTIONS]`."""

import sys

import typer

from resilient_jax.errors import ResilientJaxError
from tests.benchmarks.control.command import control
from tests.benchmarks.decide.command import decide
from tests.benchmarks.detect.command import detect
from tests.benchmarks.erasure.command import erasure
from tests.benchmarks.gpu.command import gpu
from tests.benchmarks.hybrid.command import hybrid
from tests.benchmarks.mesh.command import mesh
from tests.benchmarks.plan.command import plan
from tests.benchmarks.resilience.command import resilience
from tests.benchmarks.snapshot.command import snapshot
from tests.benchmarks.stall.command import stall
from tests.benchmarks.step.command import step

PROGRAM = "python tests/benchmarks"

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure. Each benchmark prints tables, and one line of JSON last.",
)
for command in (stall, step, erasure, snapshot, plan, decide, resilience, control, hybrid, mesh, detect, gpu):
    app.command(command.__name__)(command)


def main() -> None:
    """Run a benchmark; report an error of this package in one line and by its exit code, without a traceback."""
    try:
        app(prog_name=PROGRAM)
    except ResilientJaxError as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        sys.exit(int(error.exit_code))
