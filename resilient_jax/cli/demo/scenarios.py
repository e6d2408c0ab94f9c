"""The demo's scenarios: each injects faults into a job one after the other, and measures the recoveries."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console

from resilient_jax.cli.progress import describe_members
from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.errors import InternalError
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import HostName
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.observed_job import JobEnded
from resilient_jax.local_job.recovery import (
    AHEAD_STEPS,
    hold_collective,
    newest_step,
    wait_stall,
    wait_training,
)
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.snapshots import SnapshotPhase
from resilient_jax.telemetry.stall import Stall

NUM_HOSTS: Final = 4
RECOVERED_STEPS: Final = 2
"""Steps that all hosts train together between two kills, so that each kill hits a healthy job."""
RECOVERY_TIMEOUT_S: Final = 600.0
"""A recovery takes seconds on an idle machine, and minutes on one whose processors others use; progress is printed."""
TRAINING_TIMEOUT_S: Final = 86_400.0
"""The longest time of the steps after the last kill."""
TERMINAL_INTERVAL_S, LOG_INTERVAL_S = 0.5, 10.0
"""Time between two progress lines."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A fault, and how training resumed after it.

    Attributes:
        steps_lost: committed steps that were repeated.
        decoded_bytes: bytes of the state that were decoded from parity, on all hosts.
        snapshot_bytes: bytes that were read from snapshots without decoding, on all hosts.
        restore_s: seconds of reading and decoding on the slowest host.
        devices_per_host: devices of each host of the job.
    """

    fault: str
    stall: Stall
    steps_lost: int
    decoded_bytes: int
    snapshot_bytes: int
    restore_s: float
    devices_per_host: int


class ProgressPrinter:
    """Prints step and loss of a running job at intervals; on a terminal always in the same line."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._interval_s = TERMINAL_INTERVAL_S if console.is_terminal else LOG_INTERVAL_S
        self._printed_s = 0.0

    def show(self, report: JobReport) -> None:
        """Print a line, unless the previous line is too recent."""
        newest = max(report.hosts, key=lambda host: host.progress.step, default=None)
        is_recent = time.monotonic() - self._printed_s < self._interval_s
        if newest is None or report.generation is None or is_recent:
            return
        self._printed_s = time.monotonic()
        loss = f", loss {newest.progress.metrics['loss']:.4f}" if "loss" in newest.progress.metrics else ""
        self._console.print(
            f"  step {newest.progress.step}/{self._steps}{loss}, generation {report.generation.number} "
            f"({report.generation.phase}), {describe_members(report.generation)}",
            end="\r" if self._console.is_terminal else "\n",
            style="cyan",
        )


