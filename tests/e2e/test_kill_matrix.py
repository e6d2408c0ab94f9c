"""The kill matrix: which process fails, at which failpoint, and by which signal.

Each test is one job of four hosts that must survive a row of the matrix, one incident after the other; all hosts are
back before the next incident. At the end every step was done once, with the losses of a run without failures, and no
process or file of the job is left.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_job import RECOVERY_S, TinyJob

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.ids import HostName
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.records import Generation

HOSTS = 4
Victims = list[tuple[JobComponent, str]]


def generation_of(report: JobReport) -> Generation:
    assert report.generation is not None
    return report.generation


def followers(report: JobReport) -> list[HostName]:
    """Return the hosts that do not lead, in order of process index."""
    return [m.host for m in generation_of(report).members if m.host != report.leader]


def worker_0(report: JobReport) -> Victims:
    return [(JobComponent.WORKER, generation_of(report).members[0].host)]


def another_worker(report: JobReport) -> Victims:
    return [(JobComponent.WORKER, followers(report)[-1])]


def leaders_agent(report: JobReport) -> Victims:
    return [(JobComponent.AGENT, "leader")]


def another_agent(report: JobReport) -> Victims:
    return [(JobComponent.AGENT, followers(report)[-1])]


def coordination_service(report: JobReport) -> Victims:
    return [(JobComponent.COORDINATION_SERVICE, "leader")]


def whole_host(report: JobReport) -> Victims:
    return [(JobComponent.HOST, followers(report)[0])]


def two_hosts(report: JobReport) -> Victims:
    assert report.leader is not None
    return [(JobComponent.HOST, followers(report)[1]), (JobComponent.HOST, report.leader)]


TARGETS: tuple[Callable[[JobReport], Victims], ...] = (
    worker_0,
    another_worker,
    leaders_agent,
    another_agent,
    coordination_service,
    whole_host,
    two_hosts,
)
PLACES = ("in a collective", "between steps", "while compiling", "while forming")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("place", PLACES)
def test_training_survives_every_target(place: str, number: signal.Signals, tmp_path: Path) -> None:
    with TinyJob(tmp_path, HOSTS) as tiny:
        tiny.wait_training(HOSTS)
        for choose in TARGETS:
            break_and_recover(tiny, choose, place, number)
        tiny.finish()


def break_and_recover(
    tiny: TinyJob, choose: Callable[[JobReport], Victims], place: str, number: signal.Signals
) -> None:
    report = tiny.wait_training(HOSTS)
    victims = choose(report)
    hosts = [report.leader if host == "leader" else host for _, host in victims]
    others = [m.host for m in generation_of(report).members if m.host not in hosts]
    everybody = [m.host for m in generation_of(report).members]
    match place:
        case "in a collective":
            tiny.hold(FailPoint.BEFORE_REDUCE, others[:1])  # the others enter the collective
        case "between steps":
            tiny.hold(FailPoint.AFTER_COMMIT, everybody)
        case "while compiling":
            tiny.wait_compiling(everybody)
        case "while forming":
            # A worker that comes back makes all hosts form a new world; all are held while forming.
            tiny.job.hold(FailPoint.BEFORE_CONNECT, everybody)
            tiny.signal(JobComponent.WORKER, others[-1], signal.SIGKILL)
            tiny.job.wait_held(everybody, RECOVERY_S)
        case _:
            raise AssertionError(place)
    before = generation_of(tiny.read_report()).number
    step = tiny.step()
    for part, host in victims:
        tiny.signal(part, host, number)
    tiny.job.release()
    tiny.wait_report(
        f"a new generation and steps after {number.name} to {victims} {place}",
        lambda now: (
            generation_of(now).number > before and max((h.step for h in now.hosts), default=0) > step + 4
        ),
    )
    tiny.wake_all()
    tiny.wait_training(HOSTS, after_generation=before)
