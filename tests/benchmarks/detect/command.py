"""The detect benchmark: how well slow devices are found, on simulated jobs."""

import enum
from typing import Annotated

import typer
from rich.table import Table

from resilient_jax.errors import CallerError
from tests.benchmarks.detect.audit_cost import measure_audit_cost
from tests.benchmarks.detect.corrupt_hosts import judge_corrupt_hosts
from tests.benchmarks.detect.figures import (
    CorruptionFigures,
    DetectFigures,
    DetectLine,
    make_corruption_figures,
    make_detect_line,
)
from tests.benchmarks.detect.quiet_jobs import QuietFigures, judge_quiet_jobs
from tests.benchmarks.detect.real_work import RealWorkFigures, measure_real_work
from tests.benchmarks.detect.simulated_job import SIZES, SimulatedJob
from tests.benchmarks.detect.slow_host import SlowHostFigures, measure_slow_host
from tests.benchmarks.detect.verdicts import judge_job
from tests.benchmarks.report import describe_machine, open_console, print_json_line

AIMS = {
    "error_microbatch": "0.012",
    "error_step": "0.028",
    "false_alarms_per_job": "0.1",
    "missed": "0.01",
    "found_within_steps": "2, 3",
    "accuracy": "0.994",
    "detector_overhead": "0.005",
}


class Half(enum.StrEnum):
    """Half of the seeds."""

    DEVELOPMENT = "development"
    FIGURES = "figures"


def detect(
    jobs: Annotated[int, typer.Option(help="Of each size; every other one has a slow device.")] = 100,
    half: Annotated[
        Half, typer.Option(help="Of the seeds. Constants were chosen on one; figures are of the other.")
    ] = Half.FIGURES,
    sizes: Annotated[list[str] | None, typer.Option(help="Repeat for several. [all]")] = None,
    real: Annotated[
        bool,
        typer.Option(
            help="Run jobs of four hosts on this machine, with audits, with a slow host; and real microbatches."
        ),
    ] = True,
    quiet_hours: Annotated[int, typer.Option(help="Of simulated jobs in which nothing hangs.")] = 500,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Find slow devices and hosts that compute wrongly, in simulated jobs.

    Slow devices beside a plain detector on step times.

    Packed documents of widely varying lengths, as tables 4 and 5 of ResiHP set
    up. The keys of the line of JSON, for all sizes together and by size:

    error_microbatch, error_step: mean of |predicted / observed - 1|; of a step
    predicted as the longest path of its schedule. error_least: what the first
    would be if alpha and beta were known.

    false_alarms_per_job, missed, accuracy: findings that are wrong; share of
    slow devices not found; share of jobs with the right verdict. With "plain_":
    of change points of step times alone, which need not name the device.

    found_within_steps: median and 95th percentile, the first slow one counted.

    detector_overhead: processor time of the detector over the time of a step.

    sdc_found, sdc_false: share of hosts that compute wrongly and are named
    within three audits of them; of jobs in which another one is named.
    audit_overhead: of the time of a step, with the default share.

    slow_host_throughput: of a real job with one of four hosts at half speed,
    over what the speeds add up to. With "_even": without balance_by_speed.

    error_microbatch_real: as error_microbatch, of the example's model on packed
    documents on this machine. error_without_lengths: by the median alone.

    false_kills: hosts that would be killed in jobs in which nothing hangs,
    though steps, input, checkpoints and pauses vary widely.

    The benchmark takes some minutes on one core.
    """
    names = list(dict.fromkeys(sizes or SIZES))
    if jobs < 2 or any(name not in SIZES for name in names):
        raise CallerError(
            f"detect: found --jobs {jobs}, --sizes {', '.join(names)}; expected 2 jobs or more, sizes of "
            f"{', '.join(SIZES)}"
        )
    console = open_console(json_only)
    verdicts = {name: [judge_job(make_job(name, half, number)) for number in range(jobs)] for name in names}
    always, half_the_time = (judge_corrupt_hosts(jobs * len(names), rate, str(half)) for rate in (1.0, 0.5))
    corruption = make_corruption_figures(always, half_the_time, measure_audit_cost() if real else None)
    slow_host = measure_slow_host() if real else None
    real_work = measure_real_work() if real else None
    quiet = judge_quiet_jobs(quiet_hours, str(half))
    machine = describe_machine()
    line = make_detect_line(verdicts, corruption, slow_host, real_work, quiet, str(half), machine)
    console.print(_make_table(line))
    console.print(_make_audit_table(corruption))
    if slow_host is not None:
        console.print(_make_slow_host_table(slow_host))
    if real_work is not None:
        console.print(_make_real_work_table(real_work))
    console.print(_make_quiet_table(quiet))
    print_json_line(line)


def make_job(size: str, half: Half, number: int) -> SimulatedJob:
    """Return a job of a half: jobs of one share no seed with those of the other; odd ones have a slow device."""
    return SimulatedJob(SIZES[size], f"{half} {size} {number}", is_slow=bool(number % 2))


def _make_table(line: DetectLine) -> Table:
    table = Table(title=f"{line.total.jobs} simulated jobs, {line.half} half of the seeds")
    table.add_column("figure")
    for name in ("all", *line.by_size, "aim"):
        table.add_column(name, justify="right")
    for name in DetectFigures.__struct_fields__:
        cells = [_format(getattr(figures, name)) for figures in (line.total, *line.by_size.values())]
        table.add_row(name, *cells, AIMS.get(name, ""))
    return table


def _make_audit_table(found: CorruptionFigures) -> Table:
    table = Table(
        "figure", "found", "aim", title=f"{found.jobs} simulated jobs with a host that computes wrongly"
    )
    table.add_row("sdc_found", f"{found.sdc_found:g}", "1")
    table.add_row("sdc_found_half", f"{found.sdc_found_half:g}", "")
    table.add_row("sdc_false", f"{found.sdc_false:g}", "0")
    if (cost := found.cost) is not None:
        table.add_row("audit_overhead", f"{cost.audit_overhead:g}", "0.002")
        steps = f"{1000 * cost.audited_step_s:.0f} ms, {1000 * cost.step_s:.0f} ms"
        table.add_row("step with audits, step without", steps, "")
    return table


def _make_slow_host_table(found: SlowHostFigures) -> Table:
    table = Table("figure", "by speed", "even", "aim", title="A job with one of four hosts at half speed")
    table.add_row(
        "slow_host_throughput",
        f"{found.slow_host_throughput:g}",
        f"{found.slow_host_throughput_even:g}",
        "0.9",
    )
    table.add_row("seconds of a step", f"{found.step_s:g}", f"{found.step_s_even:g}", "")
    return table


def _make_real_work_table(found: RealWorkFigures) -> Table:
    table = Table("figure", "found", "aim", title="Real microbatches of packed documents")
    table.add_row("error_microbatch_real", f"{found.error_microbatch_real:g}", "0.05")
    table.add_row("its median", f"{found.error_microbatch_real_median:g}", "")
    table.add_row("error_without_lengths", f"{found.error_without_lengths:g}", "")
    table.add_row("95th over 5th percentile of seconds", f"{found.slowest_over_fastest:g}", "")
    return table


def _make_quiet_table(found: QuietFigures) -> Table:
    table = Table("figure", "found", "aim", title=f"{found.job_hours} simulated job hours without any hang")
    table.add_row("false_kills", str(found.false_kills), "0")
    table.add_row("longest silence, s", f"{found.longest_s:g}", "")
    return table


def _format(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{number:g}" for number in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
