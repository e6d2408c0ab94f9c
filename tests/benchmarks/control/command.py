"""The control benchmark: what membership costs with up to thousands of hosts."""

import enum
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from benchmarks.control.figures import (
    AIMS,
    Figure,
    PartResult,
    make_line,
    make_machine_samples,
    summarize_all,
)
from benchmarks.control.machine_cost import MachineMeasurements
from benchmarks.paths import JOBS
from benchmarks.report import describe_machine, open_console, print_json_line
from benchmarks.runs import run_alone
from resilient_jax.errors import CallerError

MACHINE_SIZES = (64, 256, 1024, 4096)
PLAIN_SIZES = (64, 256)
"""The plain machine needs an hour for a job of 4,096 hosts."""
SAMPLED_PLAIN_SIZES = (1024,)
MACHINE_LIMIT_S = 1800.0


class Part(enum.StrEnum):
    """A part of the benchmark."""

    MACHINE = "machine"


def control(
    rounds: Annotated[int, typer.Option(help="Times that each thing is measured.")] = 3,
    parts: Annotated[list[Part] | None, typer.Option(help="Repeat for several. [all]")] = None,
    sizes: Annotated[
        list[int] | None, typer.Option(help="Hosts; repeat for several. [64, 256, 1024, 4096]")
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Measure what membership costs the leader and the hosts, with up to thousands of hosts.

    The keys of the line of JSON, for N hosts; medians:

    event_us_N: of the pure machine of the leader, while all hosts train: microseconds for one event, which is a step
    that is reported beside the store, a status with a new snapshot, or one with a worker's report; each of them alone
    as event_us_KIND_N.

    form_cpu_s_N, shrink_cpu_s_N: processor seconds of that machine for all events from the first registration until
    all train, and from the loss of a host until the others do.

    plain_event_us_N and so on: of its specification, the rules applied to all hosts after each event.

    generation_bytes_N, status_bytes_N: of the records after that loss.

    spread: least and most; of 20 samples or more, 5 % and 95 %. n: the number of samples. load: processes that waited
    to run, before and after. missing: what was not measured, with the cause.
    """
    if rounds < 1 or min(sizes or [2]) < 2:
        raise CallerError(
            f"control: found --rounds {rounds}, --sizes {sizes}; expected 1 round or more of 2 hosts or more"
        )
    console = open_console(json_only)
    before = os.getloadavg()[0]
    console.print(f"load {before:.1f}")
    found: list[PartResult] = []
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        for part in parts or list(Part):
            console.print(f"{part} ...")
            found.append(_measure(part, Path(folder) / part, rounds, sizes))
    figures = summarize_all(found)
    for result in found:
        for what, why in result.missing.items():
            console.print(f"{what}: {why}", markup=False)
    console.print(_tabulate(figures))
    print_json_line(make_line(figures, found, describe_machine(), (before, os.getloadavg()[0])))


def _measure(part: Part, work: Path, rounds: int, sizes: Sequence[int] | None) -> PartResult:
    match part:
        case Part.MACHINE:
            return _measure_machine(work, rounds, sizes)


def _measure_machine(work: Path, rounds: int, sizes: Sequence[int] | None) -> PartResult:
    """Run the script that measures the pure machine, in a process of its own.

    Raises:
        InternalError: the script failed.
    """
    ours = sizes or MACHINE_SIZES
    found = work / "found.json"
    listed = [
        _join(ours),
        _join([size for size in PLAIN_SIZES if size in ours]),
        _join([size for size in SAMPLED_PLAIN_SIZES if size in ours]),
    ]
    script = str(JOBS / "control_machine.py")
    run_alone([script, str(found), str(rounds), *listed], work, timeout_s=MACHINE_LIMIT_S)
    measured = msgspec.json.decode(found.read_bytes(), type=MachineMeasurements)
    return PartResult(samples=make_machine_samples(measured))


def _join(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes)) or "-"


def _tabulate(figures: Mapping[str, Figure]) -> Table:
    table = Table("figure", title=describe_machine())
    for name in ("median", "spread", "n", "aim"):
        table.add_column(name, justify="right")
    for key, figure in figures.items():
        spread = f"{figure.low:g} to {figure.high:g}"
        table.add_row(key, f"{figure.median:g}", spread, str(figure.n), AIMS.get(key, ""))
    return table
