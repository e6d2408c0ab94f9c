"""A state that no host has all of: two of four hosts die at once, and their shards are computed from parity."""

import signal
from collections.abc import Iterator

import pytest

from resilient_jax.cluster.job_report import JobComponent
from tests.support.kills import generation_of
from tests.support.sharded_job import ShardedJob

HOSTS, PARITY = 4, 2


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedJob]:
    """Yield a running job; compare its bits with those of an undisturbed run when all tests are done."""
    with ShardedJob(tmp_path_factory.mktemp("sharded"), HOSTS, PARITY) as sharded:
        yield sharded
        sharded.finish(more_steps=5)


@pytest.mark.parametrize(
    ("part", "hosts"),
    [
        (JobComponent.HOST, ["host-1", "host-3"]),
        (JobComponent.WORKER, [f"host-{index}" for index in range(HOSTS)]),
    ],
    ids=["two hosts", "all workers"],
)
def test_nothing_is_lost_of_the_newest_snapshot(
    part: JobComponent, hosts: list[str], job: ShardedJob
) -> None:
    job.wait_protected(HOSTS)
    promised, before = job.promised_step(), generation_of(job.read_report()).number
    for host in hosts:
        job.signal(part, host, signal.SIGKILL)
    job.wait_protected(HOSTS, after_generation=before)
    went_on = [row["step"] + 1 for row in job.restored() if row["generation"] > before]
    assert min(went_on) >= promised, f"went back to step {min(went_on)}, {promised} was committed"
