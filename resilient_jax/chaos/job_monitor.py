"""A running job as a campaign sees it: its records, its events, its ledgers; and waits that are bounded."""

import time
from collections.abc import Callable

from resilient_jax.chaos.active_faults import ActiveFaults
from resilient_jax.chaos.invariants import Invariant, Violation
from resilient_jax.chaos.log_tail import LogTail
from resilient_jax.chaos.manifest import Trigger
from resilient_jax.chaos.targets import newest_step
from resilient_jax.cluster.job_report import JobReport
from resilient_jax.cluster.local_job import LocalJob
from resilient_jax.events import Event
from resilient_jax.protocol.ledger import LedgerEntry, MicrobatchEntry

POLL_INTERVAL_S = 0.1
"""A look costs the store and this process 9 ms of processor time, which the job needs itself."""


class InvariantBroken(Exception):
    """The job is not as it must be, so the campaign ends here."""

    def __init__(self, *violations: Violation) -> None:
        super().__init__("; ".join(map(str, violations)))
        self.violations = violations


class JobEnded(Exception):
    """The job's process has ended."""


class JobMonitor:
    """What is known of the job.

    Attributes:
        step: so many steps are done, as far as the store knew at the last look.
    """

    def __init__(
        self, job: LocalJob, events: LogTail[Event], ledger: LogTail[LedgerEntry], lifetimes: ActiveFaults
    ) -> None:
        self.job = job
        self.events = events
        self.step = 0
        self._ledger = ledger
        self._lifetimes = lifetimes

    def poll(self) -> JobReport | None:
        """The store's records; None while it does not answer.

        Raises:
            Ended: the job has.
        """
        if self.job.process.poll() is not None:
            raise JobEnded
        self._look_at_events()
        report = self.job.read_report()
        if report is not None:
            self.step = max(self.step, newest_step(report))
        return report

    def wait_report(
        self,
        what: str,
        holds: Callable[[JobReport], bool],
        timeout_s: float,
        invariant: Invariant = Invariant.RECOVERY,
    ) -> JobReport:
        """Waits until `holds` of the store's records.

        Raises:
            Broken: not within `deadline_s`: the invariant is violated.
            Ended: the job has.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            report = self.poll()
            if report is not None and holds(report):
                return report
            if time.monotonic() > end_s:
                raise InvariantBroken(
                    Violation(
                        invariant=invariant, description=f"{what} did not happen within {timeout_s:g} s"
                    )
                )
            time.sleep(POLL_INTERVAL_S)

    def try_wait(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it holds within that time.

        Raises:
            Ended: the job has.
        """
        end_s = time.monotonic() + timeout_s
        while not holds():
            if self.job.process.poll() is not None:
                raise JobEnded
            if time.monotonic() > end_s:
                return False
            self._look_at_events()
            time.sleep(POLL_INTERVAL_S / 10)
        return True

    def try_wait_event(self, at: Trigger, timeout_s: float) -> bool:
        """Whether an event as the trigger has it comes from now on within that time."""
        self._look_at_events()
        known = len(self.events.records)

        def has_come() -> bool:
            self._look_at_events()
            return any(_fits(event, at) for event in self.events.records[known:])

        return self.try_wait(has_come, timeout_s)

    def _look_at_events(self) -> None:
        """Each event is new once only: whoever looks also ends the faults that last until it."""
        self._lifetimes.observe_events(self.events.poll())

    def read_ledger(self) -> list[LedgerEntry]:
        """All lines, without the few that may lack a line of another process which belongs to them."""
        until_s = time.monotonic()
        self._ledger.poll()
        return [
            line
            for line in self._ledger.records
            if isinstance(line, MicrobatchEntry) or line.monotonic_s < until_s
        ]


def _fits(event: Event, at: Trigger) -> bool:
    return event.kind == at.event and all(str(event.detail.get(k)) == v for k, v in at.detail.items())
