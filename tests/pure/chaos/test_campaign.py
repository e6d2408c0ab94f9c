"""Campaigns against jobs that do not end as expected, and faults that last until an event."""

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from resilient_jax.cluster.job_report import JobReport
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.local_job.observed_job import JobEnded, JobObserver, JobTimeout, ObservedJob
from resilient_jax.local_job.recovery import wait_training
from resilient_jax.protocol.generation import Generation, GenerationPhase, Member, Membership
from resilient_jax.protocol.host_status import AgentStatus, HostStatus, WorkerStatus
from resilient_jax.protocol.versions import Versions
from resilient_jax.protocol.worker_report import HeldState, TrainingProgress, WorkerReport, WorldPlace
from resilient_jax.telemetry.event_log import EventLog
from tests.chaos import leaks
from tests.chaos.active_faults import ActiveFaults
from tests.chaos.campaign import Campaign, CampaignResult
from tests.chaos.faults import ProcessStop
from tests.chaos.incident_injector import FOREIGN_STORE
from tests.chaos.injection import FaultEnvironment
from tests.chaos.invariants import Invariant
from tests.chaos.job_monitor import JobMonitor
from tests.chaos.ledgers import tail_ledger
from tests.chaos.manifest import (
    CampaignManifest,
    ChaosJob,
    ExpectedExit,
    FaultTarget,
    Incident,
    TargetPart,
    Trigger,
)
from tests.chaos.reference_run import ReferenceRun

HOST = HostName("host-0")
PATIENCE_S = 0.3
MANY = 10**9
LONG_S = 5.0
"""The longest life of a fake job, so that a test ends even if the campaign never gives up the job."""


def trained(step: int) -> JobReport:
    """Return the records of one host that trains and has finished `step` steps."""
    report = WorkerReport(
        generation=GenerationNumber(1), place=WorldPlace(has_finished_step=True), held=HeldState(step=step)
    )
    status = HostStatus(
        host=HOST,
        agent=AgentStatus(
            id="a", pid=0, address="", versions=Versions(python="", resilient_jax="", jax="", jaxlib="")
        ),
        worker=WorkerStatus(incarnation=Incarnation(1), pid=0, report=report),
        progress=TrainingProgress(step=step),
    )
    member = Member(host=HOST, incarnation=Incarnation(1), seat=Seat(0))
    generation = Generation(
        number=GenerationNumber(1), phase=GenerationPhase.ACTIVE, membership=Membership(members=(member,))
    )
    return JobReport(job="job", generation=generation, leader=HOST, hosts=(status,))


class FakeJob(ObservedJob):
    """A job that finishes a step at each report, and ends after `steps` steps, at the latest after `LONG_S`."""

    def __init__(
        self, run_directory: Path, steps: int, code: int, active_faults: ActiveFaults | None = None
    ) -> None:
        active_faults = active_faults or ActiveFaults()
        super().__init__(
            run_directory, JobObserver(on_events=active_faults.observe_events, report_interval_s=0.0)
        )
        self.process = SimpleNamespace(pid=0)
        self._steps = steps
        self._code = code
        self._done = 0
        self._end_s = LONG_S + time.monotonic()

    def exit_code(self) -> int | None:
        is_over = self._done >= self._steps or time.monotonic() > self._end_s
        return self._code if is_over else None

    def read_report(self) -> JobReport | None:
        if self.exit_code() is not None:
            return None
        self._done += 1
        return trained(self._done)

    def read_tail(self, lines: int = 60) -> str:
        return ""

    def find_processes(self) -> list[int]:
        return []


class FakeReference:
    """The reference run of a script that has no ledger."""

    def extend_to(self, steps: int) -> dict[int, object]:
        return {}


@pytest.fixture(autouse=True)
def no_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leaks, "SHARED_MEMORY", tmp_path / "none")


def run_campaign(
    manifest: CampaignManifest, folder: Path, *, steps: int, code: int, is_store_foreign: bool = False
) -> CampaignResult:
    """Return the result of a campaign against a job that ends after `steps` with exit code `code`."""
    active_faults = ActiveFaults()
    job = cast(LocalJob, FakeJob(folder, steps, code, active_faults))
    environment = FaultEnvironment(
        network=None,
        disk=None,
        checkpoint_root=folder,
        run_directory=folder,
        is_store_foreign=is_store_foreign,
    )
    reference = cast(ReferenceRun, FakeReference())
    ledger = tail_ledger(folder / "ledger")
    return Campaign(
        manifest, job, ledger, active_faults, reference, environment, folder / "stop", lambda text: None
    ).run()


def one_host(*, steps: int = 0, exit_code: int = 0) -> CampaignManifest:
    """Return a campaign of one host without incidents."""
    job, ending = ChaosJob(hosts=1, steps=steps), ExpectedExit(code=exit_code)
    return CampaignManifest(job=job, expected_exit=ending, recovery_timeout_s=PATIENCE_S)


