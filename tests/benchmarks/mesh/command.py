"""`python tests/benchmarks mesh`: hosts of replicas that span hosts are killed in the middle of a step."""

import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from resilient_jax.cluster.launcher import make_host_names
from resilient_jax.protocol.failpoints import FailPoint
from tests.benchmarks.hybrid.command import StageKill, kill_stage, list_join_gaps, list_step_times
from tests.benchmarks.hybrid.restart import RestartStalls, find_stalls, schedule_kills
from tests.benchmarks.mesh.figures import (
    Spread,
    are_equal_boxes,
    describe,
    find_largest_share,
    find_written_share,
    read_rows,
)
from tests.benchmarks.paths import JOBS
from tests.benchmarks.report import describe_machine, open_console, print_json_line
from tests.benchmarks.resilience.runs import RestartableJob, run_restarting
from tests.benchmarks.resilience.schedule import QUIET_STEPS
from tests.benchmarks.runs import HOSTS, MANY_STEPS, end_job, read_times, run_bare, run_job, wait_success
from tests.benchmarks.step_times import read_step_times

SCRIPT = JOBS / "mesh_job.py"
DEVICES = 2
AHEAD_STEPS = 12
"""Steps from an order to its kill: a step of this small network is shorter than reports are old."""
SAVED_STEPS = 6


class Shape(NamedTuple):
    """How the hosts are cut into replicas, and the hosts of the smallest job that has the same bits; 0: as planned."""

    hosts_of_replica: int

    @property
    def fsdp(self) -> int:
        """Devices of a replica."""
        return self.hosts_of_replica * DEVICES

    @property
    def config(self) -> str:
        """Lines of the job's configuration: with fewer hosts than a replica has all wait."""
        return f'snapshot_parity = 1\nstandby = "off"\nmin_hosts = {max(1, self.hosts_of_replica)}\n'


TWO, ONE = Shape(hosts_of_replica=2), Shape(hosts_of_replica=4)
PLANNED = Shape(hosts_of_replica=0)
"""Two hosts of a replica of four, and three of three."""


class MeshFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON: seconds and ratios; figures with the ending `_r1` are of one replica over all hosts."""

    bitwise_equal: bool
    bitwise_equal_r1: bool
    steps_lost: int
    steps_lost_r1: int
    stall_s: Spread
    regroup_pause_s: Spread
    reshape_stall_s: Spread
    parity_stall_s: Spread
    restart_stall_s: Spread
    restart_regained_s: Spread
    restart_steps_redone: int
    healthy_step_s: float
    healthy_step_r1_s: float
    healthy_step_planned_s: float
    restart_step_s: float
    whole_state_bytes: float
    whole_state_bytes_r1: float
    checkpoint_bytes_per_host_ratio: float
    overhead: Spread
    overhead_wall: Spread
    overhead_large: Spread
    overhead_large_wall: Spread
    machine: str
    load: float


class Kills(NamedTuple):
    """What the kills of one job cost, and what its hosts had of the state.

    Attributes:
        joins: the longest times between two steps where a killed host came back, in seconds.
    """

    found: list[StageKill]
    joins: list[float]
    healthy_s: float
    is_equal: bool
    share: float

    @property
    def stall_s(self) -> Spread:
        """From SIGKILL to the end of the step on all who go on, less a healthy step."""
        return describe([kill.stall_s for kill in self.found], self.healthy_s)


def mesh(
    kills: Annotated[
        int, typer.Option(min=1, help="Kills of a host of two replicas, of one, and with Orbax.")
    ] = 6,
    windows: Annotated[int, typer.Option(min=1, help="Pairs of windows, ours and bare JAX in turns.")] = 3,
    steps: Annotated[int, typer.Option(min=20, help="Steps of a window; twelve of them are left out.")] = 60,
    checkpoint_every: Annotated[
        int, typer.Option(min=1, help="Steps between two checkpoints of the job that is restarted.")
    ] = 10,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Measure what the death of a host of a replica over hosts costs: 4 hosts x 2 devices, the state in shards.

    Two replicas of fsdp 4 (R = 2), and one of fsdp 8. A worker is killed before the sums of a step, so in its middle.
    `stall_s` runs from SIGKILL to the end of that step on every survivor, less a healthy step; `parity_stall_s` is the
    same of R = 1, until the host is back, because without it there is no replica. `regroup_pause_s` is the longest time
    between two steps on any host when the killed one of R = 2 comes back, less a healthy step. `reshape_stall_s` is the
    same as `stall_s` where a planner chooses the axes, and chooses others for three hosts. `bitwise_equal`: whether
    each box of the state after each step is that of an undisturbed job (of one replica of fsdp 4; of the same fsdp 8).
    `whole_state_bytes` is the largest share of the state on any host over its due share, and
    `checkpoint_bytes_per_host_ratio` the largest part of a checkpoint that a host wrote over the same.

    `restart_stall_s` is the same as `stall_s`, for as many kills of the same model and mesh with JAX and Orbax alone:
    a supervisor ends all processes, and starts all again from the last checkpoint, with a warm compilation cache.
    `overhead` is the processor time of all processes for a step, over that of plain JAX with the same mesh, less one;
    `overhead_wall` the same of the time of a step; both also of a network of fourteen times as many numbers, and twice
    as many rows.
    """
    console = open_console(json_only)
    hosts = make_host_names(HOSTS)
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        work = Path(folder)
        console.print("overhead: undisturbed windows, ours and bare JAX in turns")
        processor, wall = measure_overhead(work, steps, windows, console)
        large_processor, large_wall = measure_overhead(work, steps, windows, console, "large")
        console.print("what a host writes of a checkpoint")
        written = measure_checkpoint(work / "saved")
        console.print("kills of a host: two replicas")
        two = run_kills(TWO, kills, work / "two", console)
        console.print("kills of a host: axes that are planned anew")
        planned = run_kills(PLANNED, kills, work / "planned", console)
        console.print("kills of a host: one replica")
        one = run_kills(ONE, kills, work / "one", console)
        console.print("the same kills, restarted from checkpoints")
        restarts = run_restarts(kills, checkpoint_every, hosts, work)
    figures = MeshFigures(
        bitwise_equal=two.is_equal,
        bitwise_equal_r1=one.is_equal,
        steps_lost=sum(kill.steps_lost for kill in two.found),
        steps_lost_r1=max(kill.steps_lost for kill in one.found),
        stall_s=two.stall_s,
        regroup_pause_s=describe(two.joins, two.healthy_s),
        reshape_stall_s=planned.stall_s,
        parity_stall_s=one.stall_s,
        restart_stall_s=describe(restarts.stalls_s),
        restart_regained_s=describe(restarts.regained_s),
        restart_steps_redone=restarts.redone,
        healthy_step_s=round(two.healthy_s, 3),
        healthy_step_r1_s=round(one.healthy_s, 3),
        healthy_step_planned_s=round(planned.healthy_s, 3),
        restart_step_s=round(restarts.step_s, 3),
        whole_state_bytes=round(two.share, 3),
        whole_state_bytes_r1=round(one.share, 3),
        checkpoint_bytes_per_host_ratio=round(written, 3),
        overhead=describe(processor),
        overhead_wall=describe(wall),
        overhead_large=describe(large_processor),
        overhead_large_wall=describe(large_wall),
        machine=describe_machine(),
        load=round(os.getloadavg()[2], 1),
    )
    console.print(make_table(figures))
    print_json_line(figures)


