"""Waits for a campaign's job: what does not happen in time violates an invariant."""

import time
from collections.abc import Callable

from resilient_jax.cluster.job_report import JobReport
from resilient_jax.events import Event
from resilient_jax.local_job.log_tail import LogTail
from resilient_jax.local_job.observed_job import JobEnded, JobTimeout, ObservedJob
from resilient_jax.local_job.recovery import newest_step
from resilient_jax.protocol.ledger import LedgerEntry, MicrobatchEntry
from tests.chaos.invariants import Invariant, Violation
from tests.chaos.manifest import Trigger


class InvariantBroken(Exception):
    """The error that ends a campaign whose job violates invariants."""

    def __init__(self, *violations: Violation) -> None:
        super().__init__("; ".join(map(str, violations)))
        self.violations = violations


class JobMonitor:
    """The waits of a campaign, and the ledger of its job.

    Attributes:
        step: the number of finished steps at the last read of the store.
    """

    def __init__(self, job: ObservedJob, ledger: LogTail[LedgerEntry]) -> None:
        self.step = 0
        self._job = job
        self._ledger = ledger

    def poll(self) -> JobReport | None:
        """Return the store's records; None while the store does not answer.

        Raises:
            JobEnded: the job has ended.
        """
        if self._job.exit_code() is not None:
            raise JobEnded("the job has ended")
        self._job.poll_events()
        report = self._job.read_report()
        if report is not None:
            self._observe_step(report)
        return report

    def wait_report(
        self,
        what: str,
        holds: Callable[[JobReport], bool],
        timeout_s: float,
        invariant: Invariant = Invariant.RECOVERY,
    ) -> JobReport:
        """Wait until `holds` is true of the store's records, and return them.

        Raises:
            InvariantBroken: `holds` stayed false for `timeout_s`, which violates `invariant`.
            JobEnded: the job ended before.
        """

        def holds_now(report: JobReport) -> bool:
            self._observe_step(report)
            return holds(report)

        try:
            return self._job.wait_report(what, holds_now, timeout_s)
        except JobTimeout:
            description = f"{what} did not happen within {timeout_s:g} s"
            raise InvariantBroken(Violation(invariant=invariant, description=description)) from None

    def try_wait(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Return whether `holds` becomes true within `timeout_s`.

        Raises:
            JobEnded: the job ended before.
        """
        try:
            return self._job.wait_for("it", lambda: holds() or None, timeout_s)
        except JobTimeout:
            return False

    def try_wait_event(self, trigger: Trigger, timeout_s: float) -> bool:
        """Return whether the trigger's number of events of its kind and detail come within `timeout_s` from now.

        Raises:
            JobEnded: the job ended before.
        """
        self._job.poll_events()
        events = self._job.events.records
        known = len(events)

        def have_come() -> bool:
            return sum(_matches(event, trigger) for event in events[known:]) >= (trigger.event_count or 1)

        return self.try_wait(have_come, timeout_s)

    def read_ledger(self) -> list[LedgerEntry]:
        """Return the entries from before this call: of later ones those of other processes may still be missing."""
        until_s = time.monotonic()
        self._ledger.poll()
        return [
            entry
            for entry in self._ledger.records
            if isinstance(entry, MicrobatchEntry) or entry.monotonic_s < until_s
        ]

    def _observe_step(self, report: JobReport) -> None:
        self.step = max(self.step, newest_step(report))


def _matches(event: Event, trigger: Trigger) -> bool:
    has_detail = all(str(event.detail.get(name)) == value for name, value in trigger.detail.items())
    return event.kind == trigger.event and has_detail
