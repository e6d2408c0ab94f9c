"""A model split over two stages, in two replicas: a stage dies in mid-step, then both holders of its blocks."""

import signal
from collections.abc import Iterator

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.protocol.failpoints import FailPoint
from tests.support.kills import generation_of
from tests.support.pipelined_job import PipelinedJob

HOSTS, STAGES, PARITY = 4, 2, 2


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipelinedJob]:
    """Yield a running job; compare its bits with those of an undisturbed run when all tests are done."""
    with PipelinedJob(tmp_path_factory.mktemp("pipelined"), HOSTS, STAGES, PARITY) as pipelined:
        yield pipelined
        pipelined.finish(more_steps=5)


@pytest.mark.parametrize(
    ("part", "hosts", "place"),
    [
        (JobComponent.WORKER, ["host-1"], FailPoint.BEFORE_WEIGHT_GRADIENT),
        (JobComponent.HOST, ["host-1", "host-3"], FailPoint.BEFORE_INPUT_GRADIENT),
    ],
    ids=["a stage", "both holders of its blocks"],
)
def test_no_bit_is_lost(part: JobComponent, hosts: list[str], place: FailPoint, job: PipelinedJob) -> None:
    job.wait_protected(HOSTS)
    before = generation_of(job.wait_training(HOSTS)).number
    job.hold(place, hosts)
    for host in hosts:
        job.signal(part, host, signal.SIGKILL)
    job.job.release()
    job.wait_protected(HOSTS, after_generation=before)
