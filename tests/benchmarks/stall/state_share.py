"""The share of a sharded state that a host keeps once another host is gone, from the event `state.sharded`."""

from collections.abc import Iterable
from pathlib import Path

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.launcher import make_host_names
from resilient_jax.errors import InternalError
from resilient_jax.events import Event, EventKind
from resilient_jax.local_job.recovery import wait_training
from tests.benchmarks.runs import (
    HEALTHY_STEPS,
    HOSTS,
    MANY_STEPS,
    REPORT_TIMEOUT_S,
    run_job,
    wait_healthy,
)


def measure_share(script: Path, work: Path) -> float:
    """Return the largest share of the state on one of `HOSTS` - 1 hosts, times that number, after one host was killed.

    Raises:
        InternalError: the hosts have not recorded their shares.
    """
    *left, lost = make_host_names(HOSTS)
    with run_job([str(script), "sharded", str(MANY_STEPS)], work) as job:
        wait_healthy(job)
        job.kill(JobComponent.HOST, lost)
        wait_training(job, left, HEALTHY_STEPS, REPORT_TIMEOUT_S)
        return find_largest_share(job.read_events(), len(left))


def find_largest_share(events: Iterable[Event], num_hosts: int) -> float:
    """Return the largest share in the newest generation times the number of its hosts; 1: all are equal.

    Raises:
        InternalError: another number of hosts has recorded its share in that generation.
    """
    shares: dict[int, dict[str, float]] = {}
    for event in events:
        if event.kind is EventKind.STATE_SHARDED:
            share = float(event.detail["bytes_here"]) / float(event.detail["bytes"])
            shares.setdefault(event.generation or 0, {})[event.host] = share
    newest = shares[max(shares)] if shares else {}
    if len(newest) != num_hosts:
        raise InternalError(f"share: found {len(newest)} hosts that recorded theirs, expected {num_hosts}")
    return num_hosts * max(newest.values())
