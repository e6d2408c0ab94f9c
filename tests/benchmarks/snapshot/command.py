"""The snapshot benchmark: cost of a snapshot and speed of a restore, compared with memory copy and Orbax."""

import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from resilient_jax.errors import CallerError, OperatorError
from resilient_jax.snapshot.memory_budget import read_free_memory
from tests.benchmarks.paths import JOBS
from tests.benchmarks.report import describe_machine, open_console, print_json_line
from tests.benchmarks.runs import RUN_TIMEOUT_S, run_alone
from tests.benchmarks.snapshot.figures import (
    MB,
    SnapshotFigures,
    SnapshotRequest,
    SnapshotTimings,
    make_snapshot_figures,
    threads_name,
)
from tests.benchmarks.snapshot.memory import choose_sizes

DEFAULT_SIZES = (120, 1000, 4000)
DEVICES = 8
TMPFS_ROOT = Path("/dev/shm")
CAPTURE_AIM = 0.8
"""Fraction of the speed of a copy into touched memory; checksums take the rest."""
BLOCKING_AIM_MS = 5.0


def snapshot(
    sizes: Annotated[
        list[int] | None,
        typer.Option(help="MB of state; repeat for several. [those of 120, 1000, 4000 that fit into memory]"),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Times that each thing is timed, after one that does not count.")
    ] = 3,
    limit_s: Annotated[
        float, typer.Option(help="For each size; what has not begun by then is skipped.")
    ] = 400.0,
    disk: Annotated[
        Path | None, typer.Option(help="Folder on a disk, for Orbax. [of temporary files]")
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Measure the cost of a snapshot and of a restore, compared with memory copy and Orbax, all on this machine.

    A GB is 10^9 bytes of state. The keys of the line of JSON, for the largest state with which all was measured:

    capture_gbps, copy_limit_gbps: on one host that has all of the state, with one thread: from `SnapshotCapture.start`
    until all arrays may be donated, block checksums included; and `np.copyto` of the same bytes into touched memory.
    The aim is 80 % of the copy.

    blocking_ms_per_gb: how long `SnapshotCapture.start` blocks training. The aim is 5.

    parity_restore_s, orbax_restore_s: one of eight hosts is lost, m = 1. The seven others restore the state onto their
    devices, a seventh each and all at once: from own memory, from peers, and the lost host's part decoded from
    stripes, which reads seven times its bytes. Plain Orbax restores the same state from tmpfs onto seven devices, in
    one process. "parity, all by one": one survivor restores the parts of all seven.

    commit_s: from the start until every host has the commit of the complete snapshot, for 4 and 8 hosts.

    memory_per_byte: memory that the kernel gave to the slots of eight hosts, over the state; and (1 + m / k) x 2.

    spread: 5 % and 95 % of the rounds. n: rounds. seconds: of everything, by size. skipped: by case, the reason.

    The benchmark takes about ten minutes. A size needs memory for eight times its bytes and 1.5 GB more: default
    sizes that do not fit are left out; of a size that is given, the cases that do not fit are.
    """
    chosen = tuple(dict.fromkeys(sizes or DEFAULT_SIZES))
    if min(chosen) < 1 or rounds < 1:
        raise CallerError(
            f"snapshot: found --sizes {' '.join(map(str, chosen))}, --rounds {rounds}; expected sizes of 1 MB or more "
            "and 1 round or more"
        )
    left_out: dict[str, str] = {}
    if not sizes:
        chosen, left_out = choose_sizes(chosen, read_free_memory().free_bytes)
    if not chosen:
        raise OperatorError(
            f"snapshot: found no size that fits into memory: {left_out}. Free some memory, or choose --sizes"
        )
    console = open_console(json_only)
    console.print(
        f"{rounds} rounds with states of {', '.join(map(str, chosen))} MB; all hosts share this machine"
    )
    found = [_measure(size * MB, rounds, limit_s, disk) for size in chosen]
    figures = make_snapshot_figures(rounds, found, describe_machine(), left_out)
    console.print(_seconds_table(figures))
    console.print(_summary_table(figures))
    print_json_line(figures)


def _measure(state_bytes: int, rounds: int, limit_s: float, disk: Path | None) -> SnapshotTimings:
    """Measure one size, in a process of its own, whose end frees the memory.

    Raises:
        InternalError: the script failed.
    """
    script = JOBS / "snapshot_timing.py"
    environment = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    prefix = "resilient-jax-bench-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=disk) as folder,
        tempfile.TemporaryDirectory(prefix=prefix, dir=TMPFS_ROOT) as tmpfs,
    ):
        wanted = SnapshotRequest(
            state_bytes=state_bytes, rounds=rounds, limit_s=limit_s, disk=folder, tmpfs=tmpfs
        )
        asked, times = Path(folder) / "wanted.json", Path(folder) / "times.json"
        asked.write_bytes(msgspec.json.encode(wanted))
        # A case that began before the limit may take as long as any other run of a benchmark.
        run_alone([str(script), str(asked), str(times)], Path(folder), environment, limit_s + RUN_TIMEOUT_S)
        return msgspec.json.decode(times.read_bytes(), type=SnapshotTimings)


def _seconds_table(figures: SnapshotFigures) -> Table:
    left_out = "; ".join(f"{name}: {reason}" for name, reason in figures.skipped.items())
    caption = f"left out: {left_out}" if left_out else None
    table = Table(title="seconds: median, and 5 % to 95 % of the rounds", caption=caption)
    for name in ("", ""):
        table.add_column(name)
    for size in figures.seconds:
        table.add_column(f"{size} MB", justify="right")
    tasks = {(task, variant): None for by in figures.seconds.values() for task in by for variant in by[task]}
    for task, variant in tasks:
        cells = [by.get(task, {}).get(variant) for by in figures.seconds.values()]
        table.add_row(
            task,
            variant,
            *(f"{cell.median:.4g} ({cell.low:.3g} to {cell.high:.3g})" if cell else "-" for cell in cells),
        )
    return table


def _summary_table(figures: SnapshotFigures) -> Table:
    table = Table(f"figure, state of {figures.state_mb} MB", "value", "aim", title=figures.machine)
    for threads, ratio in figures.capture_of_copy.items():
        aim = f"{CAPTURE_AIM:g} or more" if threads == threads_name(1) else "-"
        table.add_row(f"capture over warm copy, {threads}", f"{ratio:.3g}", aim)
    table.add_row("capture, GB/s", _say(figures.capture_gbps), "-")
    table.add_row("warm copy, GB/s", _say(figures.copy_limit_gbps), "-")
    table.add_row("blocking, ms per GB", _say(figures.blocking_ms_per_gb), f"under {BLOCKING_AIM_MS:g}")
    table.add_row("restore with parity, s", _say(figures.parity_restore_s), "-")
    table.add_row("restore by Orbax from tmpfs, s", _say(figures.orbax_restore_s), "-")
    table.add_row("the one over the other", _say(figures.parity_of_orbax), "under 1")
    for m, memory in figures.memory_per_byte.items():
        table.add_row(f"memory per byte, m = {m} of 8", f"{memory.measured:.3f}", f"{memory.formula:.3f}")
    return table


def _say(value: float | None) -> str:
    return "skipped" if value is None else f"{value:.4g}"
