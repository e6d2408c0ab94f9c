"""Replicas over hosts, with the state in shards on the hosts of each: hosts die anywhere in a step."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.failpoints import FailPoint
from tests.jobs.compiled_programs import find_programs_after, wait_compiled_ahead
from tests.support.compile_cache import CACHE
from tests.support.paths import SCRIPTS
from tests.support.patience import patience, wait_until
from tests.support.patient_job import PatientJob
from tests.support.reference_runs import share_run
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, RECOVERY_S, TinyJob, read_logs

LOOP, TRAINER = SCRIPTS / "mesh_loop.py", SCRIPTS / "mesh_trainer.py"
HOSTS = 4
HOSTS_OF_REPLICA = 2
PLACES = (
    FailPoint.BEFORE_MICROBATCH,
    FailPoint.BEFORE_LIMITS,
    FailPoint.BEFORE_REDUCE,
    FailPoint.AFTER_REDUCE,
    FailPoint.BEFORE_COMMIT,
)


class MeshJob(TinyJob):
    """A job of `mesh_loop.py` or `mesh_trainer.py`."""

    def __init__(self, work: Path, script: Path, axes: str, words: Sequence[str], hosts: int = HOSTS) -> None:
        self.script = script
        super().__init__(
            work,
            hosts,
            CONFIG_WITHOUT_STANDBYS,
            words=[f"hosts={HOSTS_OF_REPLICA}", f"axes={axes}", *words],
            script=script,
        )

    def kill_at(self, place: FailPoint, victims: list[HostName]) -> None:
        """Kill hosts' workers where they are held, and wait until all hosts train again."""
        report = self.wait_training(self.hosts)
        assert report.generation is not None
        self.hold(place, victims)
        for host in victims:
            self.signal(JobComponent.WORKER, host, signal.SIGKILL)
        self.job.release()
        self.wait_training(self.hosts, after_generation=report.generation.number)

    def check_steps(self) -> None:
        """Compare each box of the state after each step with that of an undisturbed job of one replica."""
        rows = [row for rows in read_logs(self.work).values() for row in rows]
        total = max(row["step"] for row in rows) + 1
        assert {row["step"] for row in rows} == set(range(total))
        expected = run_undisturbed(self.script, self.words, total)
        for row in rows:
            for box, digest in row["digests"].items():
                assert digest == expected[row["step"]][box], (row["step"], box)
            assert row["bytes"] <= 1.05 * row["whole_bytes"] / HOSTS_OF_REPLICA or not row["bytes"], (
                "no host has all of it"
            )


def run_undisturbed(script: Path, words: tuple[str, ...], total: int) -> dict[int, dict[str, str]]:
    """Return the digest of each box after each step, of a job that has the hosts of one replica alone."""

    def run(folder: Path, steps: int) -> None:
        (folder / "stop").write_text(str(steps))
        command = [str(script), str(folder), *words, "pace=0"]
        options = ["--devices-per-host", "2"]
        with PatientJob(
            command, num_hosts=HOSTS_OF_REPLICA, run_directory=folder / "run", options=options
        ) as job:
            assert job.wait(patience(60)) == 0, job.read_tail()

    folder = share_run([script.name, *words], total, run)
    expected: dict[int, dict[str, str]] = {}
    for rows in read_logs(folder).values():
        for row in rows:
            expected.setdefault(row["step"], {}).update(row["digests"])
    return expected


def list_replicas(report: JobReport) -> list[list[HostName]]:
    """Return the hosts of each replica of a generation that has all hosts."""
    assert report.generation is not None
    hosts = [member.host for member in report.generation.membership.members]
    return [hosts[first : first + HOSTS_OF_REPLICA] for first in range(0, len(hosts), HOSTS_OF_REPLICA)]


@pytest.mark.parametrize(
    ("script", "axes", "words"),
    [
        pytest.param(LOOP, "fsdp:4", ["snapshots"], id="loop"),
        pytest.param(TRAINER, "fsdp:2/tensor:2", ["evaluate", "save", "freeze"], id="trainer"),
        pytest.param(TRAINER, "fsdp:2/expert:2", ["experts"], marks=pytest.mark.full, id="trainer, experts"),
        pytest.param(LOOP, "fsdp:2/tensor:2", ["general"], marks=pytest.mark.full, id="loop, general sums"),
        pytest.param(LOOP, "fsdp:1/tensor:4", [], marks=pytest.mark.full, id="loop, tensor"),
        pytest.param(TRAINER, "fsdp:4", [], marks=pytest.mark.full, id="trainer, fsdp"),
    ],
)
def test_hosts_of_replicas_on_several_hosts_die_anywhere_in_a_step(
    tmp_path: Path, script: Path, axes: str, words: list[str]
) -> None:
    with MeshJob(tmp_path, script, axes, words) as job:
        report = job.wait_training(HOSTS)
        broken = next(replica for replica in list_replicas(report) if report.leader not in replica)
        for place in PLACES:
            job.kill_at(place, broken[:1])
        job.kill_at(FailPoint.BEFORE_REDUCE, broken)
        events = job.job.read_events()
        changes = {event.detail["change"] for event in events if event.kind is EventKind.WORLD_FORMED}
        assert "shrink" in changes, "the others keep their world"
        assert all(event.kind is not EventKind.SNAPSHOT_RESTORED for event in events), (
            "each shard had a holder"
        )
        problems = {event.detail["problem"] for event in events if event.kind is EventKind.STEP_REHEARSED}
        # With sums by `accumulate_microbatches` it is not known what a replica runs, before it runs.
        assert problems == {""} or "general" in words, "hosts that came back had loaded their programs"
        job.finish(more_steps=6)


