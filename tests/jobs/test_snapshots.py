"""Sharded state: after the loss of any hosts that parity covers, at any phase of a snapshot, every bit is restored."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.errors import ExitCode
from resilient_jax.protocol.failpoints import ANY_STEP, FailPoint, FailPointOrder
from resilient_jax.protocol.generation import GenerationPhase
from tests.jobs.launched import make_environment
from tests.support.full_only import full_but
from tests.support.paths import SCRIPTS
from tests.support.patient_job import PatientJob
from tests.support.sharded_job import ShardedJob
from tests.support.tiny_job import CONFIG, CONFIG_WITHOUT_STANDBYS, RECOVERY_S, is_training

JOBS = SCRIPTS
WORKER_PLACES = (FailPoint.BEFORE_COPY, FailPoint.DURING_COPY, FailPoint.AFTER_COPY)
WORKER_PLACES_IN_MAKE_TEST_JOBS = (FailPoint.DURING_COPY,)
"""Before it the snapshot has not begun, after it the server is before its parity."""
SERVER_PLACES = (
    FailPoint.BEFORE_PARITY,
    FailPoint.DURING_PARITY,
    FailPoint.BEFORE_COMPLETE,
    FailPoint.BEFORE_COMMITTED,
)
"""At the last one the root's server, that of the first host, announces the commit to the others."""


def lose(job: ShardedJob, part: JobComponent, hosts: list[str], everybody: int) -> None:
    """Kill this component on these hosts; check that no snapshot is lost, and wait for all hosts and a new snapshot."""
    promised = job.promised_step()
    before = job.read_report().generation
    assert before is not None
    for host in hosts:
        job.signal(part, host, signal.SIGKILL)
    job.job.release()
    job.wait_protected(everybody, after_generation=before.number)
    went_on = [row["step"] + 1 for row in job.restored() if row["generation"] > before.number]
    assert min(went_on) >= promised, f"went back to step {min(went_on)}, {promised} was committed"


