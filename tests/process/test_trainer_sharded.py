"""The trainer with its state sharded over real hosts: the bits of a replicated state, and no host has all of it."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from agents import HandStartedAgent

from resilient_jax.chaos.local_job import LocalJob
from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.launcher import TOKEN_VARIABLE
from resilient_jax.cluster.run_directory import read_contact
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.failpoints import FailPoint

JOB = Path(__file__).with_name("sharded_job.py")
DEADLINE_S = 240.0
MAX_IMBALANCE = 1.01
"""The largest share, times the number of hosts, over the state, of which no number of hosts divides a dim."""
STEPS, REPORTS = 9, 12
"""The reports are of each step and of three evaluations."""


def said_in(output):
    """Return every step's metrics, to the last digit, and the digest of the final variables."""
    return set(re.findall(r"step \d+ (?:digest \w{64}|\[.*\])", output))


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """Return what `said_in` finds for a replicated state on one machine."""
    work = tmp_path_factory.mktemp("alone")
    done = subprocess.run(
        [sys.executable, str(JOB), str(work), "replicated"],
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
    return said_in(done.stdout)


def launch(work, hosts, options=()):
    return LocalJob(
        [str(JOB), str(work), "sharded"],
        num_hosts=hosts,
        run_directory=work / "run",
        options=["--devices-per-host", "2", *options],
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_sharded_state_has_the_bits_of_a_replicated_one_and_each_host_has_its_shards(
    hosts, complete, tmp_path
):
    with launch(tmp_path, hosts) as job:
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        found = said_in(job.read_output())
    assert len(complete) == REPORTS + 1
    assert found == complete
    for host in range(hosts):
        shares = [line.split() for line in (tmp_path / f"shares.{host}").read_text().splitlines()]
        assert len(shares) == REPORTS
        for _, here, whole, complete_arrays in shares:
            assert int(whole) <= int(here) * hosts <= MAX_IMBALANCE * int(whole)
            assert int(complete_arrays) == 0


@pytest.mark.parametrize("place", [FailPoint.BEFORE_REDUCE, FailPoint.BEFORE_COMMIT])
def test_the_shards_of_a_lost_host_are_restored_from_the_other_hosts_with_equal_bits(
    place, complete, tmp_path
):
    (tmp_path / "job.toml").write_text("lease_ttl_s = 2.0\n")
    with launch(tmp_path, 3, ["--config", str(tmp_path / "job.toml")]) as job:
        job.hold(place, ["host-1"], 5)
        job.wait_held(["host-1"], DEADLINE_S)
        job.kill(JobComponent.HOST, "host-1")
        job.release()
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        found = said_in(job.read_output())
    assert found == complete
    assert any(int(e.detail["decoded"]) for e in job.read_events() if e.kind is EventKind.SNAPSHOT_RESTORED)


def wait_compiled_ahead(job: LocalJob, hosts: list[str], num_hosts: int) -> None:
    """Wait until these hosts have compiled what a world of `num_hosts` hosts would need."""
    for host in hosts:
        for what in ("reductions of 'train'", "reductions of 'evaluate'", "sharded state"):
            job.wait_event(
                f"{host} has compiled {what} over {num_hosts} hosts",
                lambda event, host=host, what=what: (
                    event.kind is EventKind.PROGRAM_COMPILED_AHEAD
                    and event.host == host
                    and event.detail["world"] == f"{what} over {num_hosts} hosts"
                ),
                DEADLINE_S,
            )


def find_programs_of_first_steps(events: list[Event], hosts: list[str], change: str) -> dict[str, list[int]]:
    """Return how many programs hosts compiled and fetched in the first step after a change, and compiled later."""
    formed = min(e.generation or 0 for e in events if is_formed_by(e, change))
    found = {
        event.host: [int(event.detail["compiled"]), int(event.detail["fetched"]), 0]
        for event in events
        if event.kind is EventKind.PROGRAMS_READY and event.generation == formed and event.host in hosts
    }
    for event in events:
        if event.kind is EventKind.COMPILE_CACHE_MISS and event.generation == formed and event.host in hosts:
            found[event.host][2] += 1
    return found


def is_formed_by(event: Event, change: str) -> bool:
    return event.kind is EventKind.WORLD_FORMED and event.detail["change"] == change


def test_after_a_join_nothing_is_compiled_by_the_others(complete, tmp_path):
    """Two hosts are joined by a third: a world of three is new."""
    stay = ["host-0", "host-1"]
    with launch(tmp_path, 2) as job, contextlib.ExitStack() as ending:
        with job.holding(FailPoint.BEFORE_REDUCE, ["host-0"], 5, DEADLINE_S):
            wait_compiled_ahead(job, stay, 3)
            ending.enter_context(join(job, tmp_path, "host-2"))
            job.wait_event(
                "host-2 joins after this step",
                lambda event: (
                    event.kind is EventKind.GENERATION_PHASE
                    and event.detail["phase"] == "boundary"
                    and "host-2" in str(event.detail["reason"])
                ),
                DEADLINE_S,
            )
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events, found = job.read_events(), said_in(job.read_output())
    assert find_programs_of_first_steps(events, stay, "grow") == {host: [0, 0, 0] for host in stay}
    assert found == complete


def test_after_a_loss_nothing_is_compiled_by_the_others(complete, tmp_path):
    stay = ["host-0", "host-2"]
    with launch(tmp_path, 3) as job:
        with job.holding(FailPoint.BEFORE_REDUCE, ["host-1"], 5, DEADLINE_S):
            wait_compiled_ahead(job, stay, 2)
            job.kill(JobComponent.WORKER, "host-1")
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events, found = job.read_events(), said_in(job.read_output())
    assert find_programs_of_first_steps(events, stay, "shrink") == {host: [0, 0, 0] for host in stay}
    assert found == complete


def join(job: LocalJob, work: Path, host: str) -> HandStartedAgent:
    """Start an agent that joins a running job."""
    contact = read_contact(job.run_directory)
    words = ["--store", contact.store, "--job", contact.job, "--host-name", host, "--address", "127.0.0.9"]
    words += ["--num-hosts", "2", "--run-dir", str(work / "joined")]
    words += ["--platform", "cpu", "--devices-per-host", "2"]
    return HandStartedAgent(
        [*words, "--", str(JOB), str(work), "sharded"],
        work / "joined.out",
        environment={TOKEN_VARIABLE: contact.token},
    )
