"""A replicated state: a worker, the leader's host and the coordination service die, each at another place."""

import signal
from collections.abc import Iterator

import pytest

from tests.support.kills import break_and_recover, coordination_service, leaders_host, worker_0
from tests.support.tiny_job import ONE_DEVICE, TinyJob

HOSTS = 3


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    """Yield a running job; compare its bits with those of an undisturbed run when all tests are done."""
    with TinyJob(tmp_path_factory.mktemp("replicated"), HOSTS, options=ONE_DEVICE) as tiny:
        yield tiny
        tiny.finish()


def test_a_worker_dies_in_a_collective(job: TinyJob) -> None:
    break_and_recover(job, worker_0, "in a collective", signal.SIGKILL)


def test_the_leaders_host_dies_between_steps(job: TinyJob) -> None:
    break_and_recover(job, leaders_host, "between steps", signal.SIGKILL)


def test_the_coordination_service_dies_while_a_world_forms(job: TinyJob) -> None:
    break_and_recover(job, coordination_service, "while forming", signal.SIGKILL)
