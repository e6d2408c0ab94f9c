"""`python tests/benchmarks hybrid`: kills of a stage in the middle of a step, of the pipelined example."""

import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.launcher import make_host_names
from resilient_jax.errors import InternalError
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import HostName
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.recovery import newest_step, wait_stall
from resilient_jax.protocol.failpoints import FailPoint
from tests.benchmarks.hybrid.restart import RestartStalls, run_restarts
from tests.benchmarks.paths import JOBS, REPOSITORY
from tests.benchmarks.report import describe_machine, open_console, print_json_line
from tests.benchmarks.run_end import are_equal, read_digest
from tests.benchmarks.runs import (
    ERROR_CHARACTERS,
    HOSTS,
    MANY_STEPS,
    REPORT_TIMEOUT_S,
    RUN_TIMEOUT_S,
    end_job,
    run_alone,
    run_job,
    script_environment,
    wait_healthy,
)
from tests.benchmarks.step_times import StepTime, read_step_times

CONFIG = 'snapshot_parity = 1\nstandby = "off"\n'
SCRIPT = JOBS / "timed_lm.py"
TIMING, TIMED_STEPS = JOBS / "pipeline_timing.py", 7
SETTINGS = REPOSITORY / "configs/lm_tiny_pipelined.toml"
AHEAD_STEPS = 4
ALONE_TIMEOUT_S = 3600.0
"""One host takes the steps of four."""
CHECKPOINT_EVERY = 10
"""Steps between two checkpoints of the job that is restarted, as often as Orbax usually."""


class HybridFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON: medians, in seconds unless the name has another unit."""

    reroute_stall_s: float
    reroute_stall_min_s: float
    reroute_stall_max_s: float
    service_stall_s: float
    service_stall_max_s: float
    new_world_stall_s: float
    restart_stall_s: float
    restart_stall_min_s: float
    restart_stall_max_s: float
    restart_regained_s: float
    restart_regained_max_s: float
    restart_steps_redone: int
    restart_step_s: float
    rejoin_blocks_stall_s: float
    rejoin_blocks_stall_min_s: float
    rejoin_blocks_stall_max_s: float
    move_blocks_stall_s: float
    healthy_step_s: float
    reroute_ratio: float
    kills: int
    steps_lost: int
    bitwise_equal: bool
    tasks_kept: float
    pipeline_efficiency_sleeps: float
    pipeline_efficiency: float
    peak_memory_error: float
    machine: str
    load: float


class PipelineTiming(msgspec.Struct, frozen=True):
    """The line of `jobs/pipeline_timing.py`: see there."""

    efficiency: float
    memory_estimated: float
    memory_measured: float


def hybrid(
    kills: Annotated[int, typer.Option(min=1, help="Kills of a stage.")] = 10,
    service_kills: Annotated[
        int, typer.Option(min=1, help="More of them, together with JAX's coordination service.")
    ] = 4,
    checkpoint_every: Annotated[
        int, typer.Option(min=1, help="Steps between two checkpoints of the job that is restarted.")
    ] = CHECKPOINT_EVERY,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Measure what the death of a stage costs, of four hosts that are two replicas of two stages.

    A worker is killed before it computes an input gradient, so in the middle of a step; after each step there is a
    snapshot. `reroute_stall_s` runs from SIGKILL to the end of that step on every survivor, less a healthy step;
    `rejoin_blocks_stall_s` is the longest time between two steps on any host when the killed one comes back, less a
    healthy step. `service_stall_s` is the same as `reroute_stall_s`, of kills that end JAX's coordination service, too,
    and `new_world_stall_s` the longest time between two steps where a new world follows. `reroute_ratio` is the time of
    a step of the three hosts over that of all four. `move_blocks_stall_s` is how long a host waited for the state of
    blocks that another cut gives it. `bitwise_equal`: whether the weights after all kills are those of as many
    undisturbed steps on one host.

    `restart_stall_s` is the same as `reroute_stall_s`, less its own step, for as many kills of the same model and hosts
    with JAX and Orbax alone: sharded over all hosts (FSDP by `jax.jit`), and a supervisor that ends all processes and
    starts all again, from the last asynchronous checkpoint and with a warm compilation cache. `restart_regained_s` ends
    when the step that was interrupted is committed; here no step is done again, so both are the same.

    In one process, with a device for each stage: `pipeline_efficiency` is the makespan of the simulated order of tasks
    over the measured one, of the example in two stages, and `_sleeps` of tasks that sleep equally long in four;
    `peak_memory_error` compares bytes of arrays on the fullest device with the plan's figure.
    """
    console = open_console(json_only)
    hosts = make_host_names(HOSTS)
    stalls: list[StageKill] = []
    with_service: list[StageKill] = []
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        times = Path(folder) / "times"
        command = [str(SCRIPT), str(SETTINGS), str(MANY_STEPS), str(times)]
        with run_job(command, Path(folder) / "hybrid", config=CONFIG) as job:
            for number in range(kills + service_kills):
                found = kill_stage(job, hosts[number % HOSTS], ends_service=number >= kills)
                (with_service if found.ends_service else stalls).append(found)
                console.print(f"  {number + 1}: {found}")
            trained = end_job(job, times, "the job with kills")
            events = job.read_events()
        steps = read_step_times(times)
        console.print(f"  the same {trained} steps undisturbed, on one host")
        alone = Path(folder) / "alone"
        run_alone([str(SCRIPT), str(SETTINGS), str(trained), str(alone)], alone, timeout_s=ALONE_TIMEOUT_S)
        is_equal = are_equal([read_digest(times), read_digest(alone)])
        console.print("  the same kills, restarted from checkpoints")
        restarts = run_restarts(SETTINGS, kills, checkpoint_every, hosts, Path(folder))
    sleeps, example = time_pipeline("sleeps", 4, 16), time_pipeline("example", 2, 12)
    stalls_s, service_stalls_s = ([one.stall_s for one in found] for found in (stalls, with_service))
    healthy, fewer = (statistics.median(list_step_times(steps, count)) for count in (HOSTS, HOSTS - 1))
    joins = list_join_gaps(steps, HOSTS)
    figures = HybridFigures(
        reroute_stall_s=round(statistics.median(stalls_s) - healthy, 3),
        reroute_stall_min_s=round(min(stalls_s) - healthy, 3),
        reroute_stall_max_s=round(max(stalls_s) - healthy, 3),
        service_stall_s=round(statistics.median(service_stalls_s) - healthy, 3),
        service_stall_max_s=round(max(service_stalls_s) - healthy, 3),
        new_world_stall_s=round(statistics.median(list_new_world_gaps(steps)) - healthy, 3),
        **describe_restarts(restarts),
        rejoin_blocks_stall_s=round(statistics.median(joins) - healthy, 3),
        rejoin_blocks_stall_min_s=round(min(joins) - healthy, 3),
        rejoin_blocks_stall_max_s=round(max(joins) - healthy, 3),
        move_blocks_stall_s=round(statistics.median(list_moves(events)), 3),
        healthy_step_s=round(healthy, 3),
        reroute_ratio=round(fewer / healthy, 2),
        kills=len(stalls) + len(with_service),
        steps_lost=sum(one.steps_lost for one in [*stalls, *with_service]),
        bitwise_equal=is_equal,
        tasks_kept=statistics.median(
            [int(e.detail["kept"]) for e in events if e.kind is EventKind.PIPELINE_STEP_RESUMED] or [0]
        ),
        pipeline_efficiency_sleeps=round(sleeps.efficiency, 3),
        pipeline_efficiency=round(example.efficiency, 3),
        peak_memory_error=round(example.memory_measured / example.memory_estimated - 1, 3),
        machine=describe_machine(),
        load=round(os.getloadavg()[2], 1),
    )
    console.print(make_table(figures))
    print_json_line(figures)


