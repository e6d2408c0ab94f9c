"""A running job as seen from outside, and the one loop that waits for its records, events and end.

Each wait has a timeout and ends when the job ends: a campaign, the demo, a benchmark and a test never hang with a job.
"""

import abc
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from resilient_jax.cluster.job_report import JobReport
from resilient_jax.errors import InternalError
from resilient_jax.events import Event
from resilient_jax.local_job.log_tail import tail_events
from resilient_jax.telemetry.event_log import read_events

T = TypeVar("T")

POLL_INTERVAL_S = 0.02
"""A poll of the store takes 9 ms of processor time from the job: measurements poll less often."""
LONG_POLL_INTERVAL_S = 0.1
"""Of a wait that has lasted some seconds: what it waits for takes the processors that a poll would take."""


class JobTimeout(InternalError):
    """The error of a wait that timed out while the job still ran."""


class JobEnded(InternalError):
    """The error of a wait that the end of the job cut short."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobObserver:
    """Who else looks at what the waits of an observed job read.

    Attributes:
        on_events: called with each event once.
        on_report: called with the store's records whenever a wait has read them.
        report_interval_s: time between two polls of the store.
    """

    on_events: Callable[[Sequence[Event]], None] = lambda events: None
    on_report: Callable[[JobReport], None] = lambda report: None
    report_interval_s: float = POLL_INTERVAL_S


class ObservedJob(abc.ABC):
    """A job whose records, events and end can be waited for.

    Attributes:
        run_directory: the folder with the event logs.
        events: a reader of the events so far, which skips corrupt lines.
    """

    def __init__(self, run_directory: Path, observer: JobObserver | None = None) -> None:
        """Observe the job of a run folder; `observer` looks, too."""
        self.run_directory = run_directory
        self.events = tail_events(run_directory)
        self._observer = observer or JobObserver()

    @abc.abstractmethod
    def exit_code(self) -> int | None:
        """Return the exit code of the job; None while it runs."""

    @abc.abstractmethod
    def read_report(self) -> JobReport | None:
        """Return the store's records of the job; None while the job starts, and after its end."""

    @abc.abstractmethod
    def read_tail(self, lines: int = 60) -> str:
        """Return the end of the job's output and of its events, for error messages."""

    def read_events(self) -> list[Event]:
        """Return the events of all hosts in order of time.

        Raises:
            MessageError: a line of a log is not an event.
        """
        logs = self.run_directory.glob("*.events.jsonl")
        return sorted((e for log in logs for e in read_events(log)), key=lambda event: event.monotonic_s)

    def wait_for(
        self,
        what: str,
        find: Callable[[], T | None],
        timeout_s: float,
        interval_s: float = POLL_INTERVAL_S,
    ) -> T:
        """Poll until `find` returns a value that is not None, and return the value.

        Args:
            what: is waited for, in words.
            find: what to poll.
            timeout_s: limit of the wait.
            interval_s: between two polls at first; after some seconds `LONG_POLL_INTERVAL_S`, if that is longer.

        Raises:
            JobTimeout: `find` returned None for `timeout_s`; with the end of the job's output.
            JobEnded: the job ended before.
        """
        began_s = time.monotonic()
        while True:
            # Checked first, so that the records from before the job's end are still found.
            has_ended = self.exit_code() is not None
            self.poll_events()
            found = find()
            if found is not None:
                return found
            if has_ended:
                raise JobEnded(f"the job ended before {what}:\n{self.read_tail()}")
            waited_s = time.monotonic() - began_s
            if waited_s > timeout_s:
                raise JobTimeout(f"{what} did not happen within {timeout_s:g} s:\n{self.read_tail()}")
            time.sleep(max(interval_s, min(LONG_POLL_INTERVAL_S, interval_s * (1 + waited_s))))

    def poll_events(self) -> None:
        """Pass new events to `on_events`."""
        if new := self.events.poll():
            self._observer.on_events(new)

    def wait_report(
        self, what: str, holds: Callable[[JobReport], bool], timeout_s: float = 60.0
    ) -> JobReport:
        """Poll until `holds` is true of the store's records, and return them.

        Raises:
            JobTimeout: `holds` stayed false for `timeout_s`; with the end of the job's output and the last records.
            JobEnded: the job ended before.
        """
        newest: JobReport | None = None

        def find() -> JobReport | None:
            nonlocal newest
            report = self.read_report()
            if report is None:
                return None
            newest = report
            self._observer.on_report(report)
            return report if holds(report) else None

        try:
            return self.wait_for(what, find, timeout_s, self._observer.report_interval_s)
        except JobTimeout as late:
            raise JobTimeout(f"{late}\n{msgspec.json.format(msgspec.json.encode(newest)).decode()}") from None

    def wait_event(self, what: str, holds: Callable[[Event], bool], timeout_s: float = 60.0) -> Event:
        """Poll until an event of any host satisfies `holds`, and return the first such event.

        Raises:
            JobTimeout: no such event within `timeout_s`; with the end of the job's output.
            JobEnded: the job ended before.
        """
        # Of its own, for the events from before; each event is decoded once, however long it takes.
        events = tail_events(self.run_directory)

        def find() -> Event | None:
            new = sorted(events.poll(), key=lambda event: event.monotonic_s)
            return next(filter(holds, new), None)

        return self.wait_for(what, find, timeout_s)


def describe_event(event: Event) -> str:
    """Return an event as a line for people, without its time."""
    detail = " ".join(f"{name}={value}" for name, value in event.detail.items())
    words = [event.host, str(event.kind)]
    words += [f"g{event.generation}"] if event.generation is not None else []
    words += [f"step {event.step}"] if event.step is not None else []
    return " ".join([*words, detail]).strip()
