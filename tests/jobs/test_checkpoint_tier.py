"""More hosts die at once than parity covers: the running job resumes from its newest checkpoint, bit for bit."""

import os
import re
import signal
import subprocess
import sys

import pytest

from resilient_jax.cluster.job_report import JobComponent, find_pids
from resilient_jax.errors import ExitCode
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.jobs.launched import make_environment
from tests.support.paths import SCRIPTS
from tests.support.patience import patience, wait_until
from tests.support.patient_job import PatientJob
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS

JOB = SCRIPTS / "sharded_job.py"
DEADLINE_S = patience(24)
SMALL_BYTES = 8192
"""Bound on the leaves that are too small to shard, which every host reads."""
HOSTS, SAVED, LOST = 3, 5, 7
"""Steps 5 and 9, the last, are saved as checkpoints; hosts die in step 7, when 7 are committed."""


def digests_in(output):
    return set(re.findall(r"step 9 digest \w{64}", output))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the final digests of a run on one machine without failures."""
    done = subprocess.run(
        [sys.executable, str(JOB), str(tmp_path_factory.mktemp("alone")), "replicated"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        },
    )
    assert done.returncode == 0, done.stderr
    return digests_in(done.stdout)


def launch(work):
    (work / "job.toml").write_text(CONFIG_WITHOUT_STANDBYS)
    return PatientJob(
        [str(JOB), str(work), "sharded"],
        num_hosts=HOSTS,
        run_directory=work / "run",
        options=["--devices-per-host", "2", "--config", str(work / "job.toml")],
        environment=make_environment(),
    )


def hold_in_step(job, work, victims):
    """Wait until these hosts are held in step 7, and the checkpoint of step 5 is on storage."""
    job.hold(FailPoint.BEFORE_REDUCE, victims, LOST)
    job.wait_held(victims, DEADLINE_S)
    wait_until("the checkpoint", lambda: (work / "checkpoints" / str(SAVED)).exists(), DEADLINE_S)


def kill_at_once(job, victims):
    report = job.read_report()
    assert report is not None
    for pid in [pid for victim in victims for pid in find_pids(report, JobComponent.HOST, victim)]:
        os.kill(pid, signal.SIGKILL)
    job.release()


@pytest.mark.parametrize(
    "victims",
    [pytest.param(("host-1", "host-2"), marks=pytest.mark.full), ("host-0", "host-1", "host-2")],
    ids=["two of three", "all"],
)
def test_after_more_lost_hosts_than_parity_training_resumes_from_the_checkpoint_bit_for_bit(
    victims, undisturbed, tmp_path
):
    with launch(tmp_path) as job:
        hold_in_step(job, tmp_path, victims)
        kill_at_once(job, victims)
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events, output = job.read_events(), job.read_output()
    assert digests_in(output) == undisturbed
    (lost,) = [event for event in events if event.kind is EventKind.STATE_LOST]
    assert lost.detail["goes_on_from"] == SAVED
    restored = [event for event in events if event.kind is EventKind.CHECKPOINT_RESTORED]
    assert {event.detail["step"] for event in restored} == {SAVED}
    if len(victims) < HOSTS:
        assert (lost.step, lost.detail["steps_lost"], lost.detail["at_least"]) == (LOST, LOST - SAVED, False)
        assert {event.detail["steps_lost"] for event in restored} == {LOST - SAVED}
        assert "no snapshot in host memory can be rebuilt" in str(lost.detail["reason"])
        assert "the state of step 7 is lost; going on from the checkpoint of step 5, 2 steps back" in output
    else:
        assert lost.detail["at_least"]
        assert "or a later one is lost; going on from the checkpoint of step 5" in output
    shares = [line.split() for line in (tmp_path / "shares.0").read_text().splitlines()]
    whole = int(shares[-1][2])
    by_generation = {event.generation for event in restored}
    for number in by_generation:
        read = [int(event.detail["bytes"]) for event in restored if event.generation == number]
        assert all(nbytes < whole / len(read) + SMALL_BYTES for nbytes in read), (read, whole)


@pytest.mark.full  # what is corrupt is in process/checkpoint
def test_if_the_only_checkpoint_is_corrupt_the_job_ends_with_what_is_lost_and_why_it_cannot_be_read(tmp_path):
    victims = ("host-1", "host-2")
    with launch(tmp_path) as job:
        hold_in_step(job, tmp_path, victims)
        (folder,) = (tmp_path / "checkpoints").glob("5")
        largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 4
        largest.write_bytes(data)
        kill_at_once(job, victims)
        assert job.wait(DEADLINE_S) == ExitCode.STATE_LOST, job.read_tail()
        last_words = job.read_output().rpartition("\nlogs and events: ")[2]
    assert "host-1, host-2 are; host-0 survives" in last_words
    assert re.search(r"none that every host can read \(step 5: the file .* has the SHA-256", last_words)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["5"]
