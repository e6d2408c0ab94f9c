"""Runs a campaign against a job, and checks the job's invariants after every incident and in the end.

One thread does everything in turn: wait for an incident's trigger, carry out the incident, wait until the fault has
ended and all hosts train again, check. Only temporary faults end on threads of their own.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from resilient_jax.cluster.job_report import JobReport
from resilient_jax.config import JobConfig, override_values
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.log_tail import LogTail
from resilient_jax.local_job.observed_job import JobEnded
from resilient_jax.local_job.recovery import is_training
from resilient_jax.protocol.ledger import LedgerEntry
from tests.chaos.active_faults import ActiveFaults
from tests.chaos.expected_events import IncidentRecord, check_expected_events, check_findings
from tests.chaos.faults import fault_duration_s, fault_kind
from tests.chaos.incident_injector import IncidentInjector
from tests.chaos.injection import FaultEnvironment
from tests.chaos.invariants import Invariant, Violation, deduplicate, format_timeline
from tests.chaos.job_monitor import InvariantBroken, JobMonitor
from tests.chaos.leaks import check_leftovers, identify_process, list_shared_segments, sample_job
from tests.chaos.ledger_invariants import check_commits, check_completeness
from tests.chaos.manifest import CampaignManifest, Incident
from tests.chaos.membership_invariants import check_membership
from tests.chaos.reference_run import ReferenceRun
from tests.chaos.resource_growth import ProcessSample, ResourceGrowth, measure_growth
from tests.chaos.targets import list_pids

STOP_AHEAD_STEPS = 30
"""Lead of the stop step: all hosts must read the stop file before they reach that step."""
RECOVERED_STEPS = 2
"""Steps that all hosts must finish after an incident."""
EVENT_TIMEOUT_S = 10.0
"""Timeout for an event to be written: the disk may have been full until now."""
OUTPUT_LINES = 15
"""Lines of the job's output in the report of a wrong exit code."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CampaignResult:
    """The outcome of a campaign.

    Attributes:
        incidents: the records of all incidents, including skipped ones.
        samples: samples of the long-lived processes, in order of time.
        timeline: the last events of all hosts; empty if nothing was violated.
        steps: the number of finished steps.
    """

    incidents: tuple[IncidentRecord, ...]
    violations: tuple[Violation, ...]
    samples: tuple[ProcessSample, ...]
    timeline: tuple[str, ...]
    steps: int
    duration_s: float

    @property
    def growth(self) -> ResourceGrowth:
        """Return the growth of the long-lived processes."""
        return measure_growth(self.samples)

    @property
    def skipped(self) -> tuple[IncidentRecord, ...]:
        """Return the incidents that could not be carried out."""
        return tuple(record for record in self.incidents if record.skip_reason)


