"""A standby in a spare seat of the world takes the place of a worker that dies, in the very next generation."""

import signal
from collections.abc import Iterator

import pytest
from tiny_job import CONFIG, ONE_DEVICE, TinyJob

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.events import EventKind
from resilient_jax.protocol.records import Generation, StandbyStatus, WorldChange

pytestmark = pytest.mark.timeout(280)
HOSTS = 3
SEATS = f'{CONFIG}standby = "seat"\n'


def generation_of(report: JobReport) -> Generation:
    assert report.generation is not None
    return report.generation


def wait_seated(tiny: TinyJob, *hosts: str) -> dict[str, StandbyStatus]:
    """Wait until all hosts train and these hosts' standbys are ready in seats of the world; return their statuses."""

    def find(report: JobReport) -> dict[str, StandbyStatus]:
        return {
            status.host: status.standby
            for status in report.hosts
            if status.standby is not None
            and status.standby.worker is not None
            and status.standby.worker.report.world == generation_of(report).world
        }

    tiny.wait_training(HOSTS)
    report = tiny.wait_report("standbys in their seats", lambda report: set(hosts) <= set(find(report)))
    return find(report)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    """Yield the job that the tests below break, one after the other; check its invariants after them."""
    with TinyJob(tmp_path_factory.mktemp("seats"), HOSTS, SEATS, options=ONE_DEVICE) as tiny:
        yield tiny
        tiny.finish()


@pytest.mark.parametrize("victim", ["host-1", "host-0"])
def test_the_generation_after_a_death_has_all_hosts_with_the_standby_in_place(
    victim: str, shared: TinyJob
) -> None:
    standby = wait_seated(shared, victim)[victim]
    before = generation_of(shared.read_report())
    shared.signal(JobComponent.WORKER, victim, signal.SIGKILL)
    report = shared.wait_training(HOSTS, before.number)
    (worker,) = (status.worker for status in report.hosts if status.host == victim)
    assert worker is not None
    assert worker.pid == standby.pid
    formed = [
        (event.detail["hosts"], event.detail["change"])
        for event in shared.job.read_events()
        if event.kind is EventKind.GENERATION_PHASE
        and event.detail["phase"] == "form"
        and (event.generation or 0) > before.number
    ]
    assert formed == [(HOSTS, WorldChange.GROW)]
    assert generation_of(report).world == before.world
