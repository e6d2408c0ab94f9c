"""How long a kill stops the trainer's jobs: one whose state is sharded over hosts, and one whose plans are searched."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.launcher import make_host_names
from resilient_jax.events import Event, EventKind
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.recovery import hold_collective, newest_step, wait_stall
from tests.benchmarks.runs import HOSTS, MANY_STEPS, REPORT_TIMEOUT_S, run_job, wait_healthy

TIMED_STEPS: Final = 10
"""Steps whose mean is the healthy step of a job."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerJob:
    """One kind of a trainer's job.

    Attributes:
        kind: of `jobs/trainer_job.py`.
        devices_per_host: of the job.
        is_for_loss: whether a world of the event `program.compiled_ahead` is one without some host.
    """

    kind: str
    devices_per_host: int
    is_for_loss: Callable[[str], bool]


SHARDED: Final = TrainerJob(
    kind="sharded",
    devices_per_host=1,
    is_for_loss=lambda world: world == f"sharded state over {HOSTS - 1} hosts",
)
PLANNED: Final = TrainerJob(
    kind="planned", devices_per_host=2, is_for_loss=lambda world: world.startswith("without ")
)


def measure_trainer_stall(script: Path, work: Path, job: TrainerJob, kills: int, console: Console) -> float:
    """Return the median seconds from SIGKILL to a worker to the end of the next step, less one healthy step.

    The others wait in the all-reduce meanwhile. The first kill comes once all hosts have compiled for a loss.
    """
    hosts, totals = make_host_names(HOSTS), []
    command = [str(script), job.kind, str(MANY_STEPS)]
    with run_job(command, work, devices_per_host=job.devices_per_host) as running:
        wait_healthy(running)
        _wait_compiled_ahead(running, job)
        healthy_s = time_steps(running)
        for number in range(kills):
            victim, late = hosts[number % HOSTS], hosts[(number + 1) % HOSTS]
            with hold_collective(running, late):
                fault_s = running.kill(JobComponent.WORKER, victim)
            found = wait_stall(running, fault_s, REPORT_TIMEOUT_S)
            totals.append(found.total_s)
            console.print(
                f"  {number + 1}: {victim}, {job.kind}, {found.change}, {found.total_s:.2f} s with a step of "
                f"{healthy_s:.2f} s"
            )
            wait_healthy(running)
    return statistics.median(totals) - healthy_s if totals else float("nan")


def _wait_compiled_ahead(running: LocalJob, job: TrainerJob) -> None:
    for host in make_host_names(HOSTS):
        running.wait_event(
            f"{host} has compiled for a loss",
            lambda event, host=host: (
                event.kind is EventKind.PROGRAM_COMPILED_AHEAD
                and event.host == host
                and job.is_for_loss(str(event.detail["world"]))
            ),
            REPORT_TIMEOUT_S,
        )


def time_steps(running: LocalJob) -> float:
    """Return the mean seconds of the next steps."""
    reached: list[tuple[int, float]] = []
    for num_steps in (1, TIMED_STEPS):
        goal = num_steps + (reached[-1][0] if reached else newest_step(wait_healthy(running)))
        report = running.wait_report(
            f"step {goal}", lambda now, goal=goal: newest_step(now) >= goal, REPORT_TIMEOUT_S
        )
        reached.append((newest_step(report), time.monotonic()))
    (first, began_s), (last, ended_s) = reached
    return (ended_s - began_s) / (last - first)


def find_recovery_s(events: Sequence[Event], fault_s: float, num_hosts: int) -> float | None:
    """Return the seconds from a fault until all hosts have made a step together again; None: they have not.

    Args:
        events: of the job.
        fault_s: the monotonic time of the fault.
        num_hosts: of the job.
    """
    ends: dict[int, dict[str, float]] = {}
    for event in events:
        if event.kind is EventKind.STEP_COMMITTED and event.monotonic_s > fault_s:
            ends.setdefault(event.generation or 0, {})[event.host] = event.monotonic_s
    full = [max(by_host.values()) for by_host in ends.values() if len(by_host) == num_hosts]
    return min(full) - fault_s if full else None