def test_a_host_lost_at_any_phase_of_a_snapshot_is_restored_from_parity_and_of_two_it_is_said_what_is_lost(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    is_full = pytestconfig.getoption("--full")
    with ShardedJob(tmp_path, 4, parity=1) as job:
        job.wait_protected(4)
        for place in (
            *(WORKER_PLACES if is_full else WORKER_PLACES_IN_MAKE_TEST_JOBS),
            *SERVER_PLACES,
        ):
            report = job.read_report()
            assert report.generation is not None
            hosts = [m.host for m in report.generation.membership.members]
            victim = hosts[0] if place is FailPoint.BEFORE_COMMITTED else hosts[-1]
            job.hold(place, [victim])
            lose(job, JobComponent.HOST, [victim], everybody=4)
        for host in ("host-2", "host-3"):
            job.signal(JobComponent.HOST, host, signal.SIGKILL)
        assert job.job.wait(RECOVERY_S) == ExitCode.STATE_LOST
        assert "no snapshot in host memory can be rebuilt. the snapshot of step" in job.job.read_output()
        assert re.search("(host-2, host-3|host-3, host-2) are", job.job.read_output())
        job.check_steps()
        job.check_generations()
        job.check_nothing_left()
    decoded = [e.detail["decoded"] for e in job.job.read_events() if e.kind == "snapshot.restored"]
    assert max(map(int, decoded)) > 0


def test_a_notice_to_leave_loses_no_step_and_two_hosts_stay_until_the_others_have_a_snapshot_without_them(
    tmp_path: Path,
) -> None:
    """With parity for one host, the shards of two of four hosts are of no use without those of the other two."""
    with ShardedJob(tmp_path, 5, parity=1) as job:
        job.wait_protected(5)
        first = job.read_report().generation
        assert first is not None
        job.signal(JobComponent.AGENT, "host-4", signal.SIGTERM)
        job.wait_protected(4, after_generation=first.number)
        by_generation = {row["generation"]: row["step"] for row in job.restored()}
        reached = max(
            row["step"] for rows in job.logs().values() for row in rows if row["generation"] == first.number
        )
        assert min(step for number, step in by_generation.items() if number > first.number) == reached
        before = job.read_report().generation
        assert before is not None
        for leaving in ("host-2", "host-3"):
            job.signal(JobComponent.AGENT, leaving, signal.SIGTERM)
        job.job.wait_report(
            "two hosts",
            lambda now: (
                now.generation is not None
                and len(now.generation.membership.members) == 2
                and now.generation.phase in (GenerationPhase.FORM, GenerationPhase.ACTIVE)
            ),
            RECOVERY_S,
        )
        job.job.hold(FailPoint.BEFORE_PARITY, ["host-0"], ANY_STEP)
        job.job.wait_held(["host-0"], RECOVERY_S)
        job.signal(JobComponent.WORKER, "host-1", signal.SIGKILL)
        job.job.release()
        job.wait_protected(2, after_generation=before.number + 1)
        job.finish(more_steps=5)


def test_a_state_that_is_replicated_over_hosts_and_sharded_within_each_needs_no_snapshot(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.toml").write_text(CONFIG_WITHOUT_STANDBYS)
    job = PatientJob(
        [str(JOBS / "hybrid.py"), str(tmp_path)],
        num_hosts=3,
        run_directory=tmp_path / "run",
        options=["--config", str(tmp_path / "job.toml"), "--devices-per-host", "2"],
        environment=make_environment(),
    )
    with job:
        job.wait_report("training", lambda now: is_training(now, 3, 0), RECOVERY_S)
        job.kill(JobComponent.HOST, "host-2")
        job.wait_report("host-2 back", lambda now: is_training(now, 3, 1), RECOVERY_S)
        (tmp_path / "stop").touch()
        assert job.wait(RECOVERY_S) == ExitCode.DONE, job.read_output()
    for path in sorted(tmp_path.glob("final-*.json")):
        final = json.loads(path.read_text())
        assert final["least"] == final["most"] == final["steps"] > 0
    kinds = [event.kind for event in job.read_events()]
    assert "state.fetched" in kinds
    assert "snapshot.restored" not in kinds


@pytest.fixture(scope="module")
def twice_protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedJob]:
    """Yield the job that the tests below break, one after the other; check its invariants after them."""
    with ShardedJob(tmp_path_factory.mktemp("snapshots"), 4, parity=2, config=CONFIG) as job:
        yield job
        job.finish(more_steps=5)


@pytest.mark.full  # two hosts at once are in smoke, too
def test_the_loss_of_two_hosts_at_once_and_of_all_workers_at_once_is_survived(
    twice_protected: ShardedJob,
) -> None:
    twice_protected.wait_protected(4)
    lose(twice_protected, JobComponent.HOST, ["host-1", "host-3"], everybody=4)
    lose(twice_protected, JobComponent.WORKER, [f"host-{index}" for index in range(4)], everybody=4)
    lose(twice_protected, JobComponent.SNAPSHOT_SERVER, ["host-2"], everybody=4)


@pytest.mark.parametrize(
    "place", full_but([FailPoint.DURING_RESTORE, FailPoint.BEFORE_PARITY], FailPoint.DURING_RESTORE.__eq__)
)
def test_a_second_death_during_the_restore_or_while_groups_are_rebuilt_is_survived(
    place: FailPoint, twice_protected: ShardedJob
) -> None:
    job = twice_protected
    job.wait_protected(4)
    promised = job.promised_step()
    before = job.read_report().generation
    assert before is not None
    job.job.hold(place, ["host-2"], ANY_STEP)
    job.signal(JobComponent.HOST, "host-3", signal.SIGKILL)
    job.job.wait_held(["host-2"], RECOVERY_S)
    job.signal(JobComponent.HOST, "host-2", signal.SIGKILL)
    job.job.release()
    job.wait_protected(4, after_generation=before.number + 1)
    went_on = [row["step"] + 1 for row in job.restored() if row["generation"] > before.number]
    assert min(went_on) >= promised


@pytest.mark.full
@pytest.mark.parametrize("victim", ["host-3", "host-0"])
def test_a_worker_that_returns_during_a_snapshot_and_a_death_then_lose_no_snapshot(
    victim: str, twice_protected: ShardedJob
) -> None:
    """Between them: one host's snapshot server is in the middle of its parity when the members change."""
    job = twice_protected
    job.wait_protected(4)
    promised = job.promised_step()
    returning, exchanging = (
        FailPointOrder(failpoint=place, step=ANY_STEP, hosts=(host,), name=host)
        for place, host in ((FailPoint.BEFORE_REHEARSAL, "host-3"), (FailPoint.DURING_PARITY, "host-0"))
    )
    job.job.failpoints.set_order(returning)
    job.signal(JobComponent.WORKER, "host-3", signal.SIGKILL)
    job.job.wait_held(["host-3"], RECOVERY_S, returning.name)
    shrunk = job.read_report().generation
    assert shrunk is not None
    job.job.failpoints.set_order(exchanging)
    job.job.wait_held(["host-0"], RECOVERY_S, exchanging.name)
    job.job.failpoints.release(returning.name)
    grown = job.wait_training(4, shrunk.number).generation
    assert grown is not None
    job.signal(JobComponent.HOST, victim, signal.SIGKILL)
    job.job.failpoints.release(exchanging.name)
    job.wait_protected(4, after_generation=grown.number)
    went_on = [row["step"] + 1 for row in job.restored() if row["generation"] > shrunk.number]
    assert min(went_on) >= promised
