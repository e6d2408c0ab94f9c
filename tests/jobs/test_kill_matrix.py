"""The kill matrix: which process fails, at which failpoint, and by which signal.

Each test is a cell of the matrix. The cells of a signal are incidents of one running job of four hosts, one after the
other; all hosts are back before the next incident. At the end of a job every step was done once, with the bits of a run
without failures, and no process or file of the job is left.
"""

import signal
from collections.abc import Callable, Iterator

import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.ids import HostName
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.records import Generation
from tests.support.tiny_job import CONFIG, CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, RECOVERY_S, TinyJob

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
DEVICE_OPTIONS = {signal.SIGKILL: (), signal.SIGSTOP: ONE_DEVICE}
"""Options of the job per signal. Dead hosts have two devices each; steps with one device cost half as much."""


@pytest.fixture(
    scope="module",
    params=DEVICE_OPTIONS,
    ids=lambda number: number.name,
)
def broken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TinyJob, signal.Signals]]:
    """Yield a running job and the signal that breaks it; check the job's invariants when all cells are done."""
    options = DEVICE_OPTIONS[request.param]
    config = CONFIG if request.param is signal.SIGKILL else CONFIG_WITHOUT_STANDBYS
    with TinyJob(tmp_path_factory.mktemp("matrix"), HOSTS, config, options) as tiny:
        yield tiny, request.param
        tiny.finish()


@pytest.mark.parametrize("choose", TARGETS)
@pytest.mark.parametrize("place", PLACES)
def test_training_survives(
    place: str, choose: Callable[[JobReport], Victims], broken: tuple[TinyJob, signal.Signals]
) -> None:
    tiny, number = broken
    break_and_recover(tiny, choose, place, number)


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
            # A lost coordination service makes all hosts form a new world; all are held while forming.
            tiny.job.hold(FailPoint.BEFORE_CONNECT, everybody)
            tiny.signal(JobComponent.COORDINATION_SERVICE, "leader", signal.SIGKILL)
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
