"""A step is finished whichever host dies at whichever failpoint: the same microbatches, the same bits.

A job survives several incidents, those of a test or of several tests; all hosts are back before the next one. At the
end `TinyJob.finish` compares the weights and the optimizer state after every step, on every host, with those of a run
without failures.
"""

import itertools
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.local_job.recovery import newest_step
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.step.assignment import ReplicaShape, locate_replicas
from resilient_jax.step.data_sample import COMPARISON_INTERVAL_STEPS, DataSample
from tests.support.full_only import full_but
from tests.support.patience import Deadline, wait_until
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, RECOVERY_S, TinyJob, count_lines

HOSTS = 4
MICROBATCHES = 14
DEATHS = ("one worker", "two workers", "a worker and the coordination service")
"""Two workers leave a single other follower; the service's death makes all hosts form a new world. All come back."""
PLACES = (
    "before its first microbatch",
    "where only some have the limits",
    "between microbatches",
    "in the reduction",
    "after the reduction",
    "in the update",
    "in recovery",
)


def members(report: JobReport) -> list[HostName]:
    assert report.generation is not None
    return [member.host for member in report.generation.membership.members]


def number_of(report: JobReport) -> GenerationNumber:
    assert report.generation is not None
    return report.generation.number


def victims_of(report: JobReport, death: str) -> list[HostName]:
    """Return the victims, never the leader: the death of its coordination service is a case of its own."""
    followers = [host for host in members(report) if host != report.leader]
    return followers[:2] if death == "two workers" else followers[-1:]


def find_survivor(report: JobReport, victims: list[HostName]) -> HostName:
    return next(host for host in members(report) if host not in victims and host != report.leader)


def live_through(tiny: TinyJob, place: str, death: str, hosts_of_replica: int = 1) -> None:
    report = tiny.wait_training(HOSTS)
    assert report.generation is not None
    victims = victims_of(report, death)
    match place:
        case "before its first microbatch":
            tiny.hold(FailPoint.BEFORE_MICROBATCH, victims)
        case "where only some have the limits":
            # A survivor is held with the victims, until it must leave: it has no limits then, the others have.
            tiny.hold(FailPoint.BEFORE_LIMITS, [*victims, find_survivor(report, victims)])
        case "between microbatches":
            # Its last one: the host has several, unless a step has few.
            tiny.hold(
                FailPoint.BEFORE_MICROBATCH, victims[:1], index=last_index(tiny, victims[0], hosts_of_replica)
            )
        case "in the reduction":
            tiny.hold(FailPoint.BEFORE_REDUCE, victims)  # all others wait inside
        case "after the reduction":
            tiny.hold(FailPoint.AFTER_REDUCE, members(report))
        case "in the update":
            tiny.hold(FailPoint.BEFORE_COMMIT, members(report))
        case "in recovery":
            # One host dies in the reduction; the victims die in the same step of the next generation.
            first = find_survivor(report, victims)
            step = tiny.hold(FailPoint.BEFORE_REDUCE, [first])
            tiny.signal(
                JobComponent.WORKER, first, signal.SIGKILL
            )  # while the host is held: the next order releases it
            tiny.job.hold(FailPoint.AFTER_REDUCE, victims, step)
            tiny.job.wait_held(victims, RECOVERY_S)
        case _:
            raise AssertionError(place)
    for host in victims:
        tiny.signal(JobComponent.WORKER, host, signal.SIGKILL)
    if death == "a worker and the coordination service":
        tiny.signal(JobComponent.COORDINATION_SERVICE, "leader", signal.SIGKILL)
    if place == "where only some have the limits":
        tiny.wait_report("the generation's end", lambda now: number_of(now) > number_of(report))
    tiny.job.release()
    tiny.wait_training(HOSTS, after_generation=report.generation.number)