@dataclasses.dataclass(frozen=True, slots=True)
class StageKill:
    """What a kill of a stage's worker in the middle of a step cost.

    Attributes:
        victim: its host.
        change: of the world, that followed first.
        stall_s: from SIGKILL to the end of the step on every survivor.
        steps_lost: that were done again.
        ends_service: whether the coordination service was killed with it.
    """

    victim: HostName
    change: str
    stall_s: float
    steps_lost: int
    ends_service: bool

    def __str__(self) -> str:
        """Return it for people."""
        service = " and the coordination service" if self.ends_service else ""
        return f"{self.victim}{service}, {self.change}, {self.stall_s:.2f} s"


def kill_stage(
    job: LocalJob,
    victim: HostName,
    *,
    ends_service: bool = False,
    place: FailPoint = FailPoint.BEFORE_INPUT_GRADIENT,
    ahead: int = AHEAD_STEPS,
) -> StageKill:
    """Kill a worker at a place of a step some steps ahead, when all hosts train, and wait until the step is done."""
    step = newest_step(wait_healthy(job)) + ahead
    job.hold(place, [victim], step)
    job.wait_held([victim], REPORT_TIMEOUT_S)
    fault_s = job.kill(JobComponent.WORKER, victim)
    if ends_service:
        job.kill(JobComponent.COORDINATION_SERVICE, "leader")
    job.release()
    found = wait_stall(job, fault_s, REPORT_TIMEOUT_S)
    return StageKill(victim, str(found.change), found.total_s, max(0, step - found.step), ends_service)


def describe_restarts(found: RestartStalls) -> dict[str, Any]:
    """Return the figures of the job that was restarted, by their names."""
    return {
        "restart_stall_s": round(statistics.median(found.stalls_s), 3),
        "restart_stall_min_s": round(min(found.stalls_s), 3),
        "restart_stall_max_s": round(max(found.stalls_s), 3),
        "restart_regained_s": round(statistics.median(found.regained_s), 3),
        "restart_regained_max_s": round(max(found.regained_s), 3),
        "restart_steps_redone": found.redone,
        "restart_step_s": round(found.step_s, 3),
    }