def test_the_only_replica_waits_for_its_host_whose_shards_are_decoded_from_parity(tmp_path: Path) -> None:
    """Nobody has set `min_hosts`: fewer hosts than the replica spans cannot train."""
    with MeshJob(tmp_path, LOOP, "fsdp:4", ["snapshots"], hosts=HOSTS_OF_REPLICA) as job:
        report = job.wait_training(HOSTS_OF_REPLICA)
        (replica,) = list_replicas(report)
        (victim,) = [host for host in replica if host != report.leader]
        job.kill_at(FailPoint.BEFORE_REDUCE, [victim])
        events = job.job.read_events()
        assert any(event.kind is EventKind.SNAPSHOT_RESTORED for event in events)
        job.finish(more_steps=4)


@pytest.mark.parametrize(
    ("script", "axes", "words", "place"),
    [
        pytest.param(LOOP, "fsdp:4", [], FailPoint.AFTER_REDUCE, id="loop"),
        pytest.param(
            TRAINER,
            "fsdp:2/tensor:2",
            ["evaluate", "save"],
            FailPoint.AFTER_ALL_REDUCE,
            id="trainer",
        ),
    ],
)
def test_a_host_that_was_stopped_before_the_update_finishes_the_step_that_others_have_committed(
    tmp_path: Path, script: Path, axes: str, words: list[str], place: FailPoint
) -> None:
    """Nobody has the new shards of its rank: its partner's dies, and in the step all microbatches are computed."""
    with MeshJob(tmp_path, script, axes, words) as job:
        report = job.wait_training(HOSTS)
        assert report.generation is not None
        number = report.generation.number
        same_rank = list(zip(*list_replicas(report), strict=True))[1]
        gone, behind = sorted(same_rank, key=lambda host: host == report.leader)
        step = job.hold(place, [gone, behind])
        wait_until("the others to commit", lambda: job.step() > step, RECOVERY_S)
        job.signal(JobComponent.WORKER, gone, signal.SIGKILL)
        # Not sooner: it would commit, too.
        job.job.wait_event(
            f"{behind} to know of it",
            lambda event: event.kind is EventKind.WORKER_OVERDUE and event.host == behind,
            RECOVERY_S,
        )
        job.job.release()
        job.wait_training(HOSTS, after_generation=number)
        events = job.job.read_events()
        repeated = [
            (event.host, event.detail["step"]) for event in events if event.kind is EventKind.STEP_REPEATED
        ]
        assert repeated == [(behind, step)]
        # A loop of one's own says it after the commit, with which the repetition ends; a trainer reports it before.
        said = sum(row["step"] == step for rows in read_logs(job.work).values() for row in rows)
        assert said == (HOSTS - 1 if script is TRAINER else HOSTS - 2)
        assert all(event.kind is not EventKind.SNAPSHOT_RESTORED for event in events)
        job.finish(more_steps=4)


@pytest.mark.full  # a third job, with the programs of all hosts compiled ahead
def test_after_the_loss_of_a_host_the_others_compile_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the one that is left over, which has nothing of the state then. Its early stopping is the others'."""
    for name in CACHE:  # what earlier jobs have compiled is not found
        monkeypatch.delenv(name, raising=False)
    with MeshJob(tmp_path, TRAINER, "fsdp:2/tensor:2", ["evaluate", "freeze"]) as job:
        report = job.wait_training(HOSTS)
        lost = next(replica for replica in list_replicas(report) if report.leader not in replica)[0]
        stay = [host for replica in list_replicas(report) for host in replica if host != lost]
        worlds = [f"reductions of 'train' over {HOSTS - 1} hosts", "state in shards on 1 replicas"]
        wait_compiled_ahead(job.job, stay, worlds, patience(60))
        job.kill_at(FailPoint.BEFORE_REDUCE, [lost])
        assert find_programs_after("shrink", job.job.read_events(), stay) == {
            host: [0, 0, 0] for host in stay
        }
        job.finish(more_steps=2)