def last_index(tiny: TinyJob, host: HostName, hosts_of_replica: int) -> int:
    """Return the last microbatch that a host's replica computes in a step of the present generation.

    The first host of a replica is the owner of its microbatches.

    The log of a step is written after the step is reported, so the newest row may still be of a generation without it.
    And the first step of a generation may have been begun in the one before, by other hosts.
    """
    report = tiny.wait_training(HOSTS)
    assert report.generation is not None
    hosts, begun = members(report), newest_step(report)
    seats = [member.seat for member in report.generation.membership.members]
    replicas = locate_replicas(seats, ReplicaShape(hosts=hosts_of_replica), [1] * len(seats))
    index_of_host = hosts.index(host)
    first = next(found.host_indexes[0] for found in replicas if index_of_host in found.host_indexes)
    owner = hosts[first]
    deadline = Deadline(RECOVERY_S)
    while True:
        rows = [row for rows in tiny.logs().values() for row in rows]
        newest = max(rows, key=lambda row: row["step"])
        owners = newest["owners"] if newest["step"] > begun else ()
        indices = [index for index, name in enumerate(owners) if name == owner]
        if indices:
            return indices[-1]
        assert deadline.find_rest_s() > 0, (
            f"the replica of {host} computes no microbatch:\n{tiny.job.read_tail()}"
        )
        time.sleep(0.02)


def list_changes(tiny: TinyJob) -> list[str]:
    """Return how each generation after the first was formed, as each of its members says."""
    formed = [event for event in tiny.job.read_events() if event.kind == EventKind.WORLD_FORMED]
    first = min(event.generation or 0 for event in formed)
    return [str(event.detail["change"]) for event in formed if event.generation != first]


PLACES_OF_A_REPLICA = (
    "where only some have the limits",
    "between microbatches",
    "in the reduction",
    "in recovery",
)
"""Where the hosts of a replica depend on each other; in the others each host does what a host alone does."""


