"""A job that is broken in one way after the other, and what became of it each time."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.cluster.local_job import LocalJob
from resilient_jax.errors import InternalError
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.records import Generation, GenerationPhase, HostStatus, Member
from resilient_jax.protocol.snapshots import SnapshotPhase
from resilient_jax.telemetry.stall import Stall, measure_stall

HOSTS: Final = 4
RECOVERED_STEPS: Final = 3
"""Between two incidents everybody trains together for this long, so that each starts from health."""
RECOVERY_TIMEOUT_S: Final = 120.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What was done to the job, and what became of it.

    Attributes:
        steps_lost: committed ones that were done again.
        decoded: bytes of the state that were computed from parity, on all hosts.
        snapshot_bytes: bytes that were read from snapshots as they were.
        restore_s: for reading them, on the slowest host.
    """

    fault: str
    stall: Stall
    steps_lost: int
    decoded_bytes: int
    snapshot_bytes: int
    restore_s: float


class Scenario:
    """A running job, and the incidents so far."""

    def __init__(self, job: LocalJob, console: Console, steps: int) -> None:
        self._job = job
        self._console = console
        self._steps = steps
        self._shown_s = 0.0
        self.recoveries: list[Recovery] = []

    def run_replicated_state(self) -> None:
        """Every host has the whole state: kills a worker in a collective, the leader's host, a service."""
        self._wait_all_train(f"{HOSTS} hosts import JAX, compile and begin to train")
        self._break("one worker, SIGKILL inside a collective", self._kill_worker_in_collective)
        self._wait_all_train("the worker comes back and asks to join")
        self._break(
            "the leader's agent with everything on its host", lambda: self._kill(JobComponent.HOST, "leader")
        )
        self._wait_all_train("the host comes back")
        self._break(
            "the coordination service", lambda: self._kill(JobComponent.COORDINATION_SERVICE, "leader")
        )

    def run_sharded_state(self) -> None:
        """No host has the whole state: two hosts die at once, and a worker while it is being copied."""
        self._wait_all_train(f"{HOSTS} hosts train; each keeps a part of the state, and parity of others")
        self._break("two hosts at once, with their memory", self._kill_two_hosts)
        self._wait_all_train("both hosts come back")
        self._break("a worker while its part of a snapshot is copied", self._kill_worker_in_copy)

    def run_planned_job(self) -> None:
        """The trainer follows a plan: kills a worker, when the programs of the next plan are there."""
        self._wait_all_train(f"{HOSTS} hosts train, as the fastest plan for them says")
        self._say_plan()
        self._wait_prepared()
        self._break("one worker; the others have another fastest plan", self._kill_worker_in_collective)
        self._say_plan()
        self._wait_all_train("the worker comes back and asks to join")
        self._say_plan()

    def wait_done(self) -> None:
        """Shows progress until the job has ended."""
        self._console.print("nothing more is broken; training to the end")
        while self._job.process.poll() is None:
            self._show_progress(self._job.read_report())
            time.sleep(0.1)
        if self._job.process.returncode:
            raise InternalError(f"the demo's job failed:\n{self._job.read_tail()}")

    def _wait_prepared(self) -> None:
        """Until every host has compiled what it would need if one of them died."""
        self._console.print("[dim]the programs of the next plan are compiled while training goes on[/]")
        for host in [member.host for member in _members(self._report())]:
            self._job.wait_event(
                "programs compiled ahead",
                lambda event, host=host: (
                    event.kind is EventKind.PROGRAM_COMPILED_AHEAD and event.host == host
                ),
                RECOVERY_TIMEOUT_S,
            )

    def _say_plan(self) -> None:
        """The plan of the newest generation, why, and what its first step waited for programs."""
        events = self._job.read_events()
        plan = max(
            (e for e in events if e.kind is EventKind.PLAN_CHOSEN), key=lambda e: e.monotonic_s, default=None
        )
        if plan is None:
            return
        ready = [e for e in events if e.kind is EventKind.PROGRAMS_READY and e.generation == plan.generation]
        waited_s = max((float(e.detail["seconds"]) for e in ready), default=0.0)
        compiled = max((int(e.detail["compiled"]) for e in ready), default=0)
        before = f" (before: {plan.detail['before']})" if plan.detail["before"] else ""
        self._console.print(
            f"[bold]plan[/]{before}: {plan.detail['reason']}\n"
            f"  its first step waited {waited_s:.2f} s for programs; {compiled} of them had to be compiled"
        )

    # What is broken.

    def _kill_worker_in_collective(self) -> float:
        report = self._report()
        victim, late = _others(report)[:2]
        # One host is late to the all-reduce, so that all others wait inside it when the victim dies.
        self._job.hold(FailPoint.BEFORE_REDUCE, [late], _newest_step(report) + 2)
        self._job.wait_held([late])
        time.sleep(0.3)
        killed_s = self._job.kill(JobComponent.WORKER, victim)
        self._job.release()
        return killed_s

    def _kill_two_hosts(self) -> float:
        one, other = _others(self._report())[:2]
        killed_s = self._kill(JobComponent.HOST, one)
        self._kill(JobComponent.HOST, other)
        return killed_s

    def _kill_worker_in_copy(self) -> float:
        report = self._report()
        victim = _others(report)[0]
        self._job.hold(FailPoint.DURING_COPY, [victim], _newest_step(report) + 2)
        self._job.wait_held([victim])
        killed_s = self._kill(JobComponent.WORKER, victim)
        self._job.release()
        return killed_s

    def _kill(self, part: JobComponent, host: str) -> float:
        return self._job.kill(part, host)

    def _break(self, what: str, act: Callable[[], float]) -> None:
        self._console.print(f"[bold red]kill[/]: {what}")
        before = self._report()
        fault_s = act()
        stall = self._wait_stall(what, fault_s)
        incident = _describe(what, stall, before, self._job.read_events())
        self.recoveries.append(incident)
        decoded = (
            f", {incident.decoded_bytes / 2**20:.1f} MiB decoded from parity"
            if incident.decoded_bytes
            else ""
        )
        self._console.print(
            f"  noticed by {stall.detected_by} after {1000 * stall.detection_s:.0f} ms; {stall.num_hosts} hosts "
            f"train on ({stall.change}) from step {stall.step} after {stall.total_s:.2f} s{decoded}"
        )

    # Waiting.

    def _wait_stall(self, what: str, fault_s: float) -> Stall:
        end_s = time.monotonic() + RECOVERY_TIMEOUT_S
        while time.monotonic() < end_s and self._job.process.poll() is None:
            stall = measure_stall(self._job.read_events(), fault_s)
            if stall is not None:
                return stall
            self._show_progress(self._job.read_report())
            time.sleep(0.05)
        raise InternalError(f"training did not go on after: {what}\n{self._job.read_tail()}")

    def _wait_all_train(self, why: str) -> None:
        self._console.print(f"[dim]{why}[/]")
        first = self._job.wait_report(why, self._all_train, RECOVERY_TIMEOUT_S)
        target = _newest_step(first) + RECOVERED_STEPS

        def far_enough(report: JobReport) -> bool:
            self._show_progress(report)
            return _newest_step(report) >= target

        self._job.wait_report(f"step {target}", far_enough, RECOVERY_TIMEOUT_S)

    def _all_train(self, report: JobReport) -> bool:
        """All hosts, and if they take snapshots with a committed one."""
        self._show_progress(report)
        generation = report.generation
        if (
            generation is None
            or generation.phase is not GenerationPhase.ACTIVE
            or len(generation.members) < HOSTS
        ):
            return False
        return all(
            host.worker is not None
            and host.worker.report.has_finished_step
            and (host.snapshot_server is None or _is_protected(host, generation))
            for host in report.hosts
        )

    def _show_progress(self, report: JobReport | None) -> None:
        interval_s = 0.5 if self._console.is_terminal else 10.0
        if report is None or report.generation is None or time.monotonic() - self._shown_s < interval_s:
            return
        self._shown_s = time.monotonic()
        newest = max(report.hosts, key=lambda h: h.step, default=None)
        if newest is None:
            return
        loss = f", loss {newest.metrics['loss']:.4f}" if "loss" in newest.metrics else ""
        self._console.print(
            f"  step {newest.step}/{self._steps}{loss}, generation {report.generation.number} "
            f"({report.generation.phase}), {len(report.generation.members)} hosts live",
            end="\r" if self._console.is_terminal else "\n",
            style="cyan",
        )

    def _report(self) -> JobReport:
        return self._job.wait_report("the job's report", lambda report: report.generation is not None)


def _describe(what: str, stall: Stall, before: JobReport, events: Sequence[Event]) -> Recovery:
    restored = [
        e.detail
        for e in events
        if e.kind is EventKind.SNAPSHOT_RESTORED
        and e.generation is not None
        and e.generation == stall.generation
    ]
    return Recovery(
        fault=what,
        stall=stall,
        steps_lost=max(0, _newest_step(before) - stall.step),
        decoded_bytes=sum(int(detail["decoded"]) for detail in restored),
        snapshot_bytes=sum(int(detail["local"]) + int(detail["peer"]) for detail in restored),
        restore_s=max((float(detail["seconds"]) for detail in restored), default=0.0),
    )


def _members(report: JobReport) -> tuple[Member, ...]:
    assert report.generation is not None, "waited for"
    return report.generation.members


def _others(report: JobReport) -> list[HostName]:
    """The hosts that do not lead."""
    return [m.host for m in _members(report) if m.host != report.leader]


def _is_protected(host: HostStatus, generation: Generation) -> bool:
    return any(
        s.phase is SnapshotPhase.COMMITTED and s.id.generation == generation.number for s in host.snapshots
    )


def _newest_step(report: JobReport) -> int:
    return max((host.step for host in report.hosts), default=0)
