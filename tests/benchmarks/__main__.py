"""`resilient-jax bench ...`: the group of the benchmarks."""

import typer

from benchmarks.erasure.command import erasure
from benchmarks.plan.command import plan
from benchmarks.resilience.command import resilience
from benchmarks.snapshot.command import snapshot
from benchmarks.stall.command import stall
from benchmarks.step.command import step

bench = typer.Typer(no_args_is_help=True, help="Measure; each prints a table and one line of JSON.")


@bench.callback()
def _measure() -> None:
    """Measure; each benchmark prints a table and one line of JSON."""


bench.command("erasure")(erasure)
bench.command("plan")(plan)
bench.command("resilience")(resilience)
bench.command("snapshot")(snapshot)
bench.command("stall")(stall)
bench.command("step")(step)
