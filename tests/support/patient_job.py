"""A real job that tests observe and break: its waits end later where the machine turns out to be slow."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from resilient_jax.cluster.job_report import JobReport
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.observed_job import POLL_INTERVAL_S, JobTimeout
from tests.support.patience import USUAL_S, Deadline, patience

Found = TypeVar("Found")

LOOK_PAUSE_S = 0.1
"""A poll of the store costs its process and that of the test 9 ms of processor time, which the job needs itself."""


class PatientJob(LocalJob):
    """`resilient-jax launch` as a child; its waits are as long as `patience` says, or as a test asks for."""

    def wait_for(
        self,
        what: str,
        find: Callable[[], Found | None],
        timeout_s: float = 0.0,
        interval_s: float = POLL_INTERVAL_S,
    ) -> Found:
        """Poll until `find` returns a value that is not None, and return the value; see `ObservedJob.wait_for`."""
        deadline = Deadline(max(timeout_s, patience(USUAL_S)))
        while True:
            try:
                return super().wait_for(what, find, deadline.find_rest_s(), interval_s)
            except JobTimeout:
                if deadline.find_rest_s() == 0:
                    raise

    def wait_report(self, what: str, holds: Callable[[JobReport], bool], timeout_s: float = 0.0) -> JobReport:
        """Poll until `holds` is true of the store's records, less often than others; see `ObservedJob.wait_report`."""

        def look(report: JobReport) -> bool:
            found = holds(report)
            if not found:
                time.sleep(LOOK_PAUSE_S)
            return found

        return super().wait_report(what, look, timeout_s)

    def arrives(self, hosts: Sequence[str], seconds: float) -> bool:
        """Return whether all of these hosts are held within so many seconds, which nothing makes longer."""
        try:
            super().wait_for(
                "hosts", lambda: self.failpoints.list_held_hosts() >= set(hosts) or None, seconds
            )
        except JobTimeout:
            return False
        return True

    def wait(self, timeout_s: float = 0.0) -> int:
        """Wait for the end of the job, and return its exit code."""
        deadline = Deadline(max(timeout_s, patience(USUAL_S)))
        while True:
            try:
                return super().wait(deadline.find_rest_s())
            except JobTimeout:
                if deadline.find_rest_s() == 0:
                    raise