def found_by(findings: CampaignResult) -> list[tuple[Invariant, str]]:
    return [(violation.invariant, violation.description) for violation in findings.violations]


def test_a_successful_exit_before_the_requested_step_is_a_violation(tmp_path: Path) -> None:
    found = found_by(run_campaign(one_host(), tmp_path, steps=1, code=0))
    assert found == [(Invariant.EXIT, "the job ended at step 1 before the campaign asked it to")]


def test_a_job_that_survives_its_expected_failure_is_a_violation(tmp_path: Path) -> None:
    found = found_by(run_campaign(one_host(exit_code=85), tmp_path, steps=MANY, code=85))
    assert found == [(Invariant.EXIT, f"the end of the job did not happen within {PATIENCE_S:g} s")]


def test_a_job_that_fails_as_expected_violates_nothing(tmp_path: Path) -> None:
    assert found_by(run_campaign(one_host(exit_code=85), tmp_path, steps=10, code=85)) == []


@pytest.mark.parametrize("steps", [0, 10])
def test_a_job_that_trains_beyond_its_last_step_is_a_violation(steps: int, tmp_path: Path) -> None:
    found = found_by(run_campaign(one_host(steps=steps), tmp_path, steps=MANY, code=0))
    assert [invariant for invariant, _ in found] == [Invariant.EXIT]
    assert "runs on" in found[0][1]


def test_a_store_that_others_may_use_is_not_broken(tmp_path: Path) -> None:
    """The fault would hit this process: a `FakeJob` has none of its own."""
    stop = Incident(
        trigger=Trigger(step=1), target=FaultTarget(part=TargetPart.STORE), fault=ProcessStop(duration_s=1.0)
    )
    manifest = msgspec.structs.replace(one_host(exit_code=85), incidents=(stop,))
    result = run_campaign(manifest, tmp_path, steps=10, code=85, is_store_foreign=True)
    assert [record.skip_reason for record in result.skipped] == [FOREIGN_STORE]


LASTS_UNTIL = str(EventKind.GENERATION_PHASE)


def wait_in_vain(folder: Path, active_faults: ActiveFaults) -> None:
    """Wait until the timeout for an event that is never recorded."""
    monitor = JobMonitor(FakeJob(folder, MANY, 0, active_faults), tail_ledger(folder))
    assert not monitor.try_wait_event(Trigger(event=EventKind.WORLD_FORMED), PATIENCE_S)


def test_a_fault_ends_at_an_event_recorded_just_before_a_wait_for_another_event(tmp_path: Path) -> None:
    ended: list[str] = []
    active_faults = ActiveFaults()
    active_faults.add(lambda: ended.append("it"), after_s=None, until=LASTS_UNTIL)
    with contextlib.closing(EventLog(tmp_path / "host-0.events.jsonl", HOST)) as log:
        log.record(EventKind.GENERATION_PHASE)
        wait_in_vain(tmp_path, active_faults)
    assert ended == ["it"]


def test_a_fault_ends_at_an_event_recorded_during_a_wait_for_another_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    active_faults = ActiveFaults()
    with contextlib.closing(EventLog(tmp_path / "host-0.events.jsonl", HOST)) as log:

        def record_event(_: float) -> None:
            if log.recent:
                return
            active_faults.add(lambda: ended.append("it"), after_s=None, until=LASTS_UNTIL)
            log.record(EventKind.GENERATION_PHASE)

        monkeypatch.setattr(time, "sleep", record_event)
        wait_in_vain(tmp_path, active_faults)
    assert ended == ["it"]


def test_a_wait_for_training_ends_after_the_requested_number_of_steps(tmp_path: Path) -> None:
    report = wait_training(FakeJob(tmp_path, MANY, 0), [HOST], num_steps=3, timeout_s=LONG_S)
    assert report.hosts[0].progress.step == 4


def test_a_wait_ends_at_its_timeout_or_at_the_end_of_the_job(tmp_path: Path) -> None:
    with pytest.raises(JobEnded, match="the job ended before step 5"):
        FakeJob(tmp_path, 2, 0).wait_report("step 5", lambda report: report.hosts[0].progress.step == 5)
    with pytest.raises(JobTimeout, match=f"nothing did not happen within {PATIENCE_S:g} s"):
        FakeJob(tmp_path, MANY, 0).wait_report("nothing", lambda report: False, PATIENCE_S)


def test_an_event_recorded_just_before_the_end_of_the_job_is_found(tmp_path: Path) -> None:
    with contextlib.closing(EventLog(tmp_path / "host-0.events.jsonl", HOST)) as log:
        log.record(EventKind.STEP_COMMITTED)
    found = FakeJob(tmp_path, 0, 0).wait_event("a step", lambda event: event.kind is EventKind.STEP_COMMITTED)
    assert found.host == HOST
