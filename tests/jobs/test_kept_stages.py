"""A pipeline whose blocks are slow to move keeps the stage of a lost worker for it, and none of them moves.

Those of hosts which are gone for good it keeps until others have copies of their blocks: nor do these move in a pause
then.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.support.pipelined_job import PipelinedJob

HOSTS, STAGES = 4, 2
SLOW_NETWORK = "state_bytes_per_s=1000"
"""The model has some 100 KB: to move a stage would take a minute, twice; a worker is back in seconds."""
SLOW_TO_COPY = "state_bytes_per_s=500"
"""Half a minute for what moves to one host, by which the leader decides. In fact it is copied in some steps."""
NOBODY_COMES_BACK = ("--host-restart-delay", "-1")
NUM_GONE = 3
ESTIMATED_STEPS = 4
"""From the second step on the first hosts say what a loss would cost."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipelinedJob]:
    """Yield a running job; check the bits of all steps at the end."""
    folder = tmp_path_factory.mktemp("kept")
    with PipelinedJob(folder, HOSTS, STAGES, parity=2, words=[SLOW_NETWORK]) as running:
        yield running
        running.finish()


def list_events(job: PipelinedJob, kind: EventKind, *, after: int) -> list[Event]:
    """Return the events of a kind in the next two generations: what a busy machine breaks later is another test's."""
    return [e for e in job.job.read_events() if e.kind is kind and after < (e.generation or 0) <= after + 2]


@pytest.mark.parametrize(
    ("place", "host"),
    [
        (FailPoint.BEFORE_INPUT_GRADIENT, "host-1"),
        pytest.param(FailPoint.BEFORE_REDUCE, "host-0", marks=pytest.mark.full),
    ],
)
def test_a_stage_is_kept_for_a_worker_that_comes_back_and_no_block_moves_between_others(
    job: PipelinedJob, place: FailPoint, host: str
) -> None:
    job.wait_protected(HOSTS)
    before = job.wait_training(HOSTS).generation
    assert before is not None
    cut = [str(e.detail["cut"]) for e in job.job.read_events() if e.kind is EventKind.PIPELINE_FORMED][-1]
    job.hold(place, [host])
    job.signal(JobComponent.WORKER, host, signal.SIGKILL)
    job.job.release()
    job.wait_protected(HOSTS, after_generation=before.number)
    decided = list_events(job, EventKind.RECOVERY_DECIDED, after=before.number)
    assert [e.detail["action"] for e in decided][:2] == ["keep_stages", "join"]
    assert "shrink: score" in str(decided[0].detail["options"])
    assert str(decided[0].detail["reason"]).startswith(f"{host}: its worker ended")
    formed = {str(e.detail["cut"]) for e in list_events(job, EventKind.PIPELINE_FORMED, after=before.number)}
    away = {text for text in formed if "(away)" in text}
    assert len(away) == 1
    assert {text.replace(" (away)", "") for text in formed} == {cut}
    moved = list_events(job, EventKind.PIPELINE_STATE_KEPT, after=before.number)
    got = {e.host for e in moved if int(str(e.detail["received"])) or int(str(e.detail["copied"]))}
    assert got == {host}, "the one that is back, and it alone"


@pytest.mark.full
def test_the_blocks_of_three_hosts_that_are_gone_are_copied_while_the_others_train(tmp_path: Path) -> None:
    hosts = HOSTS + STAGES
    with PipelinedJob(
        tmp_path, hosts, STAGES, parity=2, words=[SLOW_TO_COPY], options=NOBODY_COMES_BACK
    ) as job:
        job.wait_protected(hosts)
        report = job.wait_training(hosts)
        # All of a replica, and one more. With the leader the world's coordination service would be gone.
        replicas = [one for one in job.find_replicas() if report.leader not in one]
        gone = [*replicas[0], replicas[1][0]]
        assert len(gone) == NUM_GONE
        job.hold(FailPoint.BEFORE_INPUT_GRADIENT, gone, ahead=ESTIMATED_STEPS)
        for host in gone:
            job.signal(JobComponent.HOST, host, signal.SIGKILL)
        job.job.release()
        decided = job.job.wait_event(
            "a decision about all",
            lambda e: (
                e.kind is EventKind.RECOVERY_DECIDED and all(host in str(e.detail["reason"]) for host in gone)
            ),
            job.patience_s,
        )
        kept = decided.generation or 0
        job.wait_training(hosts - NUM_GONE, kept)
        job.finish()
    assert (decided.detail["action"], decided.detail["wait_s"]) == ("keep_stages", 0)
    assert "shrink: score" in str(decided.detail["options"])
    cuts = list_events(job, EventKind.PIPELINE_FORMED, after=kept - 1)
    away = {e.generation: str(e.detail["cut"]).count("(away)") for e in cuts}
    assert away == {kept: NUM_GONE, kept + 1: 0}
    moved = list_events(job, EventKind.PIPELINE_STATE_KEPT, after=kept - 1)
    assert {int(e.detail["received"]) for e in moved} == {0}, "nothing moved in either pause"
    assert {e.generation for e in moved if int(e.detail["copied"])} == {kept + 1}
