"""Lives through a campaign with a job, and checks it after every incident and in the end.

One thread does everything in turn: wait for an incident's trigger, do it, wait until it is over and everybody trains
again, check. Only lifetimes end on threads of their own.
"""

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path

from resilient_jax.chaos.active_faults import ActiveFaults
from resilient_jax.chaos.expected_events import IncidentRecord, check_expected_events
from resilient_jax.chaos.faults import (
    ProcessExit,
    ProcessKill,
    ProcessStop,
    UserException,
    fault_duration_s,
    fault_kind,
)
from resilient_jax.chaos.injection import FaultEnvironment, FaultUnsupported, get_worker_action, inject_fault
from resilient_jax.chaos.invariants import Invariant, Violation, deduplicate, format_timeline
from resilient_jax.chaos.job_monitor import InvariantBroken, JobEnded, JobMonitor
from resilient_jax.chaos.leaks import (
    ProcessIdentity,
    identify_process,
    list_leftover_files,
    list_shared_segments,
    sample_process,
)
from resilient_jax.chaos.ledger_invariants import check_commits, check_completeness
from resilient_jax.chaos.manifest import CampaignManifest, Incident, TargetPart
from resilient_jax.chaos.membership_invariants import check_membership
from resilient_jax.chaos.reference_run import ReferenceRun
from resilient_jax.chaos.resource_growth import ProcessSample, ResourceGrowth, measure_growth
from resilient_jax.chaos.targets import (
    find_service_host,
    find_target_pids,
    is_training,
    list_pids,
    resolve_hosts,
)
from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from resilient_jax.config import JobConfig, override_values
from resilient_jax.protocol.failpoints import ANY_STEP, FailPointAction, FailPointOrder, HoldAction