class Scenario:
    """A running job and the faults that are injected into the job.

    Args:
        job: the job, which runs.
        devices_per_host: devices of each host of the job.
        console: where all is printed.

    Attributes:
        recoveries: the recoveries from the faults so far.
    """

    def __init__(self, job: LocalJob, devices_per_host: int, console: Console) -> None:
        self._job = job
        self._devices_per_host = devices_per_host
        self._console = console
        self.recoveries: list[Recovery] = []

    def run_replicated_state(self) -> None:
        """Kill parts of a job with replicated state: a worker in a collective, then the leader's host."""
        self._wait_training(f"{NUM_HOSTS} hosts import JAX, compile and begin to train")
        self._break("a worker, inside a collective", self._kill_worker_in_collective)
        self._wait_training("the worker restarts and rejoins")
        self._break(
            "the leader's host",
            lambda: self._job.kill(JobComponent.HOST, "leader"),
        )
        self._wait_training("the host rejoins")

    def run_sharded_state(self) -> None:
        """Kill parts of a job with sharded state: two hosts at once, and a worker during its copy."""
        self._wait_training(f"{NUM_HOSTS} hosts train; each keeps a part of the state, and parity of others")
        self._wait_compiled_ahead(
            "the programs for fewer hosts are compiled during training",
            f"sharded state over {NUM_HOSTS - 2} hosts",
        )
        self._break("two hosts at once", self._kill_two_hosts)
        self._wait_training("both hosts rejoin")
        self._break("a worker, while it copies its snapshot", self._kill_worker_in_copy)

    def run_planned_job(self) -> None:
        """Kill a worker of a job that follows a plan, once the programs of the next plan are compiled."""
        self._wait_training(f"{NUM_HOSTS} hosts train, by the fastest plan for them")
        self._print_plan()
        self._wait_compiled_ahead("the programs of the next plan are compiled during training")
        self._break("a worker; the plan changes", self._kill_worker_in_collective)
        self._print_plan()
        self._wait_training("the worker restarts and asks to join")
        self._print_plan()

    def run_pipelined_job(self) -> None:
        """Kill parts of a job whose replicas span hosts: a stage within a step, and all hosts of the same layers."""
        self._wait_training(
            f"{NUM_HOSTS} hosts train as two replicas; a host has the state of its own layers alone"
        )
        self._print_stages()
        self._break("a host's worker, in the middle of a step", self._kill_stage)
        self._print_kept_tasks()
        self._wait_training("the worker restarts and rejoins")
        self._break("both hosts of the same layers", self._kill_holders)
        self._wait_training("both hosts rejoin")
        self._print_stages()

    def wait_done(self) -> None:
        """Wait for the end of the job.

        Raises:
            InternalError: the job failed.
        """
        self._console.print("no more kills; training to the end")
        with contextlib.suppress(JobEnded):
            self._job.wait_report("the end of training", lambda _: False, TRAINING_TIMEOUT_S)
        if self._job.exit_code():
            raise InternalError(f"the demo's job failed:\n{self._job.read_tail()}")

    def _wait_training(self, why: str) -> None:
        """Wait until all hosts train together and, if they take snapshots, the snapshots are committed."""
        self._console.print(f"[dim]{why}[/]")
        hosts = [f"host-{index}" for index in range(NUM_HOSTS)]
        wait_training(self._job, hosts, RECOVERED_STEPS, RECOVERY_TIMEOUT_S)
        self._job.wait_report("a committed snapshot on every host", _is_protected, RECOVERY_TIMEOUT_S)

    def _wait_compiled_ahead(self, why: str, world: str | None = None) -> None:
        """Wait until every host has compiled the programs for a world, by default for any."""
        self._console.print(f"[dim]{why}[/]")
        for host in [status.host for status in self._read_report().hosts]:
            self._job.wait_event(
                "programs compiled ahead",
                lambda event, host=host: (
                    event.kind is EventKind.PROGRAM_COMPILED_AHEAD
                    and event.host == host
                    and world in (None, event.detail["world"])
                ),
                RECOVERY_TIMEOUT_S,
            )

    def _print_plan(self) -> None:
        """Print the plan of the newest generation, its reason, and how long its first step waited for programs."""
        events = self._job.read_events()
        chosen = [event for event in events if event.kind is EventKind.PLAN_CHOSEN]
        if not chosen:
            return
        # A host that has just joined knows no plan before.
        plan = max(chosen, key=lambda event: (event.generation or 0, bool(event.detail["before"])))
        ready = [e for e in events if e.kind is EventKind.PROGRAMS_READY and e.generation == plan.generation]
        waited_s = max((float(e.detail["seconds"]) for e in ready), default=0.0)
        compiled = max((int(e.detail["compiled"]) for e in ready), default=0)
        before = f" (before: {plan.detail['before']})" if plan.detail["before"] else ""
        self._console.print(
            f"[bold]plan[/]{before}: {plan.detail['reason']}\n"
            f"  its first step waited {waited_s:.2f} s for programs; {compiled} of them had to be compiled"
        )

    def _print_stages(self) -> None:
        self._console.print("[bold]blocks of the model by host[/]: " + self._read_stages())

    def _read_stages(self) -> str:
        """Return the newest split of the model, such as "host-0 0-3 -> host-1 4-7; host-2 0-3 -> host-3 4-7"."""
        formed = [event for event in self._job.read_events() if event.kind is EventKind.PIPELINE_FORMED]
        return str(formed[-1].detail["cut"])

    def _print_kept_tasks(self) -> None:
        """Print how much of the step that was aborted did not have to be computed again."""
        events = self._job.read_events()
        newest = self._read_report().generation
        resumed = [
            f"{event.host} {event.detail['kept']}"
            for event in events
            if event.kind is EventKind.PIPELINE_STEP_RESUMED and newest and event.generation == newest.number
        ]
        if resumed:
            self._console.print(f"  the step went on; tasks that its hosts had done: {', '.join(resumed)}")

    def _kill_stage(self) -> float:
        report = self._read_report()
        victim = _followers(report)[0]
        step = newest_step(report) + AHEAD_STEPS
        with self._job.holding(FailPoint.BEFORE_INPUT_GRADIENT, [victim], step, RECOVERY_TIMEOUT_S):
            return self._job.kill(JobComponent.WORKER, victim)

    def _kill_holders(self) -> float:
        replicas = [
            [host.split()[0] for host in one.split(" -> ")] for one in self._read_stages().split("; ")
        ]
        leader = self._read_report().leader
        holders = next(stage for stage in zip(*replicas, strict=True) if leader not in stage)
        return min(self._job.kill(JobComponent.HOST, host) for host in holders)

    def _kill_worker_in_collective(self) -> float:
        victim, late = _followers(self._read_report())[:2]
        with hold_collective(self._job, late, RECOVERY_TIMEOUT_S):
            return self._job.kill(JobComponent.WORKER, victim)

    def _kill_two_hosts(self) -> float:
        first, second = _followers(self._read_report())[:2]
        killed_s = self._job.kill(JobComponent.HOST, first)
        self._job.kill(JobComponent.HOST, second)
        return killed_s

    def _kill_worker_in_copy(self) -> float:
        report = self._read_report()
        victim = _followers(report)[0]
        step = newest_step(report) + AHEAD_STEPS
        with self._job.holding(FailPoint.DURING_COPY, [victim], step, RECOVERY_TIMEOUT_S):
            return self._job.kill(JobComponent.WORKER, victim)

    def _break(self, fault: str, kill: Callable[[], float]) -> None:
        self._console.print(f"[bold red]kill[/]: {fault}")
        before = self._read_report()
        stall = wait_stall(self._job, kill(), RECOVERY_TIMEOUT_S)
        recovery = _measure_recovery(fault, stall, before, self._job.read_events(), self._devices_per_host)
        self.recoveries.append(recovery)
        decoded = (
            f", {recovery.decoded_bytes / 2**20:.1f} MiB decoded from parity"
            if recovery.decoded_bytes
            else ""
        )
        self._console.print(
            f"  detected by {stall.detected_by} after {1000 * stall.detection_s:.0f} ms; {stall.num_hosts} hosts "
            f"train on ({stall.change}) from step {stall.step} after {stall.total_s:.2f} s{decoded}"
        )

    def _read_report(self) -> JobReport:
        return self._job.wait_report(
            "the job's report", lambda report: report.generation is not None, RECOVERY_TIMEOUT_S
        )


