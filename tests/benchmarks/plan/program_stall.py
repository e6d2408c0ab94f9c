"""How long training waits for programs after a failure that changes the plan, with and without compiling ahead."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import Event, EventKind
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.recovery import EVENTS_INTERVAL_S, hold_collective
from resilient_jax.telemetry.stall import Stall, measure_stall
from tests.benchmarks.paths import REPOSITORY

HOSTS = 4
DEVICES = 2
VICTIM, HELD_HOST = "host-1", "host-2"
MANY_STEPS = 10_000
"""More than the job trains: the benchmark stops it."""
MIN_STEPS = 4
"""Steps before the kill, so that the programs of the first step are compiled by then."""
STALL_TIMEOUT_S = 400.0
SAME_PLANS = "[plan]\ncalibrate = false\n"
"""The plan changes as it does on any machine."""
WITHOUT_COMPILE_AHEAD = f"{SAME_PLANS}compile_ahead = false\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramStall:
    """Stall of one kill, and the part of it that waited for programs.

    Attributes:
        programs_s: time that the first step after the kill waited for programs (to be traced, lowered, compiled or
            loaded), on the host that waited longest.
        compiled: number of programs that had to be compiled on that host.
        stall: from the kill to the end of the next step.
        before, after: the plans before and after the kill.
    """

    programs_s: float
    compiled: int
    stall: Stall
    before: str
    after: str


def measure_program_stall(work: Path, console: Console, *, is_cached: bool) -> ProgramStall:
    """Kill a worker of a planned job of 4 hosts x 2 devices, and measure the stall.

    Args:
        work: folder for the job.
        console: for progress.
        is_cached: whether programs are compiled ahead, and compiled programs are kept on disk.

    Raises:
        InternalError: training did not resume.
    """
    settings = REPOSITORY / "configs/lm_tiny_planned.toml"
    work.mkdir(parents=True, exist_ok=True)
    text = settings.read_text().replace("../meshes/", f"{settings.parents[1]}/meshes/")
    config = work / "training.toml"
    config.write_text(text.replace("[plan]\n", SAME_PLANS if is_cached else WITHOUT_COMPILE_AHEAD))
    script = [
        str(REPOSITORY / "examples/train_lm.py"),
        "--config",
        str(config),
        "--steps",
        str(MANY_STEPS),
    ]
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": str(is_cached).lower()}
    console.print(f"a planned job, programs {'compiled ahead' if is_cached else 'compiled when needed'}")
    with LocalJob(
        script,
        num_hosts=HOSTS,
        run_directory=work / "run",
        options=["--devices-per-host", str(DEVICES)],
        environment=environment,
    ) as job:
        _wait_ready(job, is_cached)
        with hold_collective(job, HELD_HOST, STALL_TIMEOUT_S):
            fault_s = job.kill(JobComponent.WORKER, VICTIM)
        return job.wait_for(
            f"a step after the kill of {VICTIM}",
            lambda: _find_stall(job.read_events(), fault_s),
            STALL_TIMEOUT_S,
            EVENTS_INTERVAL_S,
        )


def _wait_ready(job: LocalJob, is_cached: bool) -> None:
    """Wait until all hosts train and, with `is_cached`, have compiled ahead."""
    job.wait_report(
        f"step {MIN_STEPS} on {HOSTS} hosts",
        lambda report: (
            len(report.hosts) == HOSTS and all(host.progress.step >= MIN_STEPS for host in report.hosts)
        ),
        STALL_TIMEOUT_S,
    )
    for name in (f"host-{index}" for index in range(HOSTS) if is_cached):
        job.wait_event(
            f"{name} has compiled ahead",
            lambda event, name=name: event.kind is EventKind.PROGRAM_COMPILED_AHEAD and event.host == name,
            STALL_TIMEOUT_S,
        )


def _find_stall(events: Sequence[Event], fault_s: float) -> ProgramStall | None:
    """Return the first step after the fault with what it waited for; None until all of it is recorded."""
    stall = measure_stall(events, fault_s)
    later = [event for event in events if event.monotonic_s > fault_s]
    ready = [event for event in later if event.kind is EventKind.PROGRAMS_READY]
    plans = [event for event in later if event.kind is EventKind.PLAN_CHOSEN]
    if stall is None or not plans or len(ready) < stall.num_hosts:
        return None
    slowest = max(ready[: stall.num_hosts], key=lambda event: float(event.detail["seconds"]))
    return ProgramStall(
        programs_s=float(slowest.detail["seconds"]),
        compiled=int(slowest.detail["compiled"]),
        stall=stall,
        before=str(plans[0].detail["before"]),
        after=str(plans[0].detail["plan"]),
    )
