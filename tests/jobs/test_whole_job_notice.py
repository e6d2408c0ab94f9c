"""A notice to a whole job, of each kind: it saves a checkpoint, ends and says so; started again it goes on from there.

As Slurm does at the time limit, each notice goes to every process of the job, and twice.
"""

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from resilient_jax.cluster.job_report import JobComponent, find_pids
from resilient_jax.errors import ExitCode
from resilient_jax.events import EventKind
from resilient_jax.notices import NOTICE_SIGNALS
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.transport.credentials import TOKEN_VARIABLE
from tests.jobs.launched import make_environment, run_alone
from tests.jobs.pod import Pod, loopback_sites
from tests.support.agents import TOKEN, run_command, served_store
from tests.support.full_only import full_but
from tests.support.paths import SCRIPTS
from tests.support.patience import patience, wait_until
from tests.support.patient_job import PatientJob
from tests.support.tiny_job import CONFIG as STANDBYS
from tests.support.tiny_job import ONE_DEVICE, TinyJob, protect

DEADLINE_S = patience(15)
CONFIG = 'restart_backoff_s = 0.0\nstandby = "off"\n'
GRACE_S = str(patience(5))
"""A slow machine must not be out of time."""
HOSTS = ("host-0", "host-1")
LAST_STEP = 9
"""Of the jobs that end by themselves."""


class Kind(NamedTuple):
    """A script and its words behind the folder, and how it is told where to end; empty: it ends by itself."""

    script: str
    words: tuple[str, ...] = ()
    end: str = ""


KINDS = {
    "replicated": Kind("sharded_job.py", ("replicated", "slow")),
    "sharded": Kind("sharded_job.py", ("sharded", "slow")),
    "pipelined": Kind("pipelined.py", ("2",), "stop"),
    "own loop": Kind("own_loop.py", ("checkpoints",), "stop"),
}


def launch(work: Path, script: str, words: Sequence[str], grace_s: str = GRACE_S) -> PatientJob:
    (work / "job.toml").write_text(CONFIG)
    return PatientJob(
        [str(SCRIPTS / script), str(work), *words],
        num_hosts=len(HOSTS),
        run_directory=work / "run",
        options=["--config", str(work / "job.toml"), "--devices-per-host", "2", "--grace-s", grace_s],
        environment={**make_environment(), "TINY_JOB_HOSTS": str(len(HOSTS))},
    )


def notify_all(job: PatientJob) -> None:
    """Send SIGTERM to all processes of the job, and again as soon as the agents have answered."""
    for times in (1, 2):
        for pid in (job.process.pid, *job.find_processes()):
            os.kill(pid, signal.SIGTERM)
        if times == 1:
            for host in HOSTS:
                job.wait_event(
                    f"{host} leaves",
                    lambda event, host=host: event.kind is EventKind.HOST_DRAINING and event.host == host,
                    DEADLINE_S,
                )


def interrupt(job: PatientJob, step: int) -> int:
    """Give the job notice in a step, and return up to which it was saved, as its last line says."""
    job.hold(FailPoint.AFTER_COMMIT, ["host-0"], step)
    job.wait_held(["host-0"], DEADLINE_S)
    notify_all(job)
    job.release()
    assert job.wait(DEADLINE_S) == ExitCode.DRAINED, job.read_tail()
    assert not job.find_processes()
    last = job.read_output().rstrip().splitlines()[-1]
    found = re.fullmatch(
        r"interrupted, saved at step (\d+): all hosts got a notice to leave\. Started again, .*", last
    )
    assert found, job.read_tail()
    # A worker that takes longer to end than its agent waits is killed, when all is done.
    kinds = {event.kind for event in job.read_events() if event.detail.get("why") != "the job is over"}
    ended = {EventKind.WORKER_KILLED, EventKind.USER_ERROR, EventKind.COLLECTIVE_FAILED, EventKind.STATE_LOST}
    assert not kinds & ended, job.read_tail()
    return int(found[1])


DIGEST = rf"step {LAST_STEP} digest \w{{64}}"


@pytest.mark.parametrize("kind", full_but(KINDS, {"sharded", "pipelined"}.__contains__))
def test_each_kind_of_job_saves_its_last_step_and_begins_there_again_with_the_bits_of_an_undisturbed_run(
    kind: str, tmp_path: Path
) -> None:
    """The bits where the job ends by itself: a pipeline's are in test_pipelined.py, of a loop in smoke."""
    script, words, end = KINDS[kind]
    words = [str(tmp_path / word) if word == "checkpoints" else word for word in words]
    with launch(tmp_path, script, words) as job:
        saved = interrupt(job, 1)
    code, said = run_command(["status", str(tmp_path / "run")])
    assert (code, f"interrupted, saved at step {saved}" in said) == (0, True), said
    if end:
        (tmp_path / end).write_text(str(saved + 2))
    began_s = time.time()
    with launch(tmp_path, script, words) as again:
        assert again.wait(DEADLINE_S) == 0, again.read_tail()
        output = again.read_output()
        commits = [
            int(event.step or event.detail["step"])
            for event in again.read_events()
            if event.kind is EventKind.STEP_COMMITTED and event.wall_s > began_s
        ]
    assert min(commits) == saved + 1
    if not end:
        assert 2 < saved < LAST_STEP, "the step in which it came is finished"
        alone = tmp_path / "alone"
        alone.mkdir()
        expected = run_alone([str(SCRIPTS / script), str(alone), "replicated"], DEADLINE_S)
        assert set(re.findall(DIGEST, output)) == set(re.findall(DIGEST, expected)) != set()