def make_command(shape: Shape, folder: Path, steps: int, *words: str) -> list[str]:
    """Return the command of a job of ours."""
    words = ("planned", *words) if shape is PLANNED else words
    return [str(SCRIPT), "ours", str(folder), str(steps), str(os.getpid()), str(shape.fsdp), *words]


def run_kills(shape: Shape, kills: int, work: Path, console: Console) -> Kills:
    """Kill one host after the other, and compare all steps with those of an undisturbed job, unless axes change."""
    hosts = make_host_names(HOSTS)
    found: list[StageKill] = []
    command = make_command(shape, work, MANY_STEPS, "digests")
    with run_job(command, work, config=shape.config, devices_per_host=DEVICES) as job:
        for number in range(kills):
            kill = kill_stage(job, hosts[number % HOSTS], place=FailPoint.BEFORE_REDUCE, ahead=AHEAD_STEPS)
            found.append(kill)
            console.print(f"  {number + 1}: {kill}, {kill.steps_lost} steps lost")
        trained = end_job(job, work, "the job with kills")
    steps, rows = read_step_times(work), read_rows(work)
    joins, healthy_s = list_join_gaps(steps, HOSTS), statistics.median(list_step_times(steps, HOSTS))
    if shape is PLANNED:
        return Kills(found=found, joins=joins, healthy_s=healthy_s, is_equal=False, share=math.nan)
    console.print(f"  the same {trained} steps undisturbed")
    quiet = work / "undisturbed"
    run_quietly(shape, quiet, trained, "digests", num_hosts=shape.hosts_of_replica)
    return Kills(
        found=found,
        joins=joins,
        healthy_s=healthy_s,
        is_equal=are_equal_boxes(rows, read_rows(quiet)),
        share=find_largest_share(rows, shape.hosts_of_replica),
    )


def run_quietly(shape: Shape, folder: Path, steps: int, *words: str, num_hosts: int = HOSTS) -> None:
    """Run a job of ours on so many hosts until it ends.

    Raises:
        InternalError: the job failed.
    """
    command = make_command(shape, folder, steps, *words)
    with run_job(command, folder, num_hosts, config=shape.config, devices_per_host=DEVICES) as job:
        wait_success(job, "the undisturbed job")