class Campaign:
    """A run of a manifest against one job."""

    def __init__(
        self,
        manifest: CampaignManifest,
        job: LocalJob,
        ledger: LogTail[LedgerEntry],
        active_faults: ActiveFaults,
        reference: ReferenceRun,
        environment: FaultEnvironment,
        stop_file: Path,
        log: Callable[[str], None],
    ) -> None:
        """Prepare the campaign of a running job.

        Args:
            manifest: the incidents, and how the job must end.
            job: the running job; its events go to `active_faults`.
            ledger: the ledgers of the job's workers.
            active_faults: the faults that are not undone yet.
            reference: the run of the same script without faults.
            environment: what faults need besides processes.
            stop_file: the file in which a script without a fixed length reads at which step to stop.
            log: prints a line about the progress.
        """
        self._manifest = manifest
        self._job = job
        self._monitor = JobMonitor(job, ledger)
        self._active_faults = active_faults
        self._reference = reference
        self._stop_file = stop_file
        self._print = log
        self._injector = IncidentInjector(manifest, job, self._monitor, active_faults, environment, self._log)
        self._hosts = frozenset(f"host-{index}" for index in range(manifest.job.hosts))
        self._lease_ttl_s = override_values(
            JobConfig(), manifest.job.job_config, source="job.config"
        ).lease_ttl_s
        self._samples: list[ProcessSample] = []
        self._notes: list[tuple[float, str]] = []
        self._records: list[IncidentRecord] = []
        self._num_reported = 0
        """The number of records whose expected events have been seen."""
        self._base_step = 0
        """The step at the end of the previous incident."""

    def run(self) -> CampaignResult:
        """Run the campaign until the job ends, and return its outcome."""
        began_s = time.monotonic()
        segments = list_shared_segments()
        violations: list[Violation] = []
        try:
            try:
                self._run_incidents()
            finally:
                self._active_faults.undo_all()
            violations += self._check_end(segments)
        except InvariantBroken as broken:
            violations += broken.violations
        self._job.poll_events()
        found = deduplicate(violations)
        return CampaignResult(
            incidents=tuple(self._records),
            violations=tuple(found),
            samples=tuple(self._samples),
            timeline=tuple(format_timeline(self._job.events.records, self._notes)) if found else (),
            steps=self._monitor.step,
            duration_s=time.monotonic() - began_s,
        )

    def _run_incidents(self) -> None:
        incidents = self._manifest.incidents
        try:
            self._wait_training("training of all hosts at first")
            for index, incident in enumerate(incidents):
                is_last = index == len(incidents) - 1
                self._run_incident(index, incident, waits=is_last or not incidents[index + 1].overlaps)
            self._finish()
        except JobEnded:
            is_expected = self._manifest.expected_exit.code != 0
            reason = "the job had ended, as it should" if is_expected else "the job had ended"
            self._records += [
                IncidentRecord(index=index, incident=incidents[index], skip_reason=reason)
                for index in range(len(self._records), len(incidents))
            ]

    def _run_incident(self, index: int, incident: Incident, *, waits: bool) -> None:
        self._wait_trigger(incident)
        record = self._injector.carry_out(index, incident)
        self._records.append(record)
        self._log(record.describe() + (f": skipped: {record.skip_reason}" if record.skip_reason else ""))
        is_last = index == len(self._manifest.incidents) - 1
        if not waits or (is_last and self._manifest.expected_exit.code):
            return
        self._wait_recovered(incident)
        self._check_running()
        if (report := self._monitor.poll()) is not None:
            self._samples += sample_job(report, self._job.process.pid)

    def _wait_trigger(self, incident: Incident) -> None:
        """Wait for all conditions of the trigger but the failpoint, where the injector holds or fails the worker."""
        trigger, timeout_s = incident.trigger, self._manifest.recovery_timeout_s
        has_exact_step = trigger.step is not None and trigger.failpoint is not None
        relative = trigger.after_steps and self._base_step + trigger.after_steps
        for goal in (trigger.step, relative):
            if goal is not None and not has_exact_step:
                self._monitor.wait_report(
                    f"step {goal}", lambda _, goal=goal: self._monitor.step >= goal, timeout_s
                )
        if trigger.after_s:
            self._monitor.try_wait(lambda: False, trigger.after_s)
        if trigger.event is not None and not self._monitor.try_wait_event(trigger, timeout_s):
            self._log(f"no {trigger.event} came within {timeout_s:g} s; going on without")

    # Waiting and checking.

    def _wait_recovered(self, incident: Incident) -> None:
        kind, recovery_timeout_s = fault_kind(incident.fault), self._manifest.recovery_timeout_s
        timeout_s = (fault_duration_s(incident.fault) or 0.0) + recovery_timeout_s
        if not self._monitor.try_wait(lambda: self._active_faults.num_timed == 0, timeout_s):
            self._log(f"{kind} still lasts; no event ended it within {recovery_timeout_s:g} s")
            self._active_faults.undo_all()
        self._wait_training(f"training of all hosts after {kind} {incident.target.part}")

    def _wait_training(self, what: str) -> None:
        hosts = self._hosts - self._injector.stopped_hosts - self._injector.taken_out_hosts
        goal = self._monitor.step + RECOVERED_STEPS

        def holds(report: JobReport) -> bool:
            living = set(map(identify_process, list_pids(report)))
            has_dead = not living.isdisjoint(self._injector.dead_processes)
            return is_training(report, hosts) and not has_dead and self._monitor.step >= goal

        self._monitor.wait_report(what, holds, self._manifest.recovery_timeout_s)
        self._base_step = self._monitor.step

    def _check_running(self) -> None:
        """Check the invariants of a running job.

        Raises:
            InvariantBroken: the job violates one.
        """
        self._monitor.try_wait(lambda: not self._check_events(), EVENT_TIMEOUT_S)
        found = [
            *check_commits(self._monitor.read_ledger(), self._reference.steps),
            *check_membership(self._job.events.records),
            *self._check_events(),
            *check_findings(self._records, self._job.events.records),
        ]
        if found:
            raise InvariantBroken(*found)

    def _check_events(self) -> list[Violation]:
        """Check the incidents since the last call that found nothing; events that were found are not searched again."""
        records = self._records[self._num_reported :]
        found = check_expected_events(records, self._job.events.records, self._lease_ttl_s)
        if not found:
            self._num_reported = len(self._records)
        return found

    # The end.

    def _finish(self) -> None:
        """Resume processes that were stopped without a duration, then wait for the end of the job.

        Raises:
            InvariantBroken: the job does not end in time.
            JobEnded: the job has ended, as it must.
        """
        is_to_fail = self._manifest.expected_exit.code != 0
        if self._injector.stopped_hosts:
            self._log("waking what was stopped for good")
            self._active_faults.undo_all()
            self._injector.stopped_hosts.clear()
            if not is_to_fail:
                self._wait_training("training of all hosts after a zombie woke up")
        if is_to_fail:
            self._wait_failure()
        else:
            self._wait_done()

    def _wait_failure(self) -> None:
        """Wait for the end with one deadline for all steps: a job that survives by mistake may train forever."""
        incidents = self._manifest.incidents
        duration_s = (fault_duration_s(incidents[-1].fault) or 0.0) if incidents else 0.0
        timeout_s = duration_s + self._manifest.recovery_timeout_s
        self._monitor.wait_report("the end of the job", lambda _: False, timeout_s, Invariant.EXIT)

    def _wait_done(self) -> None:
        last = self._manifest.job.steps
        if not last:
            last = self._monitor.step + STOP_AHEAD_STEPS
            # Renamed into place: no host may read half of the number.
            temporary = self._stop_file.with_suffix(".tmp")
            temporary.write_text(str(last))
            temporary.replace(self._stop_file)
        # Step by step, so that the timeout is that of a recovery and not of all steps that are left.
        while (step := self._monitor.step) <= last:
            self._monitor.wait_report(
                "the end of the job, or a step",
                lambda _, step=step: self._monitor.step > step,
                self._manifest.recovery_timeout_s,
                Invariant.EXIT,
            )
        text = f"the job runs on at step {step}, expected its end after step {last}"
        raise InvariantBroken(Violation(invariant=Invariant.EXIT, description=text))

    def _check_end(self, segments: frozenset[str]) -> list[Violation]:
        """Check all invariants of a job that has ended; `segments` is the shared memory from before the job."""
        expected, code = self._manifest.expected_exit.code, self._job.exit_code()
        steps_wanted = self._read_steps_wanted()
        found: list[Violation] = []
        if code != expected:
            tail = self._job.read_tail(OUTPUT_LINES)
            text = f"found exit code {code}, expected {expected}; the end of the output:\n{tail}"
            found.append(Violation(invariant=Invariant.EXIT, description=text))
        elif expected == 0 and steps_wanted is None:
            text = f"the job ended at step {self._monitor.step} before the campaign asked it to"
            found.append(Violation(invariant=Invariant.EXIT, description=text))
        self._job.poll_events()
        entries = self._monitor.read_ledger()
        # A job that failed, as expected or not, has ended before its last step.
        steps = steps_wanted if expected == code == 0 else None
        reference = self._reference.extend_to(steps or self._monitor.step + 1)
        found += check_commits(entries, reference)
        has_reference = self._manifest.job.reference_hosts > 0
        found += check_completeness(entries, steps, reference if has_reference else None)
        found += check_membership(self._job.events.records)
        found += self._check_events()
        return found + check_leftovers(self._job, segments)

    def _read_steps_wanted(self) -> int | None:
        """Return the number of steps that manifest or stop file ask for; None if neither does."""
        if self._manifest.job.steps or not self._stop_file.exists():
            return self._manifest.job.steps or None
        return int(self._stop_file.read_text())

    def _log(self, text: str) -> None:
        self._notes.append((time.monotonic(), text))
        self._print(f"step {self._monitor.step}: {text}")
