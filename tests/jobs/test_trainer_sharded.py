"""The trainer with its state sharded over real hosts: the bits of a replicated state, and no host has all of it."""

import contextlib
import functools
import re

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.jobs.compiled_programs import (
    find_programs_after,
    start_joining_agent,
    wait_compiled_ahead,
    wait_joining,
)
from tests.jobs.launched import make_environment, run_alone
from tests.support.agents import run_command
from tests.support.full_only import full_but
from tests.support.paths import SCRIPTS
from tests.support.patience import patience
from tests.support.patient_job import PatientJob
from tests.support.tiny_job import LEASE

JOB = SCRIPTS / "sharded_job.py"
DEADLINE_S = patience(24)
MAX_IMBALANCE = 1.01
"""The largest share, times the number of hosts, over the state, of which no number of hosts divides a dim."""
LOST = 5
"""The step in which a host is lost; until then all hosts have reported each step."""
STEPS, REPORTS = 9, 12
"""The reports are of each step and of three evaluations."""


def said_in(output):
    """Return every step's metrics, to the last digit, and the digest of the final variables."""
    return set(re.findall(r"step \d+ (?:digest \w{64}|\[.*\])", output))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function of the devices of one host: what `said_in` finds for a replicated state there."""

    @functools.cache
    def run(devices):
        words = [str(JOB), str(tmp_path_factory.mktemp("alone")), "replicated"]
        found = said_in(run_alone(words, DEADLINE_S, devices))
        assert len(found) == REPORTS + 1
        return found

    return run


@pytest.fixture(scope="module")
def complete(alone):
    """Return what `said_in` finds for a replicated state on one host."""
    return alone(2)


def launch(work, hosts, options=(), words=("sharded",), cold=False):
    return PatientJob(
        [str(JOB), str(work), *words],
        num_hosts=hosts,
        run_directory=work / "run",
        options=["--devices-per-host", "2", *options],
        environment=make_environment(cold=cold),
    )


LAYOUTS = [
    (state, hosts, devices)
    for state in ("sharded", "replicated")
    for hosts in (1, 2, 3, 5)
    for devices in (1, 2)
]


@pytest.mark.full  # three hosts with two devices are below
@pytest.mark.parametrize(("state", "hosts", "devices"), LAYOUTS)
def test_every_layout_has_the_bits_of_a_replicated_state_and_each_host_has_its_shards(
    state, hosts, devices, alone, tmp_path
):
    with launch(tmp_path, hosts, ["--devices-per-host", str(devices)], [state]) as job:
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        found = said_in(job.read_output())
    assert found == alone(devices), "the devices of a host share a microbatch, so their number counts"
    if state == "sharded" and hosts > 1:
        check_shares(tmp_path, hosts, REPORTS)


def check_shares(work, hosts, reports):
    """Check that each host had its share of the state in the first reports of a job, and no complete array."""
    for host in range(hosts):
        shares = [line.split() for line in (work / f"shares.{host}").read_text().splitlines()[:reports]]
        assert len(shares) == reports
        for _, here, whole, complete_arrays in shares:
            assert int(whole) <= int(here) * hosts <= MAX_IMBALANCE * int(whole)
            assert int(complete_arrays) == 0


@pytest.mark.parametrize(
    "place", full_but([FailPoint.BEFORE_REDUCE, FailPoint.BEFORE_COMMIT], FailPoint.BEFORE_REDUCE.__eq__)
)
def test_each_host_has_its_shards_and_those_of_a_lost_one_are_restored_from_the_others_with_equal_bits(
    place, complete, tmp_path
):
    (tmp_path / "job.toml").write_text(LEASE)
    with launch(tmp_path, 3, ["--config", str(tmp_path / "job.toml")]) as job:
        job.hold(place, ["host-1"], LOST)
        job.wait_held(["host-1"], DEADLINE_S)
        job.kill(JobComponent.HOST, "host-1")
        job.release()
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        found = said_in(job.read_output())
    assert found == complete
    check_shares(tmp_path, 3, LOST)
    assert any(int(e.detail["decoded"]) for e in job.read_events() if e.kind is EventKind.SNAPSHOT_RESTORED)


@pytest.mark.full
def test_a_host_that_loses_a_device_goes_on_with_equal_bits(tmp_path):
    (tmp_path / "alone").mkdir()
    expected = said_in(run_alone([str(JOB), str(tmp_path / "alone"), "replicated", "each"], DEADLINE_S))
    # The other host waits for it.
    (tmp_path / "job.toml").write_text('min_hosts = 2\ndevices_after_loss = "all"\n')
    options = ["--config", str(tmp_path / "job.toml"), "--devices-per-host", "3"]
    with launch(tmp_path, 2, options, ["sharded", "each"]) as job:
        job.hold(FailPoint.BEFORE_REDUCE, ["host-0"], 4)
        job.wait_held(["host-0"], DEADLINE_S)
        code, said = run_command(["hosts", str(tmp_path / "run"), "drain", "host-1:1"])
        assert code == 0, said
        job.wait_event("the worker's end", lambda event: event.kind is EventKind.WORKER_EXITED, DEADLINE_S)
        job.release()
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        found, events = said_in(job.read_output()), job.read_events()
    assert len(expected) == REPORTS + 1
    assert found == expected
    assert not [event for event in events if event.kind is EventKind.STATE_DIFFERS]


def worlds_of(num_hosts: int) -> list[str]:
    """Return the names of what is compiled ahead for a world of so many hosts."""
    parts = ("reductions of 'train'", "reductions of 'evaluate'", "sharded state")
    return [f"{part} over {num_hosts} hosts" for part in parts]


@pytest.mark.full
def test_after_a_join_nothing_is_compiled_by_the_others(complete, tmp_path):
    """Two hosts are joined by a third: a world of three is new."""
    stay = ["host-0", "host-1"]
    with launch(tmp_path, 2, cold=True) as job, contextlib.ExitStack() as ending:
        with job.holding(FailPoint.BEFORE_REDUCE, ["host-0"], 5, DEADLINE_S):
            wait_compiled_ahead(job, stay, worlds_of(3), DEADLINE_S)
            command = [str(JOB), str(tmp_path), "sharded"]
            ending.enter_context(start_joining_agent(job, tmp_path / "joined", "host-2", command))
            wait_joining(job, "host-2", DEADLINE_S)
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events, found = job.read_events(), said_in(job.read_output())
    assert find_programs_after("grow", events, stay) == {host: [0, 0, 0] for host in stay}
    assert found == complete


@pytest.mark.full  # a pair: see test_trainer_job.py
def test_after_a_loss_nothing_is_compiled_by_the_others_and_no_devices_are_kept_when_they_leave(
    complete, tmp_path
):
    stay = ["host-0", "host-2"]
    with launch(tmp_path, 3, cold=True) as job:
        job.hold(FailPoint.BEFORE_REDUCE, ["host-1"], 5)
        job.wait_held(["host-1"], DEADLINE_S)
        wait_compiled_ahead(job, stay, worlds_of(2), DEADLINE_S)
        job.kill(JobComponent.WORKER, "host-1")
        job.release()
        with job.holding(FailPoint.BEFORE_REDUCE, ["host-0"], 7, DEADLINE_S):
            job.kill(JobComponent.COORDINATION_SERVICE, "leader")  # all form a new world
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events, found = job.read_events(), said_in(job.read_output())
    assert find_programs_after("shrink", events, stay) == {host: [0, 0, 0] for host in stay}
    left = [event for event in events if event.kind is EventKind.WORLD_LEFT and event.host in stay]
    assert {event.host: event.detail["leaked_backends"] for event in left} == dict.fromkeys(stay, 0)
    assert found == complete