STOP_AHEAD_STEPS = 30
"""Everybody has to read at which step to stop before he has come to it."""
RECOVERED_STEPS = 2
"""After an incident everybody must have finished so many."""
FAILPOINT_TIMEOUT_S = 15.0
"""For a worker to come to the place where it is to be held: it may be dead itself just now."""
EVENT_TIMEOUT_S = 10.0
"""For an event to be written: the disk may just have been full."""
CLEANUP_TIMEOUT_S = 15.0
"""For the kernel to take away what has been killed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CampaignResult:
    """What came of a campaign.

    Attributes:
        done: every incident, also those that were skipped.
        samples: of the long-lived processes, in order of time.
        story: the last events of all hosts; empty if nothing was violated.
        steps: that were done.
    """

    incidents: tuple[IncidentRecord, ...]
    violations: tuple[Violation, ...]
    samples: tuple[ProcessSample, ...]
    timeline: tuple[str, ...]
    steps: int
    duration_s: float

    @property
    def growth(self) -> ResourceGrowth:
        return measure_growth(self.samples)

    @property
    def skipped(self) -> tuple[IncidentRecord, ...]:
        return tuple(item for item in self.incidents if item.skip_reason)


class Campaign:
    """One job that is broken as a manifest says."""

    def __init__(
        self,
        manifest: CampaignManifest,
        watch: JobMonitor,
        lifetimes: ActiveFaults,
        reference: ReferenceRun,
        around: FaultEnvironment,
        end: Path,
        say: Callable[[str], None],
    ) -> None:
        """`end` is the file that tells a script without a fixed length at which step to stop."""
        self._manifest = manifest
        self._watch = watch
        self._job = watch.job
        self._lifetimes = lifetimes
        self._reference = reference
        self._around = around
        self._end = end
        self._say = say
        self._chance = random.Random(manifest.seed)
        self._hosts = frozenset(f"host-{index}" for index in range(manifest.job.hosts))
        self._away: set[str] = set()
        """Stopped for good: nobody expects them back."""
        self._gone: set[ProcessIdentity] = set()
        """Processes that must not be seen again."""
        self._samples: list[ProcessSample] = []
        self._notes: list[tuple[float, str]] = []
        self._done: list[IncidentRecord] = []
        self._told = 0
        """So many of them have been told of."""
        self._base_step = 0
        self._lease_ttl_s = override_values(
            JobConfig(), manifest.job.job_config, source="job.config"
        ).lease_ttl_s

    def run(self) -> CampaignResult:
        """To the job's end."""
        began_s = time.monotonic()
        segments = list_shared_segments()
        violations: list[Violation] = []
        try:
            try:
                self._live()
            finally:
                self._lifetimes.undo_all()
            violations += self._check_end(segments)
        except InvariantBroken as broken:
            violations += broken.violations
        self._watch.events.poll()
        found = deduplicate(violations)
        return CampaignResult(
            incidents=tuple(self._done),
            violations=tuple(found),
            samples=tuple(self._samples),
            timeline=tuple(format_timeline(self._watch.events.records, self._notes)) if found else (),
            steps=self._watch.step,
            duration_s=time.monotonic() - began_s,
        )

    def _live(self) -> None:
        incidents = self._manifest.incidents
        try:
            self._wait_trains("everybody trains at first")
            for number, incident in enumerate(incidents):
                is_last = number == len(incidents) - 1
                self._live_through(number, incident, waits=is_last or not incidents[number + 1].overlaps)
            self._finish()
        except JobEnded:
            expected = self._manifest.expected_exit.code != 0
            for number in range(len(self._done), len(incidents)):
                why = "the job had ended, as it should" if expected else "the job had ended"
                self._done.append(IncidentRecord(index=number, incident=incidents[number], skip_reason=why))

    # One incident.

    def _live_through(self, number: int, incident: Incident, *, waits: bool) -> None:
        self._wait_trigger(incident)
        done = self._do(number, incident)
        self._done.append(done)
        self._note(f"{done.describe()}" + (f": skipped: {done.skip_reason}" if done.skip_reason else ""))
        is_last = number == len(self._manifest.incidents) - 1
        if not waits or (is_last and self._manifest.expected_exit.code):
            return
        self._wait_over(incident)
        self._check_now()
        self._take_samples()

    def _wait_trigger(self, incident: Incident) -> None:
        """All but the place; then the place is where the worker is held, or breaks."""
        at, patience_s = incident.trigger, self._manifest.recovery_timeout_s
        is_exact = at.step is not None and at.failpoint is not None
        for what, goal in (("step", at.step), ("step", at.after_steps and self._base_step + at.after_steps)):
            if goal is not None and not is_exact:
                self._watch.wait_report(
                    f"{what} {goal}", lambda _, goal=goal: self._watch.step >= goal, patience_s
                )
        if at.after_s:
            self._watch.try_wait(lambda: False, at.after_s)
        if at.event is not None and not self._watch.try_wait_event(at, patience_s):
            self._note(f"no {at.event} came within {patience_s:g} s; going on without")

    def _do(self, number: int, incident: Incident) -> IncidentRecord:
        at, act = incident.trigger, get_worker_action(incident.fault)
        report = self._watch.wait_report(
            "the store's records", lambda report: True, self._manifest.recovery_timeout_s
        )
        hosts = self._hosts_hit(incident, report)
        if not hosts:
            return IncidentRecord(
                index=number, incident=incident, skip_reason="no host is meant by the target just now"
            )
        name = f"incident-{number}"
        ordered_s = time.monotonic()
        held = resolve_hosts((at.host,), report) if at.host is not None else hosts[:1]
        if at.failpoint is not None:
            who, what = (hosts, act) if act is not None else (held, HoldAction())
            self._order(name, incident, who, what)
            if act is None:  # who breaks by himself may be gone by now, and another process in his place
                report = self._watch.poll() or report
        try:
            return self._hit(number, incident, hosts, report, ordered_s)
        finally:
            if at.failpoint is not None:
                self._job.release_order(name)

    def _order(self, name: str, incident: Incident, hosts: tuple[str, ...], act: FailPointAction) -> None:
        at = incident.trigger
        assert at.failpoint is not None, "asked before"
        step = at.step if at.step is not None else ANY_STEP
        self._job.set_order(
            FailPointOrder(failpoint=at.failpoint, step=step, hosts=hosts, action=act, name=name)
        )
        patience_s = FAILPOINT_TIMEOUT_S if at.step is None else self._manifest.recovery_timeout_s
        if not self._watch.try_wait(lambda: self._job.came(name) >= set(hosts), patience_s):
            missing = sorted(set(hosts) - self._job.came(name))
            self._note(f"{', '.join(missing)} did not come to {at.failpoint} within {patience_s:g} s")

    def _hit(
        self, number: int, incident: Incident, hosts: tuple[str, ...], report: JobReport, ordered_s: float
    ) -> IncidentRecord:
        fault, target = incident.fault, incident.target
        done = IncidentRecord(index=number, incident=incident, hosts=hosts, started_s=time.monotonic())
        if get_worker_action(fault) is not None:
            came = self._job.came(f"incident-{number}")
            if isinstance(fault, ProcessExit | UserException):
                pids = [pid for host in came for pid in find_target_pids(target, host, report)]
                self._gone |= {found for pid in pids if (found := identify_process(pid)) is not None}
            if not came:
                return dataclasses.replace(
                    done, skip_reason=f"no worker came to {incident.trigger.failpoint}"
                )
            # It broke some moments before it was seen to have come.
            return dataclasses.replace(done, hosts=tuple(sorted(came)), started_s=ordered_s)
        processes = self._processes_hit(incident, hosts, report)
        needs_processes = target.part is not TargetPart.LINK and fault_kind(fault) not in (
            "full_disk",
            "clock_jump",
        )
        if needs_processes and not processes:
            return dataclasses.replace(done, skip_reason=f"{', '.join(hosts)} runs no {target.part} just now")
        try:
            pids = tuple(process.pid for process in processes)
            text = inject_fault(fault, hosts, pids, self._around, self._lifetimes, self._chance)
        except FaultUnsupported as skipped:
            return dataclasses.replace(done, skip_reason=str(skipped))
        self._note(text)
        self._expect_gone(incident, hosts, processes)
        return done

    def _hosts_hit(self, incident: Incident, report: JobReport) -> tuple[str, ...]:
        if incident.target.part is TargetPart.SERVICE and "leader" in incident.target.hosts:
            found = find_service_host(report)
            return (found,) if found is not None else ()
        if incident.target.part is TargetPart.STORE:
            return tuple(sorted(self._hosts))
        return resolve_hosts(incident.target.hosts, report)

    def _processes_hit(
        self, incident: Incident, hosts: tuple[str, ...], report: JobReport
    ) -> tuple[ProcessIdentity, ...]:
        """Those that live: the store may not know yet."""
        if incident.target.part is TargetPart.STORE:
            pids = [self._job.launcher_pid]
        else:
            pids = [pid for host in hosts for pid in find_target_pids(incident.target, host, report)]
        return tuple(found for pid in pids if (found := identify_process(pid)) is not None)

    def _expect_gone(
        self, incident: Incident, hosts: tuple[str, ...], processes: tuple[ProcessIdentity, ...]
    ) -> None:
        fault, part = incident.fault, incident.target.part
        is_for_good = (
            isinstance(fault, ProcessStop) and fault.duration_s is None and fault.until_event is None
        )
        if isinstance(fault, ProcessKill) or (
            is_for_good and part not in (TargetPart.AGENT, TargetPart.HOST)
        ):
            self._gone |= set(processes)
        elif is_for_good:
            self._away |= set(hosts)

    # Waiting and checking.

    def _wait_over(self, incident: Incident) -> None:
        lasts_s = fault_duration_s(incident.fault) or 0.0
        patience_s = self._manifest.recovery_timeout_s
        if not self._watch.try_wait(lambda: self._lifetimes.num_timed == 0, lasts_s + patience_s):
            self._note(f"{fault_kind(incident.fault)} lasts on; no event ended it within {patience_s:g} s")
            self._lifetimes.undo_all()
        self._wait_trains(f"everybody trains again after {fault_kind(incident.fault)} {incident.target.part}")

    def _wait_trains(self, what: str) -> None:
        expected = self._hosts - self._away
        base = self._watch.step

        def holds(report: JobReport) -> bool:
            return (
                is_training(report, expected)
                and not self._gone & set(map(identify_process, list_pids(report)))
                and self._watch.step >= base + RECOVERED_STEPS
            )

        self._watch.wait_report(what, holds, self._manifest.recovery_timeout_s)
        self._base_step = self._watch.step

    def _check_now(self) -> None:
        """What must be true of a running job.

        Raises:
            Broken: it is not.
        """
        self._watch.try_wait(lambda: not self._untold(), EVENT_TIMEOUT_S)
        found = [
            *check_commits(self._watch.read_ledger(), self._reference.steps),
            *check_membership(self._watch.events.records),
            *self._untold(),
        ]
        if found:
            raise InvariantBroken(*found)

    def _untold(self) -> list[Violation]:
        """Of incidents since the last call that gave none: what has been told once stays told."""
        found = check_expected_events(self._done[self._told :], self._watch.events.records, self._lease_ttl_s)
        if not found:
            self._told = len(self._done)
        return found

    def _take_samples(self) -> None:
        """Of what lives long: the launcher, and by host agent and snapshot server."""
        report = self._watch.poll()
        if report is None:
            return
        named = [(self._job.launcher_pid, "launcher")]
        for host in (status.host for status in report.hosts):
            agent = "leading agent" if host == report.leader else "agent"
            for part, what in (
                (JobComponent.AGENT, agent),
                (JobComponent.SNAPSHOT_SERVER, "snapshot server"),
            ):
                named += [(pid, f"{what} of {host}") for pid in find_pids(report, part, host)]
        self._samples += [found for pid, name in named if (found := sample_process(pid, name)) is not None]

    # The end.

    def _finish(self) -> None:
        """Wakes what was stopped for good, then waits until the job ends: by itself, or by what was done to it.

        Raises:
            Broken: it does not.
            Ended: it does.
        """
        fails = self._manifest.expected_exit.code != 0
        if self._away:
            self._note("what was stopped for good is woken up")
            self._lifetimes.undo_all()
            self._away.clear()
            if not fails:
                self._wait_trains("everybody trains again after a zombie woke up")
        if fails:
            self._wait_failed()
        else:
            self._wait_done()

    def _wait_failed(self) -> None:
        """One deadline for all: a job that wrongly survives goes from step to step for ever."""
        incidents = self._manifest.incidents
        lasts_s = (fault_duration_s(incidents[-1].fault) or 0.0) if incidents else 0.0
        deadline_s = lasts_s + self._manifest.recovery_timeout_s
        self._watch.wait_report("the end of the job", lambda _: False, deadline_s, Invariant.EXIT)

    def _wait_done(self) -> None:
        last = self._manifest.job.steps
        if not last:
            last = self._watch.step + STOP_AHEAD_STEPS
            temporary = self._end.with_suffix(".tmp")
            temporary.write_text(str(last))
            temporary.replace(self._end)
        while (step := self._watch.step) <= last:
            self._watch.wait_report(
                "the end of the job, or a step",
                lambda _, step=step: self._watch.step > step,
                self._manifest.recovery_timeout_s,
                Invariant.EXIT,
            )
        text = f"trains on at step {step}, expected its end after step {last}"
        raise InvariantBroken(Violation(invariant=Invariant.EXIT, description=text))

    def _check_end(self, segments: frozenset[str]) -> list[Violation]:
        expected, code = self._manifest.expected_exit.code, self._job.process.returncode
        found: list[Violation] = []
        if code != expected:
            text = f"found exit code {code}, expected {expected}; the end of its output:\n{self._job.read_tail(15)}"
            found.append(Violation(invariant=Invariant.EXIT, description=text))
        elif expected == 0 and self._steps_told() is None:
            text = f"ended by itself at step {self._watch.step} before it was told to"
            found.append(Violation(invariant=Invariant.EXIT, description=text))
        self._watch.events.poll()
        events, lines = self._watch.events.records, self._watch.read_ledger()
        steps = self._steps_told() if expected == code == 0 else None  # else it ended on the way
        undisturbed = self._reference.extend_to(steps or self._watch.step + 1)
        found += check_commits(lines, undisturbed)
        found += check_completeness(lines, steps, undisturbed)
        found += check_membership(events)
        found += self._untold()
        return found + self._leftovers(segments)

    def _steps_told(self) -> int | None:
        """How many the job was to train; None: it was not told, neither by the manifest nor by the file of the end."""
        return self._manifest.job.steps or (int(self._end.read_text()) if self._end.exists() else None)

    def _leftovers(self, segments: frozenset[str]) -> list[Violation]:
        end_s = time.monotonic() + CLEANUP_TIMEOUT_S
        while (found := self._find_leftovers(segments)) and time.monotonic() < end_s:
            time.sleep(0.1)
        return [Violation(invariant=Invariant.NO_LEFTOVERS, description=text) for text in found]

    def _find_leftovers(self, segments: frozenset[str]) -> list[str]:
        return [
            *(f"process {pid}" for pid in self._job.find_processes()),
            *(f"shared memory {name}" for name in list_shared_segments() - segments),
            *(f"{name} in the run folder" for name in list_leftover_files(self._job.run_directory)),
        ]

    def _note(self, text: str) -> None:
        self._notes.append((time.monotonic(), text))
        self._say(f"step {self._watch.step}: {text}")