def test_the_death_of_one_host_of_a_replica_of_two_is_survived_in_place(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    with TinyJob(tmp_path, HOSTS, options=ONE_DEVICE, words=["hosts=2"]) as tiny:
        for place in PLACES if pytestconfig.getoption("--full") else PLACES_OF_A_REPLICA:
            live_through(tiny, place, "one worker", hosts_of_replica=2)
        changes = list_changes(tiny)
        assert set(changes) == {"shrink", "grow"}, changes
        live_through(tiny, "in the reduction", "a worker and the coordination service")
        tiny.finish()


@pytest.mark.full
def test_random_failures_leave_the_weights_unchanged(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """One job with some random cells; tests/pure/step/test_assignment.py draws many on the pure machine."""
    seed = pytestconfig.getoption("--hypothesis-seed")
    drawn = random.Random(seed).sample(list(itertools.product(PLACES, DEATHS)), 4)
    with TinyJob(tmp_path, HOSTS) as tiny:
        for place, death in drawn:
            live_through(tiny, place, death)
        tiny.finish()


def test_of_two_hosts_the_one_that_is_left_goes_on_in_place_and_the_other_joins_rehearsed(
    tmp_path: Path,
) -> None:
    """Each host has several replicas, so the one that is left needs connections between its own devices."""
    with TinyJob(tmp_path, 2, words=["per_host=2"]) as tiny:
        report = tiny.wait_training(2)
        assert report.generation is not None
        victim = next(host for host in members(report) if host != report.leader)
        tiny.hold(FailPoint.BEFORE_REDUCE, [victim])
        tiny.signal(JobComponent.WORKER, victim, signal.SIGKILL)
        tiny.job.release()
        after = tiny.wait_training(2, after_generation=report.generation.number)
        assert after.generation is not None
        changes = list_changes(tiny)
        assert set(changes) == {"shrink", "grow"}, changes
        assert after.generation.membership.world == report.generation.membership.world
        rehearsed = [e for e in tiny.job.read_events() if e.kind is EventKind.STEP_REHEARSED]
        assert [(e.host, e.detail["problem"]) for e in rehearsed] == [(victim, "")]
        tiny.finish()


def test_a_slow_host_gets_fewer_microbatches_and_the_bits_stay_the_same(tmp_path: Path) -> None:
    with TinyJob(tmp_path, 2, options=ONE_DEVICE, words=["slow=host-1"]) as tiny:
        tiny.wait_training(2)
        tiny.job.wait_event("new shares", lambda event: event.kind == "microbatches.rebalanced", RECOVERY_S)
        tiny.finish(more_steps=5)
    last = max((row for rows in tiny.logs().values() for row in rows), key=lambda row: row["step"])
    assert last["owners"].count("host-1") <= 4, last["owners"]


@pytest.mark.full
def test_fast_reduction_stays_within_rounding(tmp_path: Path) -> None:
    with TinyJob(tmp_path, HOSTS, words=["fast"]) as tiny:
        for place in ("between microbatches", "in the reduction", "in recovery"):
            live_through(tiny, place, "one worker")
        live_through(tiny, "in the reduction", "a worker and the coordination service")
        tiny.finish()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    """Yield the job that the tests below break, one after the other; compare its bits with an undisturbed run."""
    # An audit has a second host read and compute a microbatch, in one step of some seventy.
    config = f"{CONFIG_WITHOUT_STANDBYS}audit_share = 0\n"
    with TinyJob(tmp_path_factory.mktemp("step"), HOSTS, config) as tiny:
        yield tiny
        tiny.finish()


def is_in_make_test_jobs(cell: tuple[str, str]) -> bool:
    """Each place once, the deaths in turn."""
    place, death = cell
    return DEATHS[PLACES.index(place) % len(DEATHS)] == death


@pytest.mark.parametrize(
    ("place", "death"), full_but(itertools.product(PLACES, DEATHS), is_in_make_test_jobs)
)
def test_the_weights_equal_those_of_a_run_without_failures(place: str, death: str, broken: TinyJob) -> None:
    live_through(broken, place, death)


def test_four_hosts_then_one_then_four(broken: TinyJob) -> None:
    report = broken.wait_training(HOSTS)
    before = number_of(report)
    (stays, *others) = members(report)
    broken.hold(FailPoint.BEFORE_REDUCE, others)
    late = broken.work / "late"  # for longer than the last copy of the state waits for them
    late.touch()
    for host in others:
        broken.signal(JobComponent.WORKER, host, signal.SIGKILL)
    broken.job.release()
    broken.job.wait_event(
        f"{stays} to go on alone",
        lambda event: (
            event.kind == "world.formed"
            and event.host == stays
            and event.detail["hosts"] == 1
            and (event.generation or 0) > before
        ),
        RECOVERY_S,
    )
    late.unlink()
    broken.wait_training(HOSTS, after_generation=before)


def test_only_the_microbatches_of_the_dead_host_are_computed_and_read_again(broken: TinyJob) -> None:
    report = broken.wait_training(HOSTS)
    victim = next(host for host in members(report) if host != report.leader)
    step = broken.hold(FailPoint.BEFORE_REDUCE, [victim])
    wait_until("all to be computed", lambda: len(computed_in(broken.work, step)) == MICROBATCHES, RECOVERY_S)
    broken.signal(JobComponent.WORKER, victim, signal.SIGKILL)
    broken.job.release()
    broken.wait_training(HOSTS, after_generation=number_of(report))
    before = next(row for rows in broken.logs().values() for row in rows if row["step"] == step - 1)
    dead = {index for index, owner in enumerate(before["owners"]) if owner == victim}
    counts = computed_in(broken.work, step)
    assert {index for index, count in counts.items() if count > 1} == dead, counts
    sampled = {
        DataSample.choose(step, MICROBATCHES, HOSTS).index
    }  # read by all, once more when newly assigned
    for host in members(report):
        if host != victim:  # batches read before the death are kept; newly assigned ones are read once
            read = read_in(broken.work, step, host)
            again = {index for index, count in read.items() if count > 1}
            assert again <= (sampled if step % COMPARISON_INTERVAL_STEPS == 0 else set()), read


def read_in(work: Path, step: int, host: str) -> dict[int, int]:
    """Return how often a host read each microbatch of a step."""
    return {index: count for (at, index), count in count_lines(work, f"reads-{host}-*").items() if at == step}


def computed_in(work: Path, step: int) -> dict[int, int]:
    """Return how often each microbatch of a step was begun, by any process."""
    return {index: count for (at, index), count in count_lines(work, "microbatches-*").items() if at == step}
