"""Which spares were used: beyond the scenarios in `spares.txt`."""

from resilient_jax.ids import HostName, Incarnation
from resilient_jax.membership.machine import HostLeft
from resilient_jax.membership.spare_hosts import list_used
from resilient_jax.protocol.generation import GenerationPhase
from resilient_jax.protocol.host_status import WorkerStatus
from resilient_jax.protocol.worker_report import WorkerReport, WorkerState
from tests.support.membership_job import Job, training

TRAINS = GenerationPhase.ACTIVE


def spared(*names: str, spares: str = "s", **config) -> Job:
    """Return a job whose hosts train, with spares that wait in their seats."""
    job = training(*names, **{"spare_seats": 8, **config})
    for name in spares:
        job.spare(name)
    assert (job.phase, job.members) == (TRAINS, list(names))
    return job


def lose(job: Job, *names: str, step: int = 6) -> None:
    """Lose hosts; the members that are left stop with the state of `step`."""
    left = [name for name in job.members if name not in names]
    for name in names:
        job.give(HostLeft(HostName(name)))
    job.acknowledge(*left, step=step, holds_state=True)
    for name in job.state.hosts:
        newcomer = job.generation.membership.find_newcomer(name, job.worker_of(name).incarnation)
        if newcomer is not None and job.worker_of(name).report.state is WorkerState.IDLE:
            job.report(name, generation=job.generation.number)


def go_on(job: Job, step: int) -> None:
    job.form()
    job.train(step)


def come_back(job: Job, name: str, incarnation: int = 2) -> None:
    """Have a host that was lost register again, and be ready."""
    report = WorkerReport(state=WorkerState.IDLE)
    job.change(name, worker=WorkerStatus(incarnation=Incarnation(incarnation), pid=2, report=report))
    job.take_seat(name)


def test_a_spare_is_used_when_it_becomes_a_member_and_not_before():
    job = spared("a", "b", "c")
    assert list_used(job.published[-2], job.state) == []
    job.give(HostLeft(HostName("b")))
    before = job.generation
    lose(job, "b")
    assert list_used(before, job.state) == ["s"]
    go_on(job, 7)
    come_back(job, "b")
    assert job.generation.membership.spares == ("b",)
    job.give(HostLeft(HostName("c")))
    before = job.generation
    lose(job, "c", step=8)
    assert list_used(before, job.state) == ["b"], "it had waited, although it was not started as a spare"
