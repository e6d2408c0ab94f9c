"""The stall benchmark: how long a kill stops training, and the overhead without kills."""

import contextlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer
from rich.console import Console
from rich.table import Table

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.launcher import make_host_names
from resilient_jax.errors import InternalError
from resilient_jax.ids import HostName
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.recovery import hold_collective, wait_stall
from resilient_jax.telemetry.stall import Stall
from tests.benchmarks.paths import JOBS
from tests.benchmarks.report import describe_machine, open_console, print_json_line
from tests.benchmarks.runs import (
    AS_ON_A_POD,
    HOSTS,
    MANY_STEPS,
    REPORT_TIMEOUT_S,
    read_times,
    run_bare,
    run_job,
    run_undisturbed,
    wait_healthy,
)
from tests.benchmarks.stall.first_step import FirstSteps, measure_first_steps
from tests.benchmarks.stall.replacement import StandbyKind, measure_replacements
from tests.benchmarks.stall.state_share import measure_share
from tests.benchmarks.stall.trainer_stalls import PLANNED, SHARDED, find_recovery_s, measure_trainer_stall

STANDBYS: tuple[StandbyKind, ...] = ("off", "seat")


class StallFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON: medians, in seconds unless the name has another unit."""

    shrink_stall_s: float
    reform_stall_s: float
    rejoin_stall_s: float
    sharded_stall_s: float
    planned_stall_s: float
    host_back_s: float
    replace_all_stall_s: float
    replace_all_seats_stall_s: float
    steady_overhead: float
    healthy_step_s: float
    first_step_ratio: float
    first_step_ratio_warm: float
    first_step_s: float
    agent_rss_mib: float
    agent_start_s: float
    kills: int
    steps_lost: int
    share_per_host: float
    machine: str


def stall(
    kills: Annotated[int, typer.Option(help="Kills to measure, half of them with a re-form.")] = 10,
    steady_steps: Annotated[int, typer.Option(help="Steps of each undisturbed window.")] = 20,
    replacements: Annotated[int, typer.Option(help="Kills after which all workers are replaced.")] = 5,
    trainer_kills: Annotated[int, typer.Option(help="Kills of each of the trainer's jobs.")] = 5,
    starts: Annotated[int, typer.Option(help="Starts of one host and of all, for the first step.")] = 3,
    windows: Annotated[int, typer.Option(help="Pairs of windows, ours and bare JAX.")] = 2,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Measure the stall of kills by phase, and the overhead over a bare multi-process JAX loop of the same model.

    4 hosts x 1 device, a transformer of 10 million float32 parameters with Adam, 16 sequences of 64 bytes per
    step. The stall runs from SIGKILL to the end of the next step on every survivor, minus one healthy step.
    The first step is measured from the command until every host has committed it, over that of one host alone.
    `share_per_host` is the largest share of a sharded state on one of 3 hosts, times 3, after the fourth was killed.
    Where collectives cannot be aborted, a kill replaces all workers, by standbys that have imported the libraries,
    or that stand in seats of the world. Two jobs of the trainer, with a sharded state and with plans, have a model of a
    million parameters and a healthy step of their own.
    The benchmark takes about twenty minutes on two cores.
    """
    console = open_console(json_only)
    script = JOBS / "stall_job.py"
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        work = Path(folder)
        console.print("first steps: one host alone and all hosts, in turn")
        cold, warm = measure_first_steps(script, work, starts, console)
        console.print("overhead: undisturbed windows, ours and bare JAX in turn")
        ours, bare = _measure_steady(script, work, steady_steps, windows)
        console.print("stalls: kills, each after all hosts train again")
        campaign = _Campaign(script, work, console)
        campaign.run(kills)
        console.print("stalls where all workers are replaced by standbys")
        replacement_s: dict[StandbyKind, float] = {
            standby: measure_replacements(
                script, work / f"replace-{standby}", replacements, console, standby=standby
            )
            for standby in STANDBYS
        }
        console.print("share of a sharded state: one of four hosts is killed")
        trainer = JOBS / "trainer_job.py"
        share = measure_share(trainer, work / "share")
        console.print("stalls of the trainer's jobs")
        stalls = [
            measure_trainer_stall(trainer, work / job.kind, job, trainer_kills, console)
            for job in (SHARDED, PLANNED)
        ]
    figures = campaign.figures(ours, bare, cold, warm, replacement_s, stalls, share)
    console.print(_stall_table(campaign, figures.healthy_step_s))
    console.print(_summary_table(figures, ours, bare))
    print_json_line(figures)


