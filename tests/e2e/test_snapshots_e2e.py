"""No host has the whole state: kill any that parity covers, at any phase of a snapshot, and the bits come back."""

import signal
from pathlib import Path

import pytest
from sharded_job import ShardedJob
from tiny_job import RECOVERY_S

from resilient_jax.errors import ExitCode
from resilient_jax.protocol.fault_points import ANY_STEP, Place
from resilient_jax.world.inspection import Part

WORKER_PLACES = (Place.BEFORE_COPY, Place.DURING_COPY, Place.AFTER_COPY)
SERVER_PLACES = (Place.BEFORE_PARITY, Place.DURING_PARITY, Place.BEFORE_COMPLETE, Place.BEFORE_COMMITTED)
"""The last one is where the root's server tells the others: the first host's."""


def lose(job: ShardedJob, part: Part, hosts: list[str], everybody: int) -> None:
    """Kills them; what was promised before is kept, and all are back with a new snapshot in the end."""
    promised = job.promised_step()
    before = job.report().generation
    assert before is not None
    for host in hosts:
        job.signal(part, host, signal.SIGKILL)
    job.job.release()
    job.wait_protected(everybody, after_generation=before.number)
    went_on = [row["step"] + 1 for row in job.restored() if row["generation"] > before.number]
    assert min(went_on) >= promised, f"went back to step {min(went_on)}, {promised} was committed"


@pytest.mark.timeout(600)
def test_a_lost_host_at_every_phase_of_a_snapshot_comes_back_from_parity(tmp_path: Path) -> None:
    with ShardedJob(tmp_path, 4, parity=1) as job:
        job.wait_protected(4)
        for place in (*WORKER_PLACES, *SERVER_PLACES):
            report = job.report()
            assert report.generation is not None
            hosts = [m.host for m in report.generation.members]
            victim = hosts[0] if place is Place.BEFORE_COMMITTED else hosts[-1]
            job.hold(place, [victim])
            lose(job, Part.HOST, [victim], everybody=4)
        job.finish(more_steps=5)
    decoded = [e.detail["decoded"] for e in job.job.events() if e.kind == "snapshot.restored"]
    assert max(map(int, decoded)) > 0


@pytest.mark.timeout(600)
def test_two_hosts_at_once_and_all_workers_at_once(tmp_path: Path) -> None:
    with ShardedJob(tmp_path, 4, parity=2) as job:
        job.wait_protected(4)
        lose(job, Part.HOST, ["host-1", "host-3"], everybody=4)
        lose(job, Part.WORKER, [f"host-{index}" for index in range(4)], everybody=4)
        lose(job, Part.SNAPSHOTS, ["host-2"], everybody=4)
        job.finish(more_steps=5)


@pytest.mark.timeout(600)
def test_another_host_dies_while_the_state_is_restored_and_while_groups_are_built_anew(
    tmp_path: Path,
) -> None:
    with ShardedJob(tmp_path, 4, parity=2) as job:
        job.wait_protected(4)
        for place in (Place.DURING_RESTORE, Place.BEFORE_PARITY):
            promised = job.promised_step()
            before = job.report().generation
            assert before is not None
            job.job.hold(place, ["host-2"], ANY_STEP)
            job.signal(Part.HOST, "host-3", signal.SIGKILL)
            job.job.wait_held(["host-2"], RECOVERY_S)
            job.signal(Part.HOST, "host-2", signal.SIGKILL)
            job.job.release()
            job.wait_protected(4, after_generation=before.number + 1)
            went_on = [row["step"] + 1 for row in job.restored() if row["generation"] > before.number]
            assert min(went_on) >= promised
        job.finish(more_steps=5)


@pytest.mark.timeout(600)
def test_more_hosts_than_parity_end_the_job_with_what_is_lost(tmp_path: Path) -> None:
    with ShardedJob(tmp_path, 4, parity=1) as job:
        job.wait_protected(4)
        for host in ("host-2", "host-3"):
            job.signal(Part.HOST, host, signal.SIGKILL)
        assert job.job.wait(RECOVERY_S) == ExitCode.STATE_LOST
        assert "no snapshot in host memory can be rebuilt. the snapshot of step" in job.job.output()
        assert "host-2, host-3 are" in job.job.output()
        job.check_nothing_left()


@pytest.mark.timeout(600)
def test_a_notice_to_leave_loses_no_step(tmp_path: Path) -> None:
    with ShardedJob(tmp_path, 3, parity=1) as job:
        job.wait_protected(3)
        before = job.report().generation
        assert before is not None
        job.signal(Part.AGENT, "host-2", signal.SIGTERM)
        job.wait_protected(2, after_generation=before.number)
        job.finish(more_steps=5)
    by_generation = {row["generation"]: row["step"] for row in job.restored()}
    reached = max(
        row["step"] for rows in job.logs().values() for row in rows if row["generation"] == before.number
    )
    assert min(step for number, step in by_generation.items() if number > before.number) == reached
