"""The trainer in a real job whose first host is killed: the same bits as on one undisturbed machine."""

import collections
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.errors import ExitCode
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.failpoints import FailPoint, FailPointOrder, HangAction
from tests.jobs.launched import make_environment, run_alone
from tests.support.paths import SCRIPTS
from tests.support.patience import patience
from tests.support.patient_job import PatientJob

JOB = SCRIPTS / "trainer_job.py"
DEADLINE_S = patience(15)
CONFIG = "max_restarts = 10\nrestart_backoff_s = 0.0\n"


def launch(work, *words, hosts, cold=False, config=CONFIG):
    work.mkdir(exist_ok=True)
    (work / "job.toml").write_text(config)
    return PatientJob(
        [str(JOB), str(work), *words],
        num_hosts=hosts,
        run_directory=work / "run",
        options=["--config", str(work / "job.toml"), "--devices-per-host", "2"],
        environment=make_environment(cold=cold),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the output of the job on one machine without failures."""
    return run_alone([str(JOB), str(tmp_path_factory.mktemp("alone"))], DEADLINE_S).strip()


@pytest.mark.parametrize(
    "place", [pytest.param(FailPoint.BEFORE_REDUCE, marks=pytest.mark.full), FailPoint.AFTER_COMMIT]
)
def test_the_weights_are_bit_for_bit_those_of_an_undisturbed_run_and_nothing_is_compiled(
    place, undisturbed, tmp_path
):
    survivors = ("host-1", "host-2")
    with launch(tmp_path, hosts=3, cold=True, config=CONFIG + "digest_interval_steps = 1\n") as job:
        job.hold(place, ["host-0"], 6)
        job.wait_held(["host-0"], DEADLINE_S)
        for name in survivors:
            job.wait_event(
                f"{name} has compiled ahead",
                lambda event, name=name: (
                    event.kind is EventKind.PROGRAM_COMPILED_AHEAD and event.host == name
                ),
                DEADLINE_S,
            )
        killed_s = job.kill(JobComponent.WORKER, "host-0")
        job.release()
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        found = re.findall(r"step 14 digest \w{64}", job.read_output())
        assert_compiled_once(job.read_events(), 3)
        compiled = {
            event.host: event.detail["compiled"]
            for event in job.read_events()
            if event.monotonic_s > killed_s
            and event.kind is EventKind.PROGRAMS_READY
            and event.host in survivors
        }
    assert found, job.read_output()
    assert set(found) == {undisturbed}
    assert compiled == dict.fromkeys(survivors, 0)
    if place is FailPoint.AFTER_COMMIT:  # of one of the jobs
        assert_replay_finds_what_was_committed_and_what_was_not(tmp_path)


def assert_replay_finds_what_was_committed_and_what_was_not(work):
    """Assert that one machine computes steps of three hosts again with equal digests, and writes nothing."""
    for log in (work / "run").glob("*.digests.jsonl"):  # a sum of the last step, as if it had been another
        lines = log.read_text().splitlines()
        changed = [
            re.sub('(?<="digest":")\\w', "x", line) if '"step":13,' in line else line for line in lines
        ]
        log.write_text("\n".join([*changed, ""]))
    before = sorted((path, path.stat().st_mtime_ns) for path in work.rglob("*"))
    done = replay(work, 13)
    assert done.returncode == 1, done.stdout + done.stderr
    assert before == sorted((path, path.stat().st_mtime_ns) for path in work.rglob("*"))
    first = int(re.findall(r"computed from the state after (\d+) steps", done.stdout)[0])
    assert first in (8, 12)
    assert len(re.findall("(?:train'|state) .*equal", done.stdout)) == 2 * (14 - first) - 1, done.stdout
    assert "first in the sum 'train' of step 13" in done.stdout
    refused = replay(work, 3)
    assert refused.returncode == ExitCode.USAGE
    assert re.search(r"found checkpoints after .*14 steps in", refused.stderr)


def replay(work, step):
    command = [
        sys.executable,
        "-m",
        "resilient_jax.cli.main",
        "replay",
        str(work / "run"),
        "--step",
        str(step),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def assert_compiled_once(events: Sequence[Event], hosts: int) -> None:
    """Assert that in the first generation, with a cold cache, each program was compiled by one host for all."""
    first = [event for event in events if event.generation == 1]
    missed = collections.Counter(
        f"{event.detail['program']}-{event.detail['digest']}"
        for event in first
        if event.kind is EventKind.COMPILE_CACHE_MISS
    )
    assert set(missed.values()) == {1}, missed
    ready = {event.host: event.detail for event in first if event.kind is EventKind.PROGRAMS_READY}
    assert len(ready) == hosts
    # Whichever host asks for a program first compiles it: one may be the first each time, and fetch nothing.
    assert sum(bool(detail["fetched"]) for detail in ready.values()) >= hosts - 1, ready


@pytest.mark.full
def test_a_host_does_not_wait_for_the_compiler_of_a_host_that_was_killed(undisturbed, tmp_path):
    hosts = ("host-0", "host-1")
    with launch(tmp_path, hosts=2, cold=True) as job:
        job.hold(FailPoint.BEFORE_COMPILE, hosts)
        held = job.wait_for("a host compiles", lambda: job.failpoints.list_held_hosts() or None, DEADLINE_S)
        compiles, waits = sorted(hosts, key=lambda host: host not in held)
        job.kill(JobComponent.WORKER, compiles)
        job.release()
        job.wait_event(
            "the other host stopped waiting",
            lambda event: event.host == waits and event.kind is EventKind.WORKER_IDLE,
            DEADLINE_S,
        )
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        found = re.findall(r"step 14 digest \w{64}", job.read_output())
    assert set(found) == {undisturbed}


@pytest.mark.full  # a collective that hangs is in test_hangs.py
def test_a_collective_with_a_silent_peer_fails_after_the_configured_timeout(undisturbed, tmp_path):
    """Hang a peer, as if gloo had lost a message: no process dies, and no connection breaks."""
    config = CONFIG + "collective_timeout_s = 4.0\nquiesce_timeout_s = 2.0\n"
    with launch(tmp_path, hosts=2, config=config) as job:
        hang = HangAction(duration_s=DEADLINE_S)
        job.failpoints.set_order(
            FailPointOrder(
                failpoint=FailPoint.BEFORE_REDUCE, step=6, hosts=("host-1",), action=hang, name="hang"
            )
        )
        failed = job.wait_event(
            "host-0 gave up a collective",
            lambda event: event.kind is EventKind.COLLECTIVE_FAILED and event.host == "host-0",
            DEADLINE_S,
        )
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        found = re.findall(r"step 14 digest \w{64}", job.read_output())
    assert "Timed out waiting" in str(failed.detail["error"])
    assert set(found) == {undisturbed}


def test_a_non_finite_loss_ends_the_job_and_the_error_names_step_microbatch_and_host(tmp_path):
    with launch(tmp_path, "nan", hosts=2) as job:
        assert job.wait(DEADLINE_S) != ExitCode.DONE
        said = job.read_output()
    assert re.search(r"NonFiniteError: step 4: found .* in the microbatches 5 \(host host-[01]\)", said), said
