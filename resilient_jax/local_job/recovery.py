"""The steps of every fault experiment: wait for health, kill inside a collective, wait for the next step."""

import contextlib
import time
from collections.abc import Collection, Iterator

from resilient_jax.cluster.job_report import JobReport
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.observed_job import ObservedJob
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import GenerationPhase
from resilient_jax.protocol.snapshots import SnapshotPhase
from resilient_jax.telemetry.stall import Stall, measure_stall

AHEAD_STEPS = 2
"""Lead of a failpoint's step: no host has begun that step yet, although the store's records lag behind."""
COLLECTIVE_ENTRY_S = 0.3
"""Time for the other hosts to enter the all-reduce once the late host is held before its own."""
EVENTS_INTERVAL_S = 0.05
"""Time between two readings of all events: readings take processor time from the recovery that is measured."""


def wait_training(job: ObservedJob, hosts: Collection[str], num_steps: int, timeout_s: float) -> JobReport:
    """Wait until exactly these hosts train together, and then for `num_steps` more steps.

    Args:
        job: the running job.
        hosts: the names of the expected members.
        num_steps: steps to finish together, so that the next fault hits a healthy job.
        timeout_s: timeout of either wait.

    Raises:
        JobTimeout: either wait took longer than `timeout_s`.
        JobEnded: the job ended before.
    """
    what = f"training on {', '.join(sorted(hosts))}"
    first = job.wait_report(what, lambda report: is_training(report, hosts), timeout_s)
    goal = newest_step(first) + num_steps
    return job.wait_report(f"step {goal}", lambda report: newest_step(report) >= goal, timeout_s)


@contextlib.contextmanager
def hold_collective(job: LocalJob, late_host: str, timeout_s: float = 60.0) -> Iterator[int]:
    """Hold all other hosts inside the all-reduce during the `with` block, where a failure costs most.

    Args:
        job: the running job, which trains.
        late_host: the host that is held just before its all-reduce.
        timeout_s: timeout for the store's records, and for the host to arrive.

    Yields:
        The step whose all-reduce is held.
    """
    report = job.wait_report("the store's records", lambda report: True, timeout_s)
    step = newest_step(report) + AHEAD_STEPS
    with job.holding(FailPoint.BEFORE_REDUCE, [late_host], step, timeout_s):
        time.sleep(COLLECTIVE_ENTRY_S)
        yield step


def wait_stall(job: ObservedJob, fault_s: float, timeout_s: float) -> Stall:
    """Wait until every member of the next generation has finished a step, and return the phases of the stall.

    Args:
        job: the running job.
        fault_s: the monotonic time of the fault.
        timeout_s: timeout for training to resume.

    Raises:
        JobTimeout: training did not resume within `timeout_s`.
        JobEnded: the job ended before.
    """
    return job.wait_for(
        "a step after the fault",
        lambda: measure_stall(job.read_events(), fault_s),
        timeout_s,
        EVENTS_INTERVAL_S,
    )


def is_training(report: JobReport, hosts: Collection[str]) -> bool:
    """Return whether exactly these hosts train together and each has finished a step.

    If the job takes snapshots, one of this generation must be committed, too.
    """
    generation = report.generation
    if generation is None or generation.phase is not GenerationPhase.ACTIVE:
        return False
    if {member.host for member in generation.membership.members} != set(hosts):
        return False
    by_host = {status.host: status for status in report.hosts}
    for member in generation.membership.members:
        status = by_host.get(member.host)
        worker = status.worker if status is not None else None
        if (
            status is None
            or worker is None
            or worker.incarnation != member.incarnation
            or not worker.is_alive
        ):
            return False
        if not worker.report.place.has_finished_step or worker.report.generation != generation.number:
            return False
    if all(status.snapshot_server is None for status in report.hosts):
        return True
    return any(
        s.phase is SnapshotPhase.COMMITTED and s.id.generation == generation.number
        for status in report.hosts
        for s in status.snapshots
    )


def newest_step(report: JobReport) -> int:
    """Return the number of steps that the most advanced host has finished."""
    return max((host.progress.step for host in report.hosts), default=0)