def test_a_job_without_time_for_a_checkpoint_ends_within_the_grace_and_says_what_is_lost(
    tmp_path: Path,
) -> None:
    script, words, _ = KINDS["replicated"]
    with launch(tmp_path, script, words, grace_s="2") as job:
        job.hold(FailPoint.AFTER_COMMIT, ["host-0"], 6)
        job.wait_held(["host-0"], DEADLINE_S)
        wait_until("a checkpoint", lambda: (tmp_path / "checkpoints" / "5").exists(), DEADLINE_S)
        notify_all(job)
        assert job.wait(DEADLINE_S) == ExitCode.DRAINED, job.read_tail()
        assert not job.find_processes()
        assert re.search(
            r"\ninterrupted after [78] steps, saved at step 5: all hosts got a notice to leave; the steps since then "
            r"are lost, as the notice left too little time to save more \(--grace-s\)\.",
            job.read_output(),
        ), job.read_tail()


def test_ctrl_c_after_a_notice_ends_the_job_now(tmp_path: Path) -> None:
    script, words, _ = KINDS["replicated"]
    with launch(tmp_path, script, words) as job:
        job.hold(FailPoint.AFTER_COMMIT, ["host-0"], 2)
        job.wait_held(["host-0"], DEADLINE_S)
        notify_all(job)
        job.process.send_signal(signal.SIGINT)
        assert job.wait(DEADLINE_S) == ExitCode.INTERRUPTED, job.read_tail()
        assert not job.find_processes()


def test_hosts_of_a_pod_that_all_get_a_notice_record_the_end_and_the_job_begins_there_again(
    tmp_path: Path,
) -> None:
    """The store outlives the job, and its end. The leader's host gets its notice first, and lets another lead."""
    checkpoints = tmp_path / "checkpoints"
    with (
        served_store() as store,
        Pod(
            tmp_path,
            store,
            loopback_sites(3),
            script=SCRIPTS / "own_loop.py",
            words=[str(checkpoints)],
        ) as pod,
    ):
        report = pod.wait_training(3)
        leaving = report.leader
        assert leaving is not None
        pod.agents[leaving].process.send_signal(signal.SIGUSR1)
        assert pod.agents.pop(leaving).wait() == ExitCode.DRAINED, pod.output()
        report = pod.wait_training(2, report.generation.number if report.generation else 0)
        assert report.leader != leaving
        decided = [e for e in pod.events() if e.kind is EventKind.GENERATION_PHASE and e.host == leaving]
        assert not any("notice" in str(event.detail["reason"]) for event in decided)
        for number in (signal.SIGHUP, signal.SIGTERM):
            for agent in pod.agents.values():
                agent.process.send_signal(number)
        assert {agent.wait() for agent in pod.agents.values()} == {ExitCode.DRAINED}, pod.output()
        saved = max(int(path.stem) for path in checkpoints.glob("*.npz"))
        code, said = run_command(["status", "--store", store, "--job", "pod"], {TOKEN_VARIABLE: TOKEN})
        assert (code, f"interrupted, saved at step {saved}: " in said) == (0, True), said
        began_s = time.time()
        for host in list(pod.agents):
            pod.start(host)
        pod.start(leaving)
        pod.wait_training(3)
        pod.end()
        commits = [
            event.detail["step"] if event.step is None else event.step
            for event in pod.events()
            if event.kind is EventKind.STEP_COMMITTED and event.wall_s > began_s
        ]
        assert min(map(int, commits)) == saved + 1


def test_the_agent_that_serves_the_store_serves_it_to_the_end_of_the_others_after_two_notices(
    tmp_path: Path,
) -> None:
    script, words = SCRIPTS / "own_loop.py", [str(tmp_path / "checkpoints")]
    with Pod(tmp_path, None, loopback_sites(2), script=script, words=words) as pod:
        pod.wait_training(2)
        for _ in range(2):
            for agent in pod.agents.values():
                agent.process.send_signal(signal.SIGTERM)
            wait_until("the notice is there", lambda: pod.output().count("got a notice to leave") == 2)
        assert [agent.wait() for agent in pod.agents.values()] == [ExitCode.DRAINED] * 2, pod.output()
        assert pod.output().count("the job ended: interrupted, saved at step ") == 2
        assert not list(tmp_path.glob("host-0/*.journal")), "the next start is a new one"


def test_a_signal_to_every_process_but_agents_and_launcher_changes_nothing(tmp_path: Path) -> None:
    """Workers, their parents, zygotes, snapshot servers, coordination services with their standbys."""
    with TinyJob(tmp_path, 2, protect(STANDBYS, 2), options=ONE_DEVICE) as tiny:
        tiny.wait_training(2)
        for host in HOSTS:
            tiny.wait_zygote(host)
        report = tiny.wait_report(
            "snapshot servers", lambda report: all(status.snapshots for status in report.hosts)
        )
        agents = {pid for host in HOSTS for pid in find_pids(report, JobComponent.AGENT, host)}
        others = set(tiny.job.find_processes()) - agents - {tiny.job.process.pid}
        assert len(others) >= 4 * len(HOSTS)
        for number in NOTICE_SIGNALS:
            for pid in others:
                os.kill(pid, number)
        goal = tiny.step() + 5
        wait_until("five more steps", lambda: tiny.step() >= goal, DEADLINE_S)
        assert others <= set(tiny.job.find_processes())
        tiny.finish()