def measure_checkpoint(folder: Path) -> float:
    """Return the most that a host wrote of a checkpoint of two replicas, over its due share."""
    run_quietly(TWO, folder, SAVED_STEPS, "digests", "save")
    newest = folder / "checkpoints" / str(SAVED_STEPS)
    return find_written_share(newest, read_rows(folder)[0].whole_bytes, TWO.hosts_of_replica)


def measure_overhead(
    work: Path, steps: int, windows: int, console: Console, *words: str
) -> tuple[list[float], list[float]]:
    """Return what our steps take over those of bare JAX, less one, of each pair of windows: processors, and time.

    One window of each follows the other, every other time in reverse: a drift affects both alike.
    """
    ratios: tuple[list[float], list[float]] = ([], [])
    for window in range(windows):
        found: dict[str, tuple[float, float]] = {}
        for name in ("ours", "bare") if window % 2 else ("bare", "ours"):
            folder = work / "-".join([name, str(window), *words])
            if name == "ours":
                run_quietly(TWO, folder, steps, *words)
            else:
                run_bare([str(SCRIPT), "bare", str(folder), str(steps), str(os.getpid()), *words], folder)
            usage = msgspec.json.decode((folder / "usage.json").read_bytes(), type=dict[str, float])
            found[name] = usage["processor_s"], statistics.median(read_times(folder))
            used_s, step_s = found[name]
            console.print(f"  {folder.name}: a step takes {step_s:.3f} s, processors {used_s:.3f} s")
        for ratio, ours, bare in zip(ratios, found["ours"], found["bare"], strict=True):
            ratio.append(ours / bare - 1)
    return ratios


def run_restarts(kills: int, every: int, hosts: Sequence[str], work: Path) -> RestartStalls:
    """Run the plain loop under a supervisor that restarts it from Orbax's checkpoints.

    Raises:
        InternalError: the job failed, or hangs.
    """
    faults = schedule_kills(kills, every, hosts)
    file = RestartableJob(
        steps=faults[-1].step + every + QUIET_STEPS, hosts=tuple(hosts), faults=faults, every=every
    )
    return find_stalls(run_restarting(SCRIPT, file, work / "restart", work / "cache").timeline)


def make_table(figures: MeshFigures) -> Table:
    """Return the figures for people."""
    table = Table("figure", "found", "least to most", "aim", title=figures.machine)

    def add(what: str, found: Spread, unit: str, aim: str = "") -> None:
        between = f"{found.least:.3f} to {found.most:.3f}{unit} ({found.count})"
        table.add_row(what, f"{found.median:.3f}{unit}", between, aim)

    add("R = 2, a host dies in a step: stall", figures.stall_s, " s", "0.3 s")
    add("R = 1, the same: stall, until the host is back", figures.parity_stall_s, " s", "1.5 s")
    add("R = 2, it comes back: the longest time between steps", figures.regroup_pause_s, " s", "0.2 s")
    add("planned axes, which change for three hosts: stall", figures.reshape_stall_s, " s", "1.0 s")
    add("the same kills under restart with Orbax: stall", figures.restart_stall_s, " s")
    add("until that restart has regained the step", figures.restart_regained_s, " s")
    add("processor time of a step over plain JAX, less 1", figures.overhead, "", "0.03")
    add("time of a step over plain JAX, less 1", figures.overhead_wall, "")
    add("processor time of a larger step over plain JAX, less 1", figures.overhead_large, "", "0.03")
    add("time of a larger step over plain JAX, less 1", figures.overhead_large_wall, "")
    steps = f"{figures.steps_lost}; {figures.steps_lost_r1}; {figures.restart_steps_redone}"
    equal = f"{figures.bitwise_equal}; {figures.bitwise_equal_r1}"
    healthy = (
        figures.healthy_step_s,
        figures.healthy_step_r1_s,
        figures.healthy_step_planned_s,
        figures.restart_step_s,
    )
    share = f"{figures.whole_state_bytes:.3f}; {figures.whole_state_bytes_r1:.3f}"
    written = f"{figures.checkpoint_bytes_per_host_ratio:.3f}"
    for what, found, aim in (
        ("steps done again: R = 2, all; R = 1, at most; restart, all", steps, "0; 1"),
        ("bits of an undisturbed job after each step: R = 2; R = 1", equal, "True"),
        (
            "healthy step: R = 2; R = 1; planned; restart",
            "; ".join(f"{one:.3f}" for one in healthy) + " s",
            "",
        ),
        ("most of the state on a host, over its share: R = 2; R = 1", share, "1.05"),
        ("most of a checkpoint that a host wrote, over its share", written, "1.05"),
        ("processes that waited for a core, mean of 15 minutes", f"{figures.load:.1f}", ""),
        ("peak_over_plan", "no plan of memory for such jobs yet", "1.1"),
    ):
        table.add_row(what, found, "", aim)
    return table
