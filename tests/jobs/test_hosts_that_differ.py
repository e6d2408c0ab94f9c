"""A host whose state has other bits than that of the others is noticed, named and taken out."""

import os
import re
from pathlib import Path

import pytest

from resilient_jax.errors import ExitCode
from resilient_jax.events import EventKind
from tests.jobs.launched import JOBS
from tests.jobs.pod import Pod, loopback_sites
from tests.support.agents import served_store
from tests.support.patience import patience
from tests.support.patient_job import PatientJob

DEADLINE_S = patience(12)


def launch(work: Path, fault: str, hosts: int) -> PatientJob:
    return PatientJob(
        [str(JOBS / "differing.py"), fault],
        num_hosts=hosts,
        run_directory=work / "run",
        environment={**os.environ, "ODD_HOST": str(hosts - 1), "FLIPPED": str(work / "flipped")},
    )


def read_states(output: str) -> list[tuple[str, str]]:
    """Return (weights, number of steps) of each host at the end."""
    return re.findall(r"host-\d ended with ([0-9a-f]+) after (\d+)", output)


def test_a_host_with_a_flipped_bit_starts_again_with_the_state_of_the_others(tmp_path: Path) -> None:
    with launch(tmp_path, "none", 1) as alone:
        assert alone.wait(DEADLINE_S) == 0, alone.read_tail()
        (expected,) = read_states(alone.read_output())
    with launch(tmp_path / "flip", "flip", 3) as job:
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events, output = job.read_events(), job.read_output()
    found = {
        (event.host, event.detail["hosts"], event.detail["steps"])
        for event in events
        if event.kind is EventKind.STATE_DIFFERS
    }
    # The odd host ends as soon as it knows; a host that has not got its result by then has lost a peer instead.
    assert ("host-2", "host-2", 64) in found
    assert {(named, steps) for _, named, steps in found} == {("host-2", 64)}
    assert "the state of host-2 after 64 steps differs from that of most hosts" in output
    starts = [event.host for event in events if event.kind is EventKind.WORKER_STARTED]
    assert sorted(starts) == ["host-0", "host-1", "host-2", "host-2"]
    assert set(read_states(output)) == {expected}, "the flipped bit is in nobody's state"


@pytest.mark.parametrize(("fault", "steps"), [("init", 0), ("rate", 64)])
def test_two_hosts_that_differ_end_the_job(fault: str, steps: int, tmp_path: Path) -> None:
    with launch(tmp_path, fault, 2) as job:
        assert job.wait(DEADLINE_S) == 1, job.read_tail()
        output = job.read_output()
    assert f"the state after {steps} steps: found another on each of host-0, host-1" in output
    assert "Every host must run the same script" in output


@pytest.mark.parametrize(
    ("fault", "hosts", "found"),
    [
        pytest.param(
            "data",
            1,
            "found different arrays in two reads on host-0, expected the same in each read",
            marks=pytest.mark.full,
        ),
        ("data", 2, "found other arrays on host-0, host-1, expected the same in each read"),
        ("drawn", 3, "found other arrays on host-2, expected those of most hosts"),
    ],
)
def test_data_that_are_not_pure_are_named_and_training_goes_on(
    fault: str, hosts: int, found: str, tmp_path: Path
) -> None:
    with launch(tmp_path, fault, hosts) as job:
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        events, output = job.read_events(), job.read_output()
    odd = [event for event in events if event.kind is EventKind.DATA_DIFFERS]
    expected = {(f"host-{index}", step) for index in range(hosts) for step in (0, 62 if hosts == 1 else 64)}
    assert {(event.host, event.detail["step"]) for event in odd} == expected
    assert {event.detail["hosts"] for event in odd} == {found.split(" on ")[1].split(", expected")[0]}
    assert output.count(found) == len({event.generation for event in odd}), "once in a generation"
    assert len(read_states(output)) == hosts


def test_a_host_with_other_arguments_is_refused_and_the_others_train_on(tmp_path: Path) -> None:
    with served_store() as store, Pod(tmp_path, store, loopback_sites(3)) as pod:
        pod.wait_training(3)
        pod.agents["host-2"].kill()
        pod.wait_training(2)
        pod.start("host-2", ["pace=0.5"])
        assert pod.agents["host-2"].wait() == ExitCode.SCRIPT_DIFFERS, pod.output()
        said = pod.agents["host-2"].output()
        assert "arguments: found ['" in said
        assert "'pace=0.5'] on host-2, expected ['" in said
        assert "Traceback" not in said
        pod.wait_training(2)
        pod.start("host-2")
        pod.wait_training(3)
        pod.finish()


def test_a_host_with_another_model_leaves_a_job_of_three(tmp_path: Path) -> None:
    with launch(tmp_path, "model", 3) as job:
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        output = job.read_output()
    assert "host host-2 leaves the job" in output
    assert "leaf : found float32[4], expected float32[3] as on most hosts" in output
    assert len(read_states(output)) == 2


def test_two_hosts_with_different_models_end_the_job_with_both(tmp_path: Path) -> None:
    with launch(tmp_path, "model", 2) as job:
        assert job.wait(DEADLINE_S) == 1, job.read_tail()
        output = job.read_output()
    assert re.search(
        r"leaf : found float32\[[34]\], expected float32\[[34]\], and no more hosts do the one", output
    )


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("constant", "constant float32[] 0.1"),
        # What differs is found without a job in tests/jax/program_analysis/test_program_digest.py.
        pytest.param(
            "path", "operation tanh float32[2, 3]: found none, expected 1 times", marks=pytest.mark.full
        ),
        pytest.param(
            "direct", "operation tanh float32[2, 3]: found none, expected 1 times", marks=pytest.mark.full
        ),
    ],
)
def test_a_host_with_another_program_leaves_before_anything_is_added(
    fault: str, found: str, tmp_path: Path
) -> None:
    with launch(tmp_path, fault, 3) as job:
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        output, events = job.read_output(), job.read_events()
    assert "host host-2 leaves the job" in output
    assert "of the program of a microbatch" in output
    assert found in output
    assert len(read_states(output)) == 2
    assert not [event for event in events if event.kind is EventKind.STATE_DIFFERS]


def test_hosts_with_the_same_program_are_not_refused_after_one_came_back(tmp_path: Path) -> None:
    with launch(tmp_path, "alike", 3) as job:
        assert job.wait(DEADLINE_S) == 0, job.read_tail()
        output, events = job.read_output(), job.read_events()
    kinds = {event.kind for event in events}
    assert not kinds & {EventKind.SCRIPT_REFUSED, EventKind.STATE_DIFFERS}
    found = read_states(output)
    assert len(found) == 3
    assert len(set(found)) == 1


def test_two_hosts_whose_trainers_make_different_updates_end_the_job(tmp_path: Path) -> None:
    with launch(tmp_path, "optimizer", 2) as job:
        assert job.wait(DEADLINE_S) == 1, job.read_tail()
        output, events = job.read_output(), job.read_events()
    assert re.search(r"of the program of the update, .*constant float32\[\] -0\.[12]", output)
    assert "and no more hosts do the one than the other" in output
    assert not [event for event in events if event.kind is EventKind.STATE_DIFFERS]


def test_copies_of_a_shard_that_differ_end_the_job(tmp_path: Path) -> None:
    with launch(tmp_path, "shards", 4) as job:
        assert job.wait(DEADLINE_S) == 1, job.read_tail()
        output = job.read_output()
    assert "the state after 64 steps: found another on each of host-1, host-3" in output
