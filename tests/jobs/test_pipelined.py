"""A model that is split over hosts, in a job of four: two replicas of two stages, any of which is killed anywhere.

The cells are incidents of one running job; all hosts are back before the next one. At the end every unit of the model
has the bits of a run on one host, after every step.
"""

import contextlib
import signal
from collections.abc import Iterator

import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.failpoints import ANY_INDEX, ANY_STEP, FailPoint, FailPointOrder, HangAction
from tests.chaos.cpu_quota import limit_cpu
from tests.support.agents import run_command
from tests.support.full_only import full_but
from tests.support.pipelined_job import UNITS, PipelinedJob, read_restored, read_steps

HOSTS, STAGES = 4, 2
SLOW_SHARE, NAMED_SHARE = 0.1, 0.05
"""Of a core. A host that is to be named needs less: the few microbatches that are left to it would fit into its quota
again."""
LEARNED_STEPS = 66
"""Twenty steps to learn from, and the rest to be wrong about a healthy host."""
SLOW_COPY_S = 1.5
"""Some steps, and less than what training waits for a copy."""
PLACES = (
    FailPoint.BEFORE_MICROBATCH,
    FailPoint.BEFORE_INPUT_GRADIENT,
    FailPoint.BEFORE_WEIGHT_GRADIENT,
    FailPoint.BEFORE_REDUCE,
    FailPoint.AFTER_REDUCE,
    FailPoint.DURING_UPDATE,
    FailPoint.BEFORE_COMMIT,
    FailPoint.AFTER_COMMIT,
)
IN_MAKE_TEST_JOBS = (FailPoint.BEFORE_WEIGHT_GRADIENT, FailPoint.BEFORE_COMMIT)
"""In a microbatch, and before the step counts; processes of a pipeline are killed at more places in `tests/process`."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipelinedJob]:
    """Yield a running job; check its invariants when all cells are done."""
    with PipelinedJob(tmp_path_factory.mktemp("pipelined"), HOSTS, STAGES, parity=2) as job:
        yield job
        job.finish()


def break_and_recover(job: PipelinedJob, place: FailPoint, hosts: list[str], part: JobComponent) -> None:
    """Kill parts of hosts that are held at a place, and wait until all train again, protected."""
    job.wait_protected(HOSTS)
    before = job.wait_training(HOSTS).generation
    assert before is not None
    job.hold(place, hosts)
    for host in hosts:
        job.signal(part, host, signal.SIGKILL)
    job.job.release()
    job.wait_protected(HOSTS, after_generation=before.number)


@pytest.mark.full
def test_a_slow_stage_is_named_and_its_replica_gets_fewer_microbatches(broken: PipelinedJob) -> None:
    """At first, on a job in which nothing else was wrong, and nothing was found.

    Where other tests need the processor, too, the few microbatches that are left to the host may take it no longer
    than those of the others take them: then it is no slow host any more.
    """
    with starved(broken, NAMED_SHARE, named_before=set()):
        named = broken.job.wait_event(
            "a slow host", lambda e: e.kind is EventKind.HOST_SLOW, broken.patience_s
        )
        broken.wait_report("a slow host in the report", lambda now: is_shown_slow(now, "host-1"))
    assert (named.detail["slow"], named.detail["part"]) == ("host-1", "compute")
    assert find_named(broken) == {"host-1"}


@pytest.mark.full  # a pair: slow hosts are in test_slow_hosts.py
def test_the_replica_of_a_starved_stage_gets_fewer_microbatches(
    broken: PipelinedJob, request: pytest.FixtureRequest
) -> None:
    named_before = {"host-1"} if request.config.getoption("--full") else set()
    with starved(broken, SLOW_SHARE, named_before=named_before):
        shares = broken.job.wait_event("other shares", is_less_for_the_first_replica, broken.patience_s)
    assert float(shares.detail["after_s"]) < float(shares.detail["before_s"])
    assert find_named(broken) <= {"host-1"}


@contextlib.contextmanager
def starved(broken: PipelinedJob, share: float, named_before: set[str]) -> Iterator[None]:
    """Give the worker of a stage little of a processor, after steps in which nobody was slow."""
    hurry = broken.work / "hurry"
    hurry.touch()  # steps with pauses would need less of a processor than the quota allows
    broken.job.wait_for(
        "steps to learn from", lambda: broken.step() >= LEARNED_STEPS or None, broken.patience_s
    )
    assert find_named(broken) == named_before
    (pid,) = find_pids(broken.read_report(), JobComponent.WORKER, "host-1")
    lift = limit_cpu(pid, share)
    try:
        yield
    finally:
        lift()
        hurry.unlink()


def find_named(job: PipelinedJob) -> set[str]:
    """Return the hosts that were ever named as slow."""
    return {str(e.detail["slow"]) for e in job.job.read_events() if e.kind is EventKind.HOST_SLOW}


def is_less_for_the_first_replica(event: Event) -> bool:
    """Return whether the replica of host-1 has fewer microbatches than the other one from now on."""
    if event.kind is not EventKind.PIPELINE_REBALANCED:
        return False
    first, second = map(int, str(event.detail["shares"]).split())
    return first < second


def is_shown_slow(report: JobReport, host: str) -> bool:
    """Return whether a worker reports a host as slow, which `status` then shows."""
    found = [
        slow.host
        for one in report.hosts
        if one.worker is not None
        for slow in one.worker.report.findings.slow_hosts
    ]
    return host in found


@pytest.mark.parametrize("place", full_but(PLACES, IN_MAKE_TEST_JOBS.__contains__))
def test_a_killed_stage_costs_no_bit(place: FailPoint, broken: PipelinedJob) -> None:
    break_and_recover(broken, place, ["host-1"], JobComponent.WORKER)


def test_a_step_that_others_have_committed_is_committed_by_a_host_that_was_interrupted_before(
    broken: PipelinedJob,
) -> None:
    """Neither host of the last stage reports it: they wait for slow copies before they update; one is killed then."""
    broken.wait_protected(HOSTS)
    before = broken.wait_training(HOSTS).generation
    assert before is not None
    last = [replica[-1] for replica in broken.find_replicas()]
    step = broken.hold(FailPoint.BEFORE_COPY, last)
    broken.job.wait_for("others commit it", lambda: broken.step() > step or None, broken.patience_s)
    broken.signal(JobComponent.WORKER, last[0], signal.SIGKILL)
    broken.job.wait_event(
        "the end of the other one's generation",
        lambda e: e.kind is EventKind.WORKER_IDLE and (e.host, e.generation) == (last[1], before.number),
        broken.patience_s,
    )
    broken.job.release()
    broken.wait_protected(HOSTS, after_generation=before.number)
    reported, restored = (
        {unit for row in rows if row["step"] == step for unit in row["digests"]}
        for rows in (read_steps(broken.work), read_restored(broken.work))
    )
    assert len(reported) < UNITS == len(restored)


def test_an_update_waits_for_a_snapshot_of_the_arrays_that_it_deletes(broken: PipelinedJob) -> None:
    broken.wait_protected(HOSTS)
    step = broken.step() + 5
    broken.job.failpoints.set_order(
        FailPointOrder(
            failpoint=FailPoint.BEFORE_COPY,
            step=step,
            hosts=("host-1",),
            action=HangAction(duration_s=SLOW_COPY_S),
            name="slow copy",
        )
    )
    kinds = (EventKind.SNAPSHOT_COPIED, EventKind.SNAPSHOT_DROPPED)
    found = broken.job.wait_event(
        "the slow copy",
        lambda e: e.kind in kinds and e.host == "host-1" and e.detail.get("step") == step,
        broken.patience_s,
    )
    assert "host-1" in broken.job.failpoints.list_held_hosts("slow copy"), "the order came too late"
    broken.job.failpoints.release("slow copy")
    assert "donated" not in str(found.detail.get("reason", ""))


@pytest.mark.parametrize(
    "place",
    [FailPoint.BEFORE_WEIGHT_GRADIENT, pytest.param(FailPoint.AFTER_REDUCE, marks=pytest.mark.full)],
)
def test_the_step_is_finished_without_a_coordination_service_and_a_new_world_follows(
    place: FailPoint, broken: PipelinedJob
) -> None:
    """Nobody re-forms before the step is committed. Then blocks outlive the devices that they were on."""
    broken.wait_protected(HOSTS)
    before = broken.wait_training(HOSTS).generation
    assert before is not None
    broken.hold(place, ["host-1", "host-2"])
    broken.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
    broken.signal(JobComponent.COORDINATION_SERVICE, "leader", signal.SIGKILL)
    broken.job.release()
    after = broken.wait_training(HOSTS, after_generation=before.number).generation
    assert after is not None
    assert after.membership.world > before.membership.world
    events = [e for e in broken.job.read_events() if (e.generation or 0) > before.number]
    formed = {e.generation or 0: e.detail["change"] for e in events if e.kind is EventKind.WORLD_FORMED}
    reformed = min(number for number, change in formed.items() if change == "reform")
    finished = max(number for number in formed if number < reformed)
    assert formed[finished] == "shrink"
    resumed, left = (
        {
            int(event.detail["step"])
            for event in events
            if event.kind is EventKind.PIPELINE_STATE_KEPT and event.generation == number
        }
        for number in (finished, reformed)
    )
    assert max(resumed) < min(left), "the step was committed in between"


def test_what_survivors_had_done_of_the_step_is_kept(broken: PipelinedJob) -> None:
    events = [e for e in broken.job.read_events() if e.kind is EventKind.PIPELINE_STEP_RESUMED]
    assert sum(int(event.detail["kept"]) for event in events) > 0


def test_no_step_is_done_again_and_no_snapshot_is_read_after_the_loss_of_a_stage_or_a_world(
    broken: PipelinedJob, request: pytest.FixtureRequest
) -> None:
    for process, rows in broken.logs().items():
        steps = [row["step"] for row in rows]
        assert steps == sorted(set(steps)), process
    kinds = [e.kind for e in broken.job.read_events()]
    assert EventKind.SNAPSHOT_RESTORED not in kinds
    # Of the three that are left, and when the fourth is back; a worker that dies has recorded it, too.
    # Deaths of a stage, and of a stage and a world.
    deaths = len(PLACES) + 2 if request.config.getoption("--full") else len(IN_MAKE_TEST_JOBS) + 1
    assert kinds.count(EventKind.PIPELINE_STATE_KEPT) >= deaths * (HOSTS - 1)


def test_hosts_that_came_back_had_their_blocks_before_and_nothing_moved(broken: PipelinedJob) -> None:
    """Of many, one at least: on a busy machine copies may be late."""
    kept = [e for e in broken.job.read_events() if e.kind is EventKind.PIPELINE_STATE_KEPT]
    by_step: dict[tuple[int, int], list[Event]] = {}
    for event in kept:
        by_step.setdefault((int(event.detail["step"]), event.generation or 0), []).append(event)
    joined = [found for found in by_step.values() if len({event.host for event in found}) == HOSTS]
    assert joined
    assert any(
        all(int(event.detail["received"]) == 0 for event in found)
        and any(int(event.detail["copied"]) > 0 for event in found)
        for found in joined
    )


def test_a_host_that_is_drained_leaves_when_others_have_copies_of_its_blocks(broken: PipelinedJob) -> None:
    broken.wait_protected(HOSTS)
    before = broken.wait_training(HOSTS).generation
    assert before is not None
    run = str(broken.work / "run")
    assert run_command(["hosts", run, "drain", "host-2"])[0] == 0
    after = broken.wait_training(HOSTS - 1, before.number).generation
    assert after is not None
    kept = [
        e
        for e in broken.job.read_events()
        if e.kind is EventKind.PIPELINE_STATE_KEPT and e.generation == after.number
    ]
    assert len(kept) == HOSTS - 1
    assert {int(event.detail["received"]) for event in kept} == {0}, "nothing moved in the pause"
    assert any(int(event.detail["copied"]) > 0 for event in kept)
    assert run_command(["hosts", run, "clear", "host-2"])[0] == 0
    broken.wait_protected(HOSTS, after_generation=after.number)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["host-0", "host-3"])
def test_any_host_may_die_while_blocks_are_copied_before_another_leaves(
    victim: str, broken: PipelinedJob
) -> None:
    """The first one, which says when all have copies; or another of those that stay."""
    broken.wait_protected(HOSTS)
    before = broken.wait_training(HOSTS).generation
    assert before is not None
    run = str(broken.work / "run")
    broken.job.hold(FailPoint.DURING_COPIES, ["host-0"], ANY_STEP)
    assert run_command(["hosts", run, "drain", "host-2"])[0] == 0
    broken.job.wait_held(["host-0"], broken.patience_s)
    broken.signal(JobComponent.WORKER, victim, signal.SIGKILL)
    broken.job.release()
    broken.wait_training(HOSTS - 1, before.number)
    assert run_command(["hosts", run, "clear", "host-2"])[0] == 0
    broken.wait_protected(HOSTS, after_generation=before.number + 1)


@pytest.mark.parametrize("victim", full_but(["host-1", "host-0", "host-2"], "host-1".__eq__))
def test_any_host_may_die_while_blocks_are_copied_to_one_that_joins(
    victim: str, broken: PipelinedJob
) -> None:
    """host-1 joins; of the others each sends it some, and may lack some itself."""
    broken.wait_protected(HOSTS)
    before = broken.wait_training(HOSTS).generation
    assert before is not None
    broken.job.hold(FailPoint.DURING_COPIES, ["host-0"], ANY_STEP)
    broken.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
    broken.job.wait_held(["host-0"], broken.patience_s)
    broken.signal(JobComponent.WORKER, victim, signal.SIGKILL)
    broken.job.release()
    broken.wait_protected(HOSTS, after_generation=before.number + 1)


@pytest.mark.full  # as processes of a pipeline without a job in `tests/process`
def test_an_evaluation_is_made_again_when_a_stage_dies_in_it(broken: PipelinedJob) -> None:
    """Its numbers, too, are those of an undisturbed host, as is checked at the end."""
    broken.wait_protected(HOSTS)
    before = broken.wait_training(HOSTS).generation
    assert before is not None
    broken.job.hold(FailPoint.BEFORE_EVALUATION_MICROBATCH, ["host-1"], ANY_STEP, ANY_INDEX)
    broken.job.wait_held(["host-1"], broken.patience_s)
    broken.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
    broken.job.release()
    broken.wait_protected(HOSTS, after_generation=before.number)


@pytest.mark.full  # the same
def test_another_stage_may_die_while_blocks_move(broken: PipelinedJob) -> None:
    broken.wait_protected(HOSTS)
    before = broken.wait_training(HOSTS).generation
    assert before is not None
    broken.job.hold(FailPoint.DURING_RESTORE, ["host-2"], ANY_STEP)
    broken.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
    broken.job.wait_held(["host-2"], broken.patience_s)
    broken.signal(JobComponent.WORKER, "host-2", signal.SIGKILL)
    broken.job.release()
    broken.wait_protected(HOSTS, after_generation=before.number + 1)


@pytest.mark.full  # and smoke/test_pipelined.py
def test_all_holders_of_some_blocks_may_die_at_once(broken: PipelinedJob) -> None:
    break_and_recover(broken, FailPoint.BEFORE_INPUT_GRADIENT, ["host-1", "host-3"], JobComponent.HOST)