# Overhead.


def _measure_steady(script: Path, work: Path, steps: int, windows: int) -> tuple[list[float], list[float]]:
    """Return step times of our loop and of the bare one, in alternating windows so that drift affects both."""
    ours: list[float] = []
    bare: list[float] = []
    for window in range(windows):
        ours_folder, bare_folder = work / f"ours-{window}", work / f"bare-{window}"
        run_undisturbed([str(script), "ours", str(steps), str(ours_folder / "times")], ours_folder)
        run_bare([str(script), "bare", str(steps), str(bare_folder / "times")], bare_folder)
        ours += read_times(ours_folder)
        bare += read_times(bare_folder)
    return ours, bare


# Stalls.


class _Campaign:
    """Measurements of one job in which workers are killed one after the other."""

    def __init__(self, script: Path, work: Path, console: Console) -> None:
        self._command = [str(script), "ours", str(MANY_STEPS), str(work / "campaign" / "times")]
        self._work = work / "campaign"
        self._console = console
        self.stalls: list[Stall] = []
        self.rejoins: list[float] = []
        self.recoveries: list[float] = []
        """Of kills without a re-form: until all hosts had made a step together again."""
        self.steps_lost = 0
        self.healthy_steps: list[float] = []
        self.agent_rss_mib: list[float] = []
        self.agent_start_s: list[float] = []

    def run(self, kills: int) -> None:
        with run_job(self._command, self._work, options=AS_ON_A_POD) as job:
            wait_healthy(job)
            for number in range(kills):
                with_service = number % 2 == 1
                fault_s = self._kill(job, number, with_service=with_service)
                wait_healthy(job)
                recovery_s = find_recovery_s(job.read_events(), fault_s, HOSTS)
                if recovery_s is not None and not with_service:
                    self.recoveries.append(recovery_s)
            self._look_at_agents(job)

    def _kill(self, job: LocalJob, number: int, *, with_service: bool) -> float:
        """SIGKILL to a worker while the others wait in the all-reduce; with its service: a re-form. Return when."""
        hosts = make_host_names(HOSTS)
        victim, late = hosts[number % HOSTS], hosts[(number + 1) % HOSTS]
        with hold_collective(job, late) as step:
            fault_s = job.kill(JobComponent.WORKER, victim)
            if with_service:
                with contextlib.suppress(InternalError):
                    job.kill(JobComponent.COORDINATION_SERVICE, "leader")
        found = wait_stall(job, fault_s, REPORT_TIMEOUT_S)
        self.stalls.append(found)
        self.steps_lost += max(0, step - found.step)
        self._console.print(f"  {len(self.stalls)}: {victim}, {found.change}, {found.total_s:.2f} s")
        return fault_s

    def _look_at_agents(self, job: LocalJob) -> None:
        report = job.read_report()
        if report is None:
            raise InternalError(f"the job is gone:\n{job.read_tail()}")
        for host in report.hosts:
            process = psutil.Process(host.agent.pid)
            self.agent_rss_mib.append(process.memory_info().rss / 2**20)
        born = {h.host: psutil.Process(h.agent.pid).create_time() for h in report.hosts}
        for event in job.read_events():
            if event.kind == "agent.started" and HostName(event.host) in born:
                self.agent_start_s.append(event.wall_s - born[HostName(event.host)])
        starts = [
            e for e in job.read_events() if e.kind == "generation.phase" and e.detail.get("phase") == "form"
        ]
        for form in starts[1:]:
            if "asked to join" in str(form.detail.get("reason")):
                after = read_stall_from_boundary(job, form.generation or 0)
                if after is not None:
                    self.rejoins.append(after)

    def figures(
        self,
        ours: Sequence[float],
        bare: Sequence[float],
        cold: FirstSteps,
        warm: FirstSteps,
        replacement_s: Mapping[StandbyKind, float],
        trainer_stalls: Sequence[float],
        share: float,
    ) -> StallFigures:
        healthy_s = statistics.median(ours)

        def median_of(change: str) -> float:
            found = [s.total_s - healthy_s for s in self.stalls if s.change == change]
            return statistics.median(found) if found else float("nan")

        return StallFigures(
            shrink_stall_s=round(median_of("shrink"), 3),
            reform_stall_s=round(median_of("reform"), 3),
            rejoin_stall_s=round(statistics.median(self.rejoins) - healthy_s, 3)
            if self.rejoins
            else float("nan"),
            sharded_stall_s=round(trainer_stalls[0], 3),
            planned_stall_s=round(trainer_stalls[1], 3),
            host_back_s=round(statistics.median(self.recoveries), 3) if self.recoveries else float("nan"),
            replace_all_stall_s=round(replacement_s["off"] - healthy_s, 3),
            replace_all_seats_stall_s=round(replacement_s["seat"] - healthy_s, 3),
            steady_overhead=round(statistics.median(ours) / statistics.median(bare) - 1, 4),
            healthy_step_s=round(healthy_s, 3),
            first_step_ratio=round(cold.ratio, 2),
            first_step_ratio_warm=round(warm.ratio, 2),
            first_step_s=round(statistics.median(cold.together), 2),
            agent_rss_mib=round(statistics.median(self.agent_rss_mib), 1),
            agent_start_s=round(statistics.median(self.agent_start_s), 3),
            kills=len(self.stalls),
            steps_lost=self.steps_lost,
            share_per_host=round(share, 4),
            machine=describe_machine(),
        )