def make_table(figures: HybridFigures) -> Table:
    """Return the figures for people."""
    table = Table("figure", "found", "least to most", "aim", "restart with Orbax", "least to most")
    table.add_row(
        "a stage dies in the middle of a step: stall",
        f"{figures.reroute_stall_s:.3f} s",
        f"{figures.reroute_stall_min_s:.3f} to {figures.reroute_stall_max_s:.3f} s",
        "0.5 s",
        f"{figures.restart_stall_s:.2f} s",
        f"{figures.restart_stall_min_s:.2f} to {figures.restart_stall_max_s:.2f} s",
    )
    table.add_row(
        "the same, with the coordination service: stall",
        f"{figures.service_stall_s:.3f} s",
        f"to {figures.service_stall_max_s:.3f} s",
    )
    table.add_row("a new world after that step: stall", f"{figures.new_world_stall_s:.3f} s")
    table.add_row(
        "until the lost progress is regained",
        f"{figures.reroute_stall_s:.3f} s",
        "",
        "",
        f"{figures.restart_regained_s:.2f} s",
        f"to {figures.restart_regained_max_s:.2f} s",
    )
    table.add_row(
        "steps done again, of all kills", f"{figures.steps_lost}", "", "0", f"{figures.restart_steps_redone}"
    )
    table.add_row("weights bit for bit those of an undisturbed run", str(figures.bitwise_equal), "", "True")
    table.add_row(
        "healthy step", f"{figures.healthy_step_s:.3f} s", "", "", f"{figures.restart_step_s:.3f} s"
    )
    table.add_row(
        "it comes back: stall",
        f"{figures.rejoin_blocks_stall_s:.3f} s",
        f"{figures.rejoin_blocks_stall_min_s:.3f} to {figures.rejoin_blocks_stall_max_s:.3f} s",
        "0.3 s",
    )
    table.add_row("blocks that move: stall", f"{figures.move_blocks_stall_s:.3f} s", "", "0.2 s")
    table.add_row("step of three hosts over that of four", f"{figures.reroute_ratio:.2f}")
    table.add_row("tasks of the step that a survivor keeps", f"{figures.tasks_kept:.0f}")
    table.add_row("kills", f"{figures.kills}")
    table.add_row(
        "simulated over measured step, tasks that sleep",
        f"{figures.pipeline_efficiency_sleeps:.2f}",
        "",
        "0.95",
    )
    table.add_row("the same, of the example", f"{figures.pipeline_efficiency:.2f}", "", "0.85")
    table.add_row(
        "peak of a device over the plan's figure, less 1", f"{figures.peak_memory_error:.2f}", "", "0.10"
    )
    table.add_row("processes that waited for a core, mean of 15 minutes", f"{figures.load:.1f}")
    return table


def time_pipeline(kind: str, stages: int, microbatches: int) -> PipelineTiming:
    """Return what the stages of one process take and need.

    Raises:
        InternalError: the script failed.
    """
    flag = f"--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count={stages}"
    command = [sys.executable, str(TIMING), kind, str(stages), str(microbatches), str(TIMED_STEPS)]
    done = subprocess.run(
        command,
        env=script_environment() | {"XLA_FLAGS": flag},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise InternalError(f"{TIMING.name} {kind} failed:\n{done.stderr[-ERROR_CHARACTERS:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=PipelineTiming)


def list_moves(events: Sequence[Event]) -> list[float]:
    """Return how long hosts waited for blocks of others, where some came; [nan]: none did."""
    moves = [event.detail for event in events if event.kind is EventKind.PIPELINE_STATE_KEPT]
    return [float(detail["seconds"]) for detail in moves if int(detail["received"])] or [float("nan")]


def list_step_times(steps: Sequence[StepTime], num_hosts: int) -> list[float]:
    """Return the seconds between two steps of a process within generations of so many hosts; [nan]: there are none."""
    ends = _group(steps)
    return [
        later - earlier
        for by_process in ends.values()
        if len(by_process) == num_hosts
        for times in by_process.values()
        for earlier, later in itertools.pairwise(times)
    ] or [float("nan")]


def list_join_gaps(steps: Sequence[StepTime], num_hosts: int) -> list[float]:
    """Return how long hosts made no step where others joined, for each generation that grew to so many; or [nan]."""
    ends = _group(steps)
    gaps = []
    for before, after in itertools.pairwise(sorted(ends)):
        if len(ends[before]) < num_hosts == len(ends[after]):
            stayed = ends[before].keys() & ends[after].keys()
            gaps.append(max(ends[after][process][0] - ends[before][process][-1] for process in stayed))
    return gaps or [float("nan")]


def list_new_world_gaps(steps: Sequence[StepTime]) -> list[float]:
    """Return how long hosts made no step where the same ones formed a generation anew; or [nan]."""
    ends = _group(steps)
    return [
        max(ends[after][process][0] - ends[before][process][-1] for process in ends[after])
        for before, after in itertools.pairwise(sorted(ends))
        if ends[before].keys() == ends[after].keys()
    ] or [float("nan")]


def _group(steps: Sequence[StepTime]) -> dict[int, dict[int, list[float]]]:
    """Return when steps ended, ascending, by generation and process."""
    found: dict[int, dict[int, list[float]]] = {}
    for one in steps:
        found.setdefault(one.generation, {}).setdefault(one.process, []).append(one.at_s)
    return found