def _measure_recovery(
    fault: str, stall: Stall, before: JobReport, events: Sequence[Event], devices_per_host: int
) -> Recovery:
    restored = [
        event.detail
        for event in events
        if event.kind is EventKind.SNAPSHOT_RESTORED and event.generation == stall.generation
    ]
    return Recovery(
        fault=fault,
        stall=stall,
        steps_lost=max(0, newest_step(before) - stall.step),
        decoded_bytes=sum(int(detail["decoded"]) for detail in restored),
        snapshot_bytes=sum(int(detail["local"]) + int(detail["peer"]) for detail in restored),
        restore_s=max((float(detail["seconds"]) for detail in restored), default=0.0),
        devices_per_host=devices_per_host,
    )


def _followers(report: JobReport) -> list[HostName]:
    """Return the members that do not lead."""
    assert report.generation is not None, "waited for"
    return [member.host for member in report.generation.membership.members if member.host != report.leader]


def _is_protected(report: JobReport) -> bool:
    """Return whether every host with a snapshot server has a committed snapshot of this generation."""
    generation = report.generation
    servers = [host for host in report.hosts if host.snapshot_server is not None]
    return generation is not None and all(_has_snapshot(host, generation) for host in servers)


def _has_snapshot(host: HostStatus, generation: Generation) -> bool:
    return any(
        snapshot.phase is SnapshotPhase.COMMITTED and snapshot.id.generation == generation.number
        for snapshot in host.snapshots
    )