def read_stall_from_boundary(job: LocalJob, generation: int) -> float | None:
    """Return the seconds of a planned change, from the first member's stop to the last member's next commit."""
    events = [e for e in job.read_events() if e.generation == generation]
    stopped = [e.monotonic_s for e in events if e.kind == "worker.idle"]
    committed = [e.monotonic_s for e in events if e.kind == "step.committed"]
    return max(committed) - min(stopped) if stopped and len(committed) == HOSTS else None


def _stall_table(campaign: _Campaign, healthy_s: float) -> Table:
    table = Table(
        title=f"stalls in s, from SIGKILL to the next step (a healthy step takes {healthy_s:.3f} s)"
    )
    for name in ("kill", "how", "noticed by"):
        table.add_column(name)
    for name in ("notice", "quiesce", "rebuild", "next step", "all", "minus a step"):
        table.add_column(name, justify="right")
    for number, found in enumerate(campaign.stalls, start=1):
        phases = (found.detection_s, found.quiesce_s, found.rebuild_s, found.step_s, found.total_s)
        table.add_row(
            str(number),
            found.change,
            str(found.detected_by),
            *(f"{seconds:.3f}" for seconds in phases),
            f"{found.total_s - healthy_s:.3f}",
        )
    return table


def _summary_table(figures: StallFigures, ours: Sequence[float], bare: Sequence[float]) -> Table:
    table = Table("figure", "value", "aim", title=figures.machine)
    table.add_row("shrink, median stall", f"{figures.shrink_stall_s:.3f} s", "0.3 s")
    table.add_row("re-form, median stall", f"{figures.reform_stall_s:.3f} s", "1.0 s")
    table.add_row("rejoin (planned), median stall", f"{figures.rejoin_stall_s:.3f} s", "0.3 s")
    table.add_row("trainer, sharded state, median stall", f"{figures.sharded_stall_s:.3f} s", "1.0 s")
    table.add_row("trainer, planned, median stall", f"{figures.planned_stall_s:.3f} s", "0.5 s")
    table.add_row("from the kill until all hosts train again", f"{figures.host_back_s:.3f} s", "3.0 s")
    table.add_row("all workers replaced, median stall", f"{figures.replace_all_stall_s:.3f} s", "2.5 s")
    table.add_row("the same, standbys in seats", f"{figures.replace_all_seats_stall_s:.3f} s", "1.0 s")
    spread = f"{min(ours):.3f} to {max(ours):.3f} s, bare {min(bare):.3f} to {max(bare):.3f} s"
    table.add_row("overhead of the loop", f"{100 * figures.steady_overhead:.1f} % ({spread})", "1 %")
    ratios = f"{figures.first_step_ratio:.2f}; {figures.first_step_ratio_warm:.2f}"
    table.add_row("first step, all hosts over one: empty cache; full", ratios, "1.5; 1.2")
    table.add_row("agent memory", f"{figures.agent_rss_mib:.1f} MiB", "60 MiB")
    table.add_row("agent start", f"{figures.agent_start_s:.3f} s", "0.5 s")
    table.add_row("largest share of a sharded state, times hosts", f"{figures.share_per_host:.3f}", "1.01")
    table.add_row("kills; steps lost", f"{figures.kills}; {figures.steps_lost}", "0 lost")
    return table
