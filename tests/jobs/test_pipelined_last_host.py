"""A pipeline of which one host is left: it finishes its step in the world that it has. Bits are as if nothing was."""

import signal
from collections.abc import Iterator

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import Generation
from tests.support.pipelined_job import PipelinedJob

HOSTS, STAGES = 2, 1
"""Each host is a replica, and has all blocks."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipelinedJob]:
    """Yield a running job; check the bits of all steps at the end."""
    with PipelinedJob(tmp_path_factory.mktemp("last"), HOSTS, STAGES) as running:
        yield running
        running.finish()


def lose_host(job: PipelinedJob, *, with_service: bool) -> tuple[Generation, Generation, list[Event]]:
    """Kill a worker when both have done their tasks of a step but for its sum, and wait until it is back.

    Args:
        job: that runs.
        with_service: whether the coordination service of the world ends at the same time.

    Returns:
        The generations before and after, and the events of the other host since then.
    """
    job.wait_protected(HOSTS)
    before = job.wait_training(HOSTS).generation
    assert before is not None
    job.hold(FailPoint.BEFORE_REDUCE, ["host-0", "host-1"])
    job.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
    if with_service:
        job.signal(JobComponent.COORDINATION_SERVICE, "leader", signal.SIGKILL)
    job.job.release()
    after = job.wait_training(HOSTS, after_generation=before.number).generation
    assert after is not None
    events = sorted(job.job.read_events(), key=lambda event: event.monotonic_s)
    return before, after, [e for e in events if e.host == "host-0" and (e.generation or 0) > before.number]


def list_changes(events: list[Event]) -> list[tuple[str, int]]:
    """Return how the world changed in each generation, and the number of its hosts."""
    formed = [event for event in events if event.kind is EventKind.WORLD_FORMED]
    return [(str(event.detail["change"]), int(event.detail["hosts"])) for event in formed]


def list_details(events: list[Event], kind: EventKind, name: str) -> list[int]:
    return [int(event.detail[name]) for event in events if event.kind is kind]


@pytest.mark.full  # test_one_device_left.py goes down to the last host, too
def test_the_last_host_stays_in_its_world_and_the_next_one_joins_it_there(job: PipelinedJob) -> None:
    before, after, events = lose_host(job, with_service=False)
    assert list_changes(events) == [("shrink", 1), ("grow", HOSTS)]
    assert after.membership.world == before.membership.world
    assert EventKind.WORLD_LEFT not in {event.kind for event in events}
    assert min(list_details(events, EventKind.PIPELINE_STEP_RESUMED, "kept")) > 0


def test_the_last_host_leaves_a_world_without_a_service_only_when_its_step_is_done(job: PipelinedJob) -> None:
    before, after, events = lose_host(job, with_service=True)
    assert list_changes(events)[0] == ("shrink", 1)
    assert after.membership.world > before.membership.world
    formed = [event for event in events if event.kind is EventKind.WORLD_FORMED]
    reformed = min(e.generation or 0 for e in formed if e.detail["change"] == "reform")
    # More than one, if the leader sees only after the first that the service is gone.
    in_place, later = (
        [event for event in events if ((event.generation or 0) >= reformed) is is_later]
        for is_later in (False, True)
    )
    (step,) = list_details(in_place, EventKind.PIPELINE_STEP_RESUMED, "step")
    assert set(list_details(in_place, EventKind.PIPELINE_STATE_KEPT, "step")) == {step}
    assert min(list_details(later, EventKind.PIPELINE_STATE_KEPT, "step")) > step, (
        "it was committed in between"
    )
    assert EventKind.PIPELINE_STEP_RESUMED not in {event.kind for event in later}
