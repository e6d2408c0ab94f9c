"""Which process of a replicated job fails, and at which place: the two axes of the kill matrix."""

import signal
from collections.abc import Callable
from typing import Final

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.ids import HostName
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import Generation
from tests.support.tiny_job import RECOVERY_S, TinyJob

Victims = list[tuple[JobComponent, str]]
LEADER: Final = "leader"
"""The host of the leading agent; for coordination services all hosts that run one, as in the command line."""
PLACES: Final = ("in a collective", "between steps", "while compiling", "while forming")


def generation_of(report: JobReport) -> Generation:
    """Return the present generation of a job that has one."""
    assert report.generation is not None
    return report.generation


def followers(report: JobReport) -> list[HostName]:
    """Return the hosts that do not lead, in order of process index."""
    return [m.host for m in generation_of(report).membership.members if m.host != report.leader]


def worker_0(report: JobReport) -> Victims:
    return [(JobComponent.WORKER, generation_of(report).membership.members[0].host)]


def another_worker(report: JobReport) -> Victims:
    return [(JobComponent.WORKER, followers(report)[-1])]


def leaders_agent(report: JobReport) -> Victims:
    return [(JobComponent.AGENT, LEADER)]


def another_agent(report: JobReport) -> Victims:
    return [(JobComponent.AGENT, followers(report)[-1])]


def coordination_service(report: JobReport) -> Victims:
    return [(JobComponent.COORDINATION_SERVICE, LEADER)]


def whole_host(report: JobReport) -> Victims:
    return [(JobComponent.HOST, followers(report)[0])]


def leaders_host(report: JobReport) -> Victims:
    return [(JobComponent.HOST, LEADER)]


def two_hosts(report: JobReport) -> Victims:
    return [(JobComponent.HOST, followers(report)[1]), *leaders_host(report)]


TARGETS: Final[tuple[Callable[[JobReport], Victims], ...]] = (
    worker_0,
    another_worker,
    leaders_agent,
    another_agent,
    coordination_service,
    whole_host,
    two_hosts,
)


def break_and_recover(
    tiny: TinyJob, choose: Callable[[JobReport], Victims], place: str, number: signal.Signals
) -> None:
    """Send a signal to the victims while the job is at a place, and wait until all hosts train again."""
    report = tiny.wait_training(tiny.hosts)
    victims = choose(report)
    everybody = [m.host for m in generation_of(report).membership.members]
    broken = {report.leader if host == LEADER else host for _, host in victims}
    others = [host for host in everybody if host not in broken]
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
            tiny.signal(JobComponent.COORDINATION_SERVICE, LEADER, signal.SIGKILL)
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
            generation_of(now).number > before
            and max((h.progress.step for h in now.hosts), default=0) > step + 4
        ),
    )
    tiny.wake_all()
    tiny.wait_training(tiny.hosts, after_generation=before)
