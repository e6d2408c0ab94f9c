"""The resilience benchmark: this package and restarts from Orbax checkpoints, under the same failures."""

import dataclasses
import enum
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from resilient_jax.errors import CallerError
from tests.benchmarks.paths import JOBS
from tests.benchmarks.plotting import check_can_plot, run_plot_script
from tests.benchmarks.report import describe_machine, open_console, print_json_line
from tests.benchmarks.resilience.campaign import BEST, FULL, QUICK, TINY, ResilienceCampaign
from tests.benchmarks.resilience.figures import (
    BARE,
    DEFAULTS,
    FAST,
    OURS,
    ResilienceFigures,
    best_baseline,
    make_resilience_figures,
    rates_of,
)
from tests.benchmarks.resilience.plot_data import make_resilience_plot


class CampaignSize(enum.StrEnum):
    """Name of a campaign's scale."""

    TINY = "tiny"
    QUICK = "quick"
    FULL = "full"


SCALES = {CampaignSize.TINY: TINY, CampaignSize.QUICK: QUICK, CampaignSize.FULL: FULL}


def resilience(
    size: Annotated[
        CampaignSize,
        typer.Option(
            help="quick: one failure in 100, 50 and 20 steps, about 15 minutes on two idle cores. full: from one in "
            "500 to one in 5, about two hours. tiny: a tiny model on two hosts, to see that it runs."
        ),
    ] = CampaignSize.QUICK,
    failure_every: Annotated[
        list[int] | None,
        typer.Option(
            help="Other rates: one failure in so many steps; may be repeated. All seven of full at the size of quick "
            "take half an hour."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Runs of each system and rate, each with a schedule of its own.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of the first schedule; the next ones count on.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw committed steps over time into this PNG, and an SVG beside it. Needs the extra `plot`, which is "
            "matplotlib."
        ),
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Compare this package with restarts from Orbax checkpoints, on the same model, data, hosts and failures.

    4 hosts x 1 device, a transformer of 10 million float32 parameters with Adam, 16
    sequences of 64 bytes per step. A failure is SIGKILL of one worker in the middle of
    a step. The schedule (steps and hosts) is seeded, and the same for all systems.

    The baseline: a supervisor detects a death at once, ends the other processes and
    restarts all; asynchronous Orbax checkpoints on local disk every n steps. n: best by
    Young and Daly from the cost of a checkpoint measured here and the rate; 10; 50.
    JAX's compilation cache is on and made to hit in every process, which JAX alone does
    not do. With JAX's defaults the survivors end when the heartbeat expires: one such
    failure is measured, and the rest computed from the baseline with the best n.

    Rates that would take too many steps are run shorter, with one failure, and padded
    with steps at the system's own pace; the table shows how many.

    Ours runs twice: with exact sums, whose weights do not depend on which hosts
    survive, and with fast ones (rj.Parallelism(reduction="fast")).

    stall: from SIGKILL to the end of the next step, that step included. goodput: the
    productive share of time; see tests/benchmarks/resilience/timeline.py for the
    buckets. Throughput: tokens per second and live device; all four devices count as
    live all the time.
    """
    if repeats < 1:
        raise CallerError(f"resilience: found --repeats {repeats}, expected at least 1")
    scale = SCALES[size]
    if failure_every:
        scale = dataclasses.replace(scale, failure_every=tuple(sorted(set(failure_every), reverse=True)))
    drawing = JOBS / "plot_resilience.py"
    if plot is not None:
        check_can_plot(plot)
    console = open_console(json_only)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        campaign = ResilienceCampaign(
            scale=scale, work=Path(folder), console=console, repeats=repeats, seed=seed
        )
        campaign.run()
        if plot is not None:
            run_plot_script(
                drawing, make_resilience_plot(campaign.runs, campaign.timelines), Path(folder), plot
            )
            console.print(f"  {plot} and {plot.with_suffix('.svg').name}")
    figures = make_resilience_figures(
        campaign.runs,
        paces=campaign.paces,
        costs_s=campaign.costs_s,
        blocking_s=campaign.blocking_s,
        defaults_stall_s=campaign.defaults_stall_s,
        bitwise_equal=not campaign.unequal,
        load=(round(load_before, 2), round(os.getloadavg()[0], 2)),
        machine=describe_machine(),
        failed=campaign.failed,
    )
    console.print(_runs_table(figures))
    console.print(_summary_table(figures))
    for run in campaign.failed:
        console.print(f"[red]did not come to its end: {escape(run)}")
    for run in campaign.unequal:
        console.print(f"[red]other weights than undisturbed: {run}")
    print_json_line(figures)


def _runs_table(figures: ResilienceFigures) -> Table:
    table = Table(
        title="each run: tokens/s and living device; shares of time (good to init); in s: mean stall, until the\n"
        "failed step is regained, all that is not productive a failure; MiB a host; steps + padded; * computed",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("1 in", "system", "n"):
        table.add_column(name, no_wrap=True)
    names = (
        "steps",
        "tok/s",
        "good",
        "slow",
        "waste",
        "recov",
        "init",
        "redone",
        "stall",
        "regain",
        "cost",
        "MiB",
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for run in sorted(figures.runs, key=lambda run: -run.failure_every):
        wall_s = run.buckets.wall_s
        parts = (run.buckets.slower, run.buckets.wasted, run.buckets.recovery, run.buckets.reinitialisation)
        table.add_row(
            str(run.failure_every),
            run.system + ("*" if run.computed else ""),
            str(run.checkpoint_every or ""),
            f"{run.measured}+{run.padded}" if run.padded else str(run.measured),
            f"{run.tokens_per_s:.0f}",
            f"{run.goodput:.3f}",
            *(f"{part / wall_s:.3f}" for part in parts),
            str(run.redone),
            f"{sum(run.stalls_s) / len(run.stalls_s):.1f}",
            f"{sum(run.regained_s) / len(run.regained_s):.1f}",
            f"{run.cost_s:.1f}",
            f"{run.host_mib:.0f}",
        )
    return table


def _summary_table(figures: ResilienceFigures) -> Table:
    load = f"load {figures.load[0]:g} before, {figures.load[1]:g} after"
    table = Table("figure", "value", "aim", title=f"{figures.machine}; {load}")
    table.add_row(f"stall, s, {OURS}, n = {figures.stall.n}", figures.stall.text(), "-")
    table.add_row(f"stall, s, restart, n = {figures.baseline_stall.n}", figures.baseline_stall.text(), "-")
    table.add_row("  until the step that failed is done", figures.baseline_regained.text(), "-")
    if figures.defaults_stall_s is not None:
        table.add_row(f"stall, s, {DEFAULTS}, n = 1", f"{figures.defaults_stall_s:.1f}", "-")
    table.add_row("stall of restart over ours", f"{figures.stall_ratio:.1f}", "10")
    less = f"{figures.stall_less_a_step_s:.2f}; restart {figures.baseline_stall_less_a_step_s:.2f}"
    table.add_row("stall less a step without failures, s", less, "-")
    aims = {"20": "2.0"}
    for rate in map(str, rates_of(figures.runs)):
        best = best_baseline(figures.runs, int(rate))
        ratio = figures.throughput_spread[rate]
        name = f"effective throughput over {best}, 1 in {rate}, n = {ratio.n}"
        table.add_row(name, ratio.text(), aims.get(rate, "-"))
        if rate in figures.fast_throughput_ratios:
            table.add_row(f"  {FAST}", f"{figures.fast_throughput_ratios[rate]:.2f}", "-")
    for rate, goodput in figures.goodputs.items():
        found = f"{goodput:.3f}; best baseline {figures.baseline_goodputs[rate]:.3f}"
        table.add_row(f"goodput, 1 in {rate}", found, "0.9" if rate == "100" else "-")
    table.add_row("committed steps that ours did again", str(figures.steps_lost), "0")
    table.add_row("weights bit for bit those of an undisturbed run", str(figures.bitwise_equal), "True")
    for name in (OURS, FAST, BARE):
        table.add_row(f"a step without failures, s, {name}", f"{figures.step_s[name]:.3f}", "-")
    cost = figures.checkpoint_cost
    table.add_row(f"an Orbax checkpoint, s, n = {cost.n}; best n from it: see {BEST}", cost.text(), "-")
    return table
