"""A loop of its own with a state in flat ranges, over real hosts that are lost: bits, shares, and what is compiled."""

import os
import subprocess
import sys
from pathlib import Path

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.jobs.compiled_programs import wait_compiled_ahead
from tests.support.paths import SCRIPTS
from tests.support.patience import patience
from tests.support.patient_job import PatientJob

JOB = SCRIPTS / "flat_state_job.py"
DEADLINE_S = patience(24)
STEPS = 12
LOSSES = {"host-3": 4, "host-2": 8}
"""The step in which each host is lost."""


def read_steps(work: Path) -> list[tuple[int, int, int, int, str]]:
    """Return what the hosts said of their steps: step, hosts, bytes here, bytes in all, digest."""
    lines = [line.split() for path in work.glob("steps.*") for line in path.read_text().splitlines()]
    return [
        (int(step), int(hosts), int(here), int(whole), digest) for step, hosts, here, whole, digest in lines
    ]


def test_from_four_hosts_to_two_each_has_its_share_and_the_bits_of_one_host_alone(tmp_path):
    alone, work = tmp_path / "alone", tmp_path / "job"
    for folder in (alone, work):
        folder.mkdir()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(JOB), str(alone)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    with PatientJob(
        [str(JOB), str(work)],
        num_hosts=4,
        run_directory=work / "run",
        options=["--devices-per-host", "1", "--host-restart-delay", "-1"],
        environment=environment,
    ) as job:
        for hosts, (lost, step) in zip((4, 3), LOSSES.items(), strict=True):
            job.hold(FailPoint.BEFORE_REDUCE, [lost], step)
            job.wait_held([lost], DEADLINE_S)
            left = [f"host-{number}" for number in range(hosts - 1)]
            wait_compiled_ahead(job, left, [f"sharded state over {hosts - 1} hosts"], DEADLINE_S)
            job.kill(JobComponent.HOST, lost)
            job.release()
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events = job.read_events()
    expected = {step: digest for step, *_, digest in read_steps(alone)}
    assert sorted(expected) == list(range(STEPS))
    found = read_steps(work)
    assert {step: digest for step, *_, digest in found} == expected
    assert {digest for *_, digest in found} == set(expected.values()), "also of steps that were made twice"
    assert {hosts for _, hosts, *_ in found} == {4, 3, 2}
    for _, hosts, here, whole, _ in found:
        assert whole <= here * hosts <= 1.01 * whole
    for event in events:
        # Whether in place, or because the leader's host was lost: all was compiled ahead.
        if event.kind is EventKind.PROGRAMS_READY and event.host in ("host-0", "host-1"):
            assert event.generation == 1 or event.detail["compiled"] == 0, event
    shares = {(e.generation, e.host) for e in events if e.kind is EventKind.STATE_SHARDED}
    assert len({host for generation, host in shares if generation == 1}) == 4
    assert {host for generation, host in shares if generation == max(shares)[0]} == {"host-0", "host-1"}
