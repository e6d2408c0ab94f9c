"""A stage that does not die but stands still: it is stopped, hangs, or is cut off. Training goes on with the same bits.

The job has a loop of its own, and the bits of `fit` on one host. That a stage is starved of its processor is in
test_pipelined.py.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint, FailPointOrder, HangAction
from tests.chaos.network import build_network
from tests.jobs.pod import Pod, may_build_networks, wait_steps
from tests.support.agents import served_store
from tests.support.full_only import full_but
from tests.support.kills import generation_of
from tests.support.patience import NEVER_S
from tests.support.pipelined_job import PATIENCE_S, SCRIPT, PipelinedJob, check_units
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, HANGS_ARE_NAMED

HOSTS, STAGES = 4, 2
STAGE = "host-1"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipelinedJob]:
    """Yield a running job; compare its bits with those of an undisturbed run when all tests are done."""
    work = tmp_path_factory.mktemp("stages")
    with PipelinedJob(work, HOSTS, STAGES, 2, ["loop=own"], HANGS_ARE_NAMED) as pipelined:
        yield pipelined
        pipelined.finish(more_steps=5)


@pytest.mark.parametrize(
    "part", full_but([JobComponent.WORKER, JobComponent.HOST], JobComponent.WORKER.__eq__)
)
def test_a_stage_is_stopped_in_mid_step(part: JobComponent, job: PipelinedJob) -> None:
    job.wait_protected(HOSTS)
    before = generation_of(job.wait_training(HOSTS)).number
    job.hold(FailPoint.BEFORE_WEIGHT_GRADIENT, [STAGE])
    job.signal(part, STAGE, signal.SIGSTOP)
    job.job.release()
    job.wait_report("a generation without it", lambda now: generation_of(now).number > before)
    job.wake_all()
    job.wait_protected(HOSTS, after_generation=before)
    if part is JobComponent.WORKER:  # a host may lead, and the world end with it
        kinds = [event.kind for event in job.job.read_events() if (event.generation or 0) > before]
        assert EventKind.PIPELINE_STEP_RESUMED in kinds
        assert EventKind.SNAPSHOT_RESTORED not in kinds


@pytest.mark.full  # a pair: hangs are in test_hangs.py, stages in this file
def test_a_stage_hangs_in_mid_step(job: PipelinedJob) -> None:
    job.wait_protected(HOSTS)
    before = generation_of(job.wait_training(HOSTS)).number
    job.job.failpoints.set_order(
        FailPointOrder(
            failpoint=FailPoint.BEFORE_INPUT_GRADIENT,
            step=job.step() + 10,
            hosts=(STAGE,),
            action=HangAction(duration_s=NEVER_S),
            name="hang",
        )
    )
    named = job.job.wait_event(
        "the hang is named",
        lambda event: event.kind is EventKind.HANG_NAMED and (event.generation or 0) >= before,
        job.patience_s,
    )
    job.job.failpoints.release("hang")
    assert named.detail["hosts"] == STAGE
    job.wait_protected(HOSTS, after_generation=before)


@pytest.mark.full  # a pair: a host is cut off in test_membership.py
def test_a_stage_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    if (why_not := may_build_networks()) is not None:
        pytest.skip(why_not)
    config = f"{CONFIG_WITHOUT_STANDBYS}snapshot_parity = 2\n"
    with (
        build_network(HOSTS) as network,
        served_store(f"{network.gateway}:0") as store,
        Pod(
            tmp_path,
            store,
            network.sites(),
            script=SCRIPT,
            words=[str(STAGES)],
            config=config,
            patience_s=PATIENCE_S,
        ) as pod,
    ):
        before = generation_of(pod.wait_training(HOSTS)).number
        mend = network.cut_link(STAGE)
        pod.agents[STAGE].wait_said("training stops here until the store is back")
        before = generation_of(pod.wait_training(HOSTS - 1, before)).number
        wait_steps(pod, 3)
        mend()
        pod.wait_training(HOSTS, before)
        pod.end()
        check_units(tmp_path, "\n".join(agent.output() for agent in pod.agents.values()))
