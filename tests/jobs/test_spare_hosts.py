"""A spare host takes the place of a lost one in the next generation, and keeps it when that host is back.

And that host, which spares now, follows the others into a new world.
"""

import signal
from pathlib import Path

import pytest

from resilient_jax.cli.status import describe_spare
from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.events import EventKind
from resilient_jax.protocol.generation import WorldChange
from resilient_jax.protocol.worker_report import WorkerState
from tests.support.agents import run_command
from tests.support.kills import generation_of
from tests.support.patience import wait_until
from tests.support.patient_job import PatientJob
from tests.support.pipelined_job import PipelinedJob
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, RECOVERY_S, TinyJob, is_training

HOSTS, SPARE = 3, "host-3"
WATCHED_STEPS = 30
"""Enough for a change of members, which takes a few steps."""


def is_ready(report: JobReport, host: str) -> bool:
    """Return whether a host that is no member waits with a seat of the world."""
    generation = generation_of(report)
    if any(member.host == host for member in generation.membership.members):
        return False
    workers = [status.worker for status in report.hosts if status.host == host and status.worker]
    return any(
        w.report.state is WorkerState.IDLE and w.report.place.world == generation.membership.world
        for w in workers
    )


PICKY = """
import jax.numpy as jnp
import resilient_jax as rj
from resilient_jax.errors import CallerError

def train(world):
    if "host-2" in world.hosts:
        raise CallerError("planner: found the hosts host-2, expected names of the topology")
    state = world.restore_or_init(lambda: jnp.zeros(()))
    for _ in world.steps(10**6):
        world.commit(world.all_reduce(state))

rj.run(train)
"""


def test_a_spare_that_the_script_refuses_leaves_before_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(PICKY)
    command, options = [str(tmp_path / "picky.py")], (*ONE_DEVICE, "--spares", "1")
    with PatientJob(command, num_hosts=2, run_directory=tmp_path / "run", options=options) as job:
        job.wait_report("the spare's start", lambda report: len(report.hosts) == 3, RECOVERY_S)
        report = job.wait_report(
            "the spare's end", lambda report: len(report.hosts) == 2 and is_training(report, 2), RECOVERY_S
        )
        # The agent that leads has the world's coordination service: where the spare led, the others re-form.
        led = any(e.kind is EventKind.LEADER_ELECTED and e.host == "host-2" for e in job.read_events())
        assert generation_of(report).number == 1 or led
        wait_until("its reason", lambda: "host-2 leaves the job" in job.read_output(), RECOVERY_S)
        assert "Its script cannot run here: planner: found the hosts host-2, expected" in job.read_output()


def test_a_spare_takes_the_place_of_a_lost_host_which_waits_when_it_is_back(tmp_path: Path) -> None:
    options = (*ONE_DEVICE, "--spares", "1")
    with TinyJob(tmp_path, HOSTS, CONFIG_WITHOUT_STANDBYS, options=options) as tiny:
        tiny.wait_training(HOSTS)
        before = tiny.wait_report("a spare that is ready", lambda report: is_ready(report, SPARE))
        assert generation_of(before).number == 1
        (spare,) = [status for status in before.hosts if status.host == SPARE]
        said = describe_spare(spare, generation_of(before))
        assert said.startswith("spare, ready, ")
        assert said.endswith(" MiB: no part of the state")
        members = [member.host for member in generation_of(before).membership.members]
        victim = next(host for host in members if host != before.leader)
        tiny.signal(JobComponent.HOST, victim, signal.SIGKILL)

        after = generation_of(tiny.wait_training(HOSTS, generation_of(before).number))
        assert [m.host for m in after.membership.members] == [
            *(host for host in members if host != victim),
            SPARE,
        ]
        assert (after.membership.change, after.membership.world) == (
            WorldChange.GROW,
            generation_of(before).membership.world,
        )
        sizes = {e.detail["hosts"] for e in tiny.job.read_events() if e.detail.get("phase") == "active"}
        assert sizes == {HOSTS}, "a step was done by fewer hosts"
        (used,) = [e for e in tiny.job.read_events() if e.kind is EventKind.HOST_SPARE_USED]
        assert used.detail == {"spare": SPARE, "change": "grow"}

        tiny.wait_report("the lost host ready", lambda report: is_ready(report, victim))
        seen = tiny.step()
        later = tiny.wait_report("more steps", lambda _: tiny.step() > seen + WATCHED_STEPS)
        assert generation_of(later).number == after.number, generation_of(later).reason

        leader = later.leader
        assert leader is not None
        tiny.signal(JobComponent.COORDINATION_SERVICE, leader, signal.SIGKILL)
        reformed = generation_of(tiny.wait_training(HOSTS, after.number))
        assert (reformed.membership.change, {m.host for m in reformed.membership.members}) == (
            WorldChange.REFORM,
            {m.host for m in after.membership.members},
        )
        tiny.wait_report("a seat of the new world taken", lambda report: is_ready(report, victim))
        problems = {e.detail["problem"] for e in tiny.job.read_events() if e.kind is EventKind.STEP_REHEARSED}
        assert problems == {""}
        tiny.finish()


def test_a_worker_that_died_waits_even_without_a_seat_and_that_is_said(tmp_path: Path) -> None:
    config = f"{CONFIG_WITHOUT_STANDBYS}spare_seats = 1\n"
    with TinyJob(tmp_path, 2, config, options=(*ONE_DEVICE, "--spares", "1")) as tiny:
        tiny.wait_training(2)
        report = tiny.wait_report("a spare that is ready", lambda report: is_ready(report, "host-2"))
        tiny.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        grown = generation_of(tiny.wait_training(2, generation_of(report).number))
        assert (grown.membership.change, [m.host for m in grown.membership.members]) == (
            WorldChange.GROW,
            ["host-0", "host-2"],
        )
        said = "host-1: found no seat for this spare, expected one of the 3 of this world to be free"
        wait_until("that it has no seat", lambda: said in tiny.job.read_output(), RECOVERY_S)
        (unseated,) = [e for e in tiny.job.read_events() if e.kind is EventKind.HOST_SPARE_UNSEATED]
        assert unseated.detail == {"spares": "host-1", "seats": 3}
        assert generation_of(tiny.read_report()).number == grown.number
        tiny.signal(JobComponent.WORKER, "host-2", signal.SIGKILL)
        reformed = generation_of(tiny.wait_training(2, grown.number))
        assert {m.host for m in reformed.membership.members} == {"host-0", "host-1"}
        tiny.finish()


@pytest.mark.full  # a pair of spares and stages
def test_a_spare_has_the_blocks_of_a_stage_before_it_takes_the_place_of_its_host(tmp_path: Path) -> None:
    """Each host is a replica: if none of those that stay has a block, all read a snapshot."""
    with PipelinedJob(tmp_path, 2, 1, options=("--spares", "1")) as job:
        job.wait_protected(2)
        before = job.wait_report("a spare that is ready", lambda now: is_ready(now, "host-2"))
        run = str(tmp_path / "run")
        assert run_command(["hosts", run, "drain", "host-1"])[0] == 0
        after = job.wait_training(2, generation_of(before).number).generation
        assert after is not None
        assert sorted(member.host for member in after.membership.members) == ["host-0", "host-2"]
        kept = {
            e.host: (int(e.detail["copied"]) > 0, int(e.detail["received"]))
            for e in job.job.read_events()
            if e.kind is EventKind.PIPELINE_STATE_KEPT and e.generation == after.number
        }
        assert kept["host-2"] == (True, 0), "all was copied, and nothing moved in the pause"
        job.finish()
