"""A model that is split over hosts, in a job of four: two replicas of two stages, any of which is killed anywhere.

The cells are incidents of one running job; all hosts are back before the next one. At the end every unit of the model
has the bits of a run on one host, after every step.
"""

import signal
from collections.abc import Iterator

import pytest
from pipelined_job import PipelinedJob

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import ANY_STEP, FailPoint

HOSTS, STAGES = 4, 2
PLACES = (
    FailPoint.BEFORE_MICROBATCH,
    FailPoint.BEFORE_INPUT_GRADIENT,
    FailPoint.BEFORE_WEIGHT_GRADIENT,
    FailPoint.BEFORE_REDUCE,
    FailPoint.AFTER_REDUCE,
    FailPoint.BEFORE_COMMIT,
    FailPoint.AFTER_COMMIT,
)


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", PLACES)
def test_a_killed_stage_costs_no_bit(place: FailPoint, broken: PipelinedJob) -> None:
    break_and_recover(broken, place, ["host-1"], JobComponent.WORKER)


@pytest.mark.timeout(600)
def test_what_survivors_had_done_of_the_step_is_kept(broken: PipelinedJob) -> None:
    events = [e for e in broken.job.read_events() if e.kind is EventKind.PIPELINE_STEP_RESUMED]
    assert sum(int(event.detail["kept"]) for event in events) > 0


@pytest.mark.timeout(600)
def test_no_step_is_done_again_and_no_snapshot_is_read_after_the_loss_of_a_stage(
    broken: PipelinedJob,
) -> None:
    for process, rows in broken.logs().items():
        steps = [row["step"] for row in rows]
        assert steps == sorted(set(steps)), process
    kinds = [e.kind for e in broken.job.read_events()]
    assert EventKind.SNAPSHOT_RESTORED not in kinds
    # Of the three that are left, and when the fourth is back; a worker that dies has recorded it, too.
    assert kinds.count(EventKind.PIPELINE_STATE_KEPT) >= len(PLACES) * (HOSTS - 1)


@pytest.mark.timeout(600)
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


@pytest.mark.timeout(600)
def test_all_holders_of_some_blocks_may_die_at_once(broken: PipelinedJob) -> None:
    break_and_recover(broken, FailPoint.BEFORE_INPUT_GRADIENT, ["host-1", "host-3"], JobComponent.HOST)
