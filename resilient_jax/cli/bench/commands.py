"""`resilient-jax bench ...`: the group of the benchmarks."""

import typer

from resilient_jax.cli.bench.erasure import erasure
from resilient_jax.cli.bench.plan import plan
from resilient_jax.cli.bench.resilience import resilience
from resilient_jax.cli.bench.snapshot import snapshot
from resilient_jax.cli.bench.stall import stall
from resilient_jax.cli.bench.step import step

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
