"""The step benchmark: step time of the trainer, and the work that is redone after a kill."""

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from resilient_jax.errors import CallerError
from tests.benchmarks.paths import JOBS
from tests.benchmarks.plotting import check_can_plot, run_plot_script
from tests.benchmarks.report import describe_machine, open_console, print_json_line
from tests.benchmarks.runs import COMPILING_STEPS, HOSTS
from tests.benchmarks.step.figures import StepFigures, overheads
from tests.benchmarks.step.loss_curve import record_curve
from tests.benchmarks.step.redone_work import MICROBATCHES, KillCampaign, run_kill_campaign
from tests.benchmarks.step.step_times import (
    BARE,
    EXACT,
    EXACT_SMALL,
    FAST,
    FAST_SMALL,
    Loop,
    LoopTimes,
    measure_steps,
)
from tests.benchmarks.step.sum_errors import SPARSE, SumErrors, measure_sum_errors

MIB = 2**20


def step(
    steady_steps: Annotated[
        int, typer.Option(help=f"Steps of each undisturbed window; the first {COMPILING_STEPS} compile.")
    ] = 20,
    windows: Annotated[int, typer.Option(help="Windows of each of the five loops, in turn.")] = 3,
    kills: Annotated[int, typer.Option(help="Workers to kill, one after the other.")] = 4,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also train a small model that loses two of its four hosts at one step, and draw its loss beside "
            "that of an undisturbed run into this PNG. Needs the extra `plot`, which is matplotlib."
        ),
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Measure the trainer's step time, and the work that is redone after a kill.

    4 hosts x 1 device, a transformer of 10 million float32 parameters with Adam,
    16 sequences of 64 bytes per step. The keys of the line of JSON:

    fast_overhead: the trainer with fast sums and microbatches of 4 sequences, one per
    host, over a data-parallel jax.jit step of the same model without this package.

    exact_overhead: exact sums over fast ones, both with microbatches of 1 sequence, 4
    per host; exact_overhead_one_microbatch: with microbatches of 4 sequences, 1 per host.
    These are medians over pairs of windows; exact_spread, fast_spread: the least and the
    largest of a pair.

    exact_memory_ratio: peak memory of a worker, exact over fast sums.

    exact_traffic_ratio: bytes that a host sends in a step, exact over fast, as the loopback
    device counts them: headers, mail and reports included.

    error_ratio, wide_error_ratio: the error of exact sums, and of those of
    reduction="exact_wide", over that of float32 sums in order: the largest of 4 to 4096
    microbatches, of elements of eight sizes that differ by six orders of magnitude, and
    of all arrays; error_ratio_by_array, error_ratio_sparse: of one, such as one that is
    zero in microbatch 0. sums_repeated: arrays whose sum is made again in bins for that.

    lost_microbatches, redone_microbatches: per kill. A worker is killed after it has
    computed its microbatches and before it enters the sum. Its microbatches are lost;
    those that were computed twice are redone. Equal is best: then no survivor redid
    work of its own.

    bitwise_equal: whether the weights after all kills are those of an undisturbed run
    on one host.

    step_s: median step times in seconds.

    The benchmark takes about fifteen minutes on two cores. With --steady-steps 6
    --windows 1 --kills 1 it takes four, but its times are then not meaningful.
    """
    if steady_steps <= COMPILING_STEPS or windows < 1 or kills < 1:
        raise CallerError(
            f"step: found --steady-steps {steady_steps}, --windows {windows}, --kills {kills}; expected more "
            f"than {COMPILING_STEPS} steps, of which the first compile, and at least one window and one kill"
        )
    script, drawing = JOBS / "step_job.py", JOBS / "plot_losses.py"
    if plot is not None:
        check_can_plot(plot)
    console = open_console(json_only)
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        work = Path(folder)
        console.print("step times: undisturbed windows, all loops in turn")
        times = measure_steps(script, work, steady_steps, windows, console)
        console.print("redone work: kills, each after all hosts train again")
        campaign = run_kill_campaign(script, work, kills, console)
        errors = measure_sum_errors()
        if plot is not None:
            console.print("loss curve: half of the hosts die at one step")
            run_plot_script(drawing, record_curve(script, work), work, plot)
            console.print(f"  {plot}")
    figures = make_figures(times, campaign, errors)
    for table in (_times_table(times), _work_table(campaign), _summary_table(figures, campaign)):
        console.print(table)
    print_json_line(figures)


def make_figures(times: Mapping[Loop, LoopTimes], campaign: KillCampaign, errors: SumErrors) -> StepFigures:
    """Return the figures of the line of JSON."""
    fast = overheads(times[FAST].windows, times[BARE].windows)
    exact = overheads(times[EXACT_SMALL].windows, times[FAST_SMALL].windows)
    one_microbatch = overheads(times[EXACT].windows, times[FAST].windows)
    return StepFigures(
        fast_overhead=round(statistics.median(fast), 4),
        fast_spread=(fast[0], fast[-1]),
        exact_overhead=round(statistics.median(exact), 4),
        exact_spread=(exact[0], exact[-1]),
        exact_overhead_one_microbatch=round(statistics.median(one_microbatch), 4),
        exact_memory_ratio=round(times[EXACT_SMALL].peak_rss_mib / times[FAST_SMALL].peak_rss_mib, 4),
        exact_traffic_ratio=round(times[EXACT_SMALL].sent_bytes / times[FAST_SMALL].sent_bytes, 4),
        error_ratio=errors.largest,
        error_ratio_by_array=errors.by_array,
        error_ratio_sparse=errors.by_array[SPARSE],
        sums_repeated=errors.repeated,
        wide_error_ratio=errors.wide,
        redone_microbatches=round(campaign.redone / len(campaign.kills), 3),
        lost_microbatches=round(campaign.lost / len(campaign.kills), 3),
        bitwise_equal=campaign.is_equal,
        step_s={loop.name: round(found.step_s, 4) for loop, found in times.items()},
        machine=describe_machine(),
    )


def _times_table(times: Mapping[Loop, LoopTimes]) -> Table:
    """Return the table of step times, of what a host sends, and of memory."""
    table = Table(title=f"a step on {HOSTS} hosts")
    table.add_column("loop")
    for name in ("median s", "5 % to 95 %", "n", "sent MiB", "peak RSS MiB"):
        table.add_column(name, justify="right")
    for loop, found in times.items():
        low, *_, high = statistics.quantiles(found.times_s, n=20, method="inclusive")
        table.add_row(
            loop.name,
            f"{found.step_s:.3f}",
            f"{low:.3f} to {high:.3f}",
            str(len(found.times_s)),
            f"{found.sent_bytes / MIB:.0f}",
            f"{found.peak_rss_mib:.0f}",
        )
    return table


def _work_table(campaign: KillCampaign) -> Table:
    table = Table(
        title=f"microbatches of each kill's step, of {MICROBATCHES}, as the processes computed them"
    )
    table.add_column("kill")
    for name in ("step", "lost with it", "computed again", "never computed"):
        table.add_column(name, justify="right")
    for kill, work in zip(campaign.kills, campaign.work, strict=True):
        table.add_row(kill.host, str(kill.step), str(work.lost), str(work.redone), str(work.missing))
    return table


def _summary_table(figures: StepFigures, campaign: KillCampaign) -> Table:
    table = Table("figure", "value", "aim", title=figures.machine)
    table.add_row(
        "fast sums over a jax.jit loop", _percent(figures.fast_overhead, figures.fast_spread), "2 %"
    )
    table.add_row(
        "exact over fast sums, 4 microbatches a host",
        _percent(figures.exact_overhead, figures.exact_spread),
        "5 %",
    )
    table.add_row(
        "exact over fast sums, 1 microbatch a host",
        f"{100 * figures.exact_overhead_one_microbatch:.1f} %",
        "5 %",
    )
    table.add_row("peak memory, exact over fast", f"{figures.exact_memory_ratio:.2f}", "1.5")
    table.add_row("bytes sent, exact over fast", f"{figures.exact_traffic_ratio:.2f}", "2")
    table.add_row("error, exact over float32 in order", f"{figures.error_ratio:.2f}", "1")
    table.add_row("of an array that is zero in microbatch 0", f"{figures.error_ratio_sparse:.2f}", "1")
    table.add_row("error, exact_wide over float32 in order", f"{figures.wide_error_ratio:.2f}", "1")
    table.add_row("microbatches lost, a kill", f"{figures.lost_microbatches:g}", "-")
    table.add_row("microbatches redone, a kill", f"{figures.redone_microbatches:g}", "as many")
    table.add_row(f"SHA-256 after {campaign.steps} steps with kills", campaign.digest, "the next")
    table.add_row("SHA-256 undisturbed, on one host", campaign.undisturbed, "-")
    return table


def _percent(median: float, spread: tuple[float, float]) -> str:
    low, high = spread
    return f"{100 * median:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
