"""A worker that was killed joins in place: the others keep their world, whoever dies on its way back.

The cells are incidents of one running job; at its end every step was done once, with the bits of a run without
failures.
"""

import collections
import functools
import itertools
import signal
from collections.abc import Iterator

import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import WorldChange
from resilient_jax.protocol.recovery_records import RecoveryAction
from tests.support.full_only import full_but
from tests.support.kills import generation_of
from tests.support.patience import wait_until
from tests.support.tiny_job import CONFIG, CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, RECOVERY_S, TinyJob

HOSTS = 4
MAX_RETURNS = 3
FIRST_STEPS = 10
NEWCOMER, SURVIVOR = "the newcomer", "a survivor"
PLACES = {
    "it takes its seat": FailPoint.BEFORE_CONNECT,
    "it loads programs": FailPoint.BEFORE_REHEARSAL,
    "the next world forms": FailPoint.BEFORE_FORMED,
    "its first clique forms": FailPoint.BEFORE_REDUCE,
}


def find_follower(report: JobReport, *others: str) -> str:
    """Return a host that does not lead, and is none of the others."""
    names = [member.host for member in generation_of(report).membership.members]
    return next(name for name in names if name not in (report.leader, *others))


def test_a_world_without_seats_is_formed_anew(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With `live_nodes`, as on a GPU: in place and anew, members meet first, and the service is told of deaths."""
    work = tmp_path_factory.mktemp("seats")
    config = f'{CONFIG_WITHOUT_STANDBYS}spare_seats = 1\nlive_nodes = "on"\n'
    with TinyJob(work, 3, options=ONE_DEVICE, config=config) as tiny:
        for change in (WorldChange.GROW, WorldChange.REFORM):
            before = generation_of(tiny.wait_training(3)).number
            tiny.signal(JobComponent.WORKER, find_follower(tiny.read_report()), signal.SIGKILL)
            assert generation_of(tiny.wait_training(3, before + 1)).membership.change is change
        tiny.finish()
        check_all_met(tiny.job.read_events())


def check_all_met(events: list[Event]) -> None:
    """Check that every worker that entered a generation had met its members before, and no death was kept secret."""
    met: collections.Counter[tuple[str, int | None]] = collections.Counter()
    formed: collections.Counter[tuple[str, int | None]] = collections.Counter()
    for event in events:
        if event.kind is EventKind.WORLD_MEMBERS_MET:
            met[event.host, event.generation] += 1
        elif event.kind is EventKind.WORLD_FORMED and event.detail["hosts"] != 1:
            assert met[event.host, event.generation] == 1, f"{event} without a meeting"
            formed[event.host, event.generation] += 1
    assert len(formed) >= 3 + 2 + 3 + 2 + 3
    answers = [e.detail["answer"] for e in events if e.kind is EventKind.COORDINATION_SERVICE_SEAT_LOST]
    assert len(answers) == 2
    assert all(str(answer).startswith("lost ") for answer in answers), answers


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    """Yield the job that the tests below break. They come last, as it takes processor time to the end of this file."""
    with TinyJob(tmp_path_factory.mktemp("rejoin"), HOSTS, CONFIG, options=ONE_DEVICE) as tiny:
        yield tiny
        tiny.finish()


def test_a_killed_worker_is_back_in_the_same_world_and_the_others_keep_their_processes(
    broken: TinyJob,
) -> None:
    before = broken.wait_training(HOSTS)
    # In its first steps a host may be busy loading programs, too long for a world to be kept.
    wait_until("some steps", lambda: broken.step() > FIRST_STEPS, RECOVERY_S)
    victim = find_follower(before)
    broken.signal(JobComponent.WORKER, victim, signal.SIGKILL)
    after = broken.wait_training(HOSTS, generation_of(before).number + 1)
    grown = generation_of(after)
    assert (grown.membership.change, grown.membership.world) == (
        WorldChange.GROW,
        generation_of(before).membership.world,
    )
    pids = [{h.host: h.worker.pid for h in report.hosts if h.worker} for report in (before, after)]
    assert {host for host in pids[0] if pids[0][host] != pids[1][host]} == {victim}
    decided = [e for e in broken.job.read_events() if e.kind is EventKind.RECOVERY_DECIDED]
    actions = [e.detail["action"] for e in decided]
    assert RecoveryAction.SHRINK in actions, "the others went on at once"
    assert actions[-1] == RecoveryAction.JOIN
    assert grown.record.decision is not None
    assert (decided[-1].detail["action"], decided[-1].detail["reason"]) == (
        grown.record.decision.action,
        grown.record.decision.reason,
    )
    rehearsed = [e for e in broken.job.read_events() if e.kind is EventKind.STEP_REHEARSED]
    assert [(e.host, e.detail["problem"]) for e in rehearsed] == [(victim, "")]


def hold_newcomer(job: TinyJob, place: FailPoint) -> tuple[str, str]:
    """Kill a worker, and hold the one that returns; return its host, and another that does not lead.

    On a busy machine a survivor may have to give up its collective, and so its world. Then the worker joins in a new
    one, passes no such place, and is killed again.
    """
    for _ in range(MAX_RETURNS):
        report = job.wait_training(HOSTS)
        newcomer, before = find_follower(report), generation_of(report).number
        job.signal(JobComponent.WORKER, newcomer, signal.SIGKILL)
        job.job.hold(place, [newcomer])
        ends = (
            functools.partial(_is_held, job, newcomer),
            functools.partial(_is_in_new_world, job, newcomer, before),
        )
        wait_until(
            "the return of a worker", lambda ends=ends: any(has_come() for has_come in ends), RECOVERY_S
        )
        if _is_held(job, newcomer):
            return newcomer, find_follower(report, newcomer)
        job.job.release()
    raise AssertionError(f"{MAX_RETURNS} workers in a row joined in a new world")


def _is_held(job: TinyJob, host: str) -> bool:
    return host in job.job.failpoints.list_held_hosts("hold")


def _is_in_new_world(job: TinyJob, host: str, before: int) -> bool:
    generation = generation_of(job.read_report())
    is_new = generation.number > before and generation.membership.change is WorldChange.REFORM
    return is_new and host in {member.host for member in generation.membership.members}


def is_in_make_test_jobs(case: tuple[str, str]) -> bool:
    """Whether a death is: the newcomer's and the survivor's in turn, so each place has one."""
    when, who = case
    return (list(PLACES).index(when) % 2 == 0) == (who == NEWCOMER)


@pytest.mark.parametrize(
    ("when", "who"), full_but(itertools.product(PLACES, [NEWCOMER, SURVIVOR]), is_in_make_test_jobs)
)
def test_a_second_death_while_a_worker_returns_is_survived(when: str, who: str, broken: TinyJob) -> None:
    newcomer, survivor = hold_newcomer(broken, PLACES[when])
    before = generation_of(broken.read_report()).number
    broken.signal(JobComponent.WORKER, newcomer if who == NEWCOMER else survivor, signal.SIGKILL)
    broken.job.release()
    broken.wait_training(HOSTS, before)
