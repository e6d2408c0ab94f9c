"""The erasure benchmark: speed of encoding parity and decoding lost shards, on one core."""

import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from resilient_jax.erasure import ReedSolomon
from resilient_jax.errors import CallerError
from tests.benchmarks.erasure.figures import (
    BARE_ISAL,
    MEMORY_COPY,
    ErasureFigures,
    ErasureRequest,
    ErasureTask,
    ErasureTimings,
    Speeds,
    make_erasure_figures,
)
from tests.benchmarks.paths import JOBS
from tests.benchmarks.report import describe_machine, open_console, print_json_line
from tests.benchmarks.runs import run_alone

KIB = 1024
FEWEST_ROUNDS = 2
"""The least number that has a spread."""
AIM = 0.9
"""Fraction of the bare call's speed: the code around the call may take a tenth."""


def erasure(
    data_shards: Annotated[int, typer.Option(help="k.")] = 8,
    parity_shards: Annotated[list[int] | None, typer.Option(help="m; repeat for several. [1, 2, 4]")] = None,
    shard_kib: Annotated[int, typer.Option(help="Length of a shard.")] = 4096,
    skew_bytes: Annotated[
        int,
        typer.Option(
            help="Gap between shards. 0 puts shards a multiple of 4096 bytes apart, where all compete for the same "
            "lines of the first-level cache then, which costs ISA-L up to a third."
        ),
    ] = 512,
    rounds: Annotated[int, typer.Option(help="Times that each call is timed, all calls in turn.")] = 20,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Measure the erasure code beside the bare ISA-L call, zfec, reedsolo and memory copy, on one core.

    k data shards and m of parity; decode recomputes m data shards from the
    others. GB/s of data (k times a shard's length), medians. The keys of the
    line of JSON, for the first m unless described as "by m":

    encode_gbps, decode_gbps: of `encode` and `decode` with the fastest kernel
    available here.

    isal_gbps: of ISA-L's `ec_encode_data`, with all operands prepared before.
    null where ISA-L is missing; it comes with the extra `isal`.

    encode_of_isal, decode_of_isal: by m, ours over the bare call with the same
    tables. The aim is 0.9 or more.

    copy_limit_gbps: of copying the data. A copy writes all that it reads and
    encoding only m / k of it, so encoding can be faster.

    spread: 5 % and 95 % of the rounds. n: rounds. speeds: of everything, by m.

    zfec is under the GPL, so never a dependency; it is timed if installed.
    The benchmark takes about half a minute.
    """
    wanted = ErasureRequest(
        data_shards=data_shards,
        parity_shards=tuple(dict.fromkeys(parity_shards or (1, 2, 4))),
        shard_bytes=shard_kib * KIB,
        skew_bytes=skew_bytes,
        rounds=rounds,
    )
    _check(wanted)
    script = JOBS / "erasure_timing.py"
    console = open_console(json_only)
    console.print(f"{rounds} rounds on one core, shards of {shard_kib} KiB")
    figures = make_erasure_figures(wanted, _measure(script, wanted), describe_machine())
    for name, reason in figures.missing.items():
        console.print(f"{name}: {reason}", markup=False)
    for m, speeds in figures.speeds.items():
        console.print(_speed_table(figures.k, m, speeds, figures.versions))
    console.print(_summary_table(figures))
    print_json_line(figures)


def _check(wanted: ErasureRequest) -> None:
    """Check that the request can be timed.

    Raises:
        CallerError: a value is out of range.
    """
    for m in wanted.parity_shards:
        ReedSolomon(wanted.data_shards, m)  # raises if k and m are out of range
    if wanted.shard_bytes < KIB or wanted.skew_bytes < 0 or wanted.rounds < FEWEST_ROUNDS:
        raise CallerError(
            f"erasure: found --shard-kib {wanted.shard_bytes // KIB}, --skew-bytes {wanted.skew_bytes}, "
            f"--rounds {wanted.rounds}; expected 1 KiB or more, no negative gap and {FEWEST_ROUNDS} rounds or more"
        )


def _measure(script: Path, wanted: ErasureRequest) -> ErasureTimings:
    """Run the script that measures in a process of its own, which is pinned to one core and loads numpy and jax.

    Raises:
        InternalError: the script failed.
    """
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        asked, found = Path(folder) / "wanted.json", Path(folder) / "times.json"
        asked.write_bytes(msgspec.json.encode(wanted))
        run_alone([str(script), str(asked), str(found)], Path(folder))
        return msgspec.json.decode(found.read_bytes(), type=ErasureTimings)


def _speed_table(k: int, m: str, speeds: Speeds, versions: dict[str, str]) -> Table:
    table = Table(title=f"GB/s of data, k = {k}, m = {m}: median, and 5 % to 95 % of the rounds")
    table.add_column("")
    for name in ("encode", "5 % to 95 %", "decode", "5 % to 95 %"):
        table.add_column(name, justify="right")
    table.add_column("what it is")
    for who, found in speeds.items():
        cells: list[str] = []
        for task in (ErasureTask.ENCODE, ErasureTask.DECODE):
            speed = found.get(ErasureTask.COPY if who == MEMORY_COPY and task is ErasureTask.ENCODE else task)
            cells += [f"{speed.gbps:.4g}", f"{speed.low:.3g} to {speed.high:.3g}"] if speed else ["", ""]
        table.add_row(who, *cells, versions.get(who, ""))
    return table


def _summary_table(figures: ErasureFigures) -> Table:
    table = Table("figure", "value", "aim", title=figures.machine)
    ratios = (("encode", figures.encode_of_isal), ("decode", figures.decode_of_isal))
    for name, by_parity in ratios:
        for m, ratio in by_parity.items():
            table.add_row(f"{name} over the {BARE_ISAL}, m = {m}", f"{ratio:.3f}", f"{AIM:g} or more")
    table.add_row("encode, GB/s", f"{figures.encode_gbps:.4g}", "-")
    table.add_row("decode, GB/s", f"{figures.decode_gbps:.4g}", "-")
    table.add_row("memory copy, GB/s", f"{figures.copy_limit_gbps:.4g}", "-")
    return table
