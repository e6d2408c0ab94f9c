"""A campaign against jobs that do not end as they should, and faults that last until an event comes."""

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from resilient_jax.chaos import campaign as campaign_module
from resilient_jax.chaos import job_monitor as watch_module
from resilient_jax.chaos.active_faults import ActiveFaults
from resilient_jax.chaos.campaign import Campaign, CampaignResult
from resilient_jax.chaos.injection import FaultEnvironment
from resilient_jax.chaos.invariants import Invariant
from resilient_jax.chaos.job_monitor import JobMonitor
from resilient_jax.chaos.log_tail import tail_events, tail_ledger
from resilient_jax.chaos.manifest import CampaignManifest, ChaosJob, ExpectedExit, Trigger
from resilient_jax.chaos.reference_run import ReferenceRun
from resilient_jax.cluster.job_report import JobReport
from resilient_jax.cluster.local_job import LocalJob
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, ProcessIndex
from resilient_jax.protocol.records import (
    Generation,
    GenerationPhase,
    HostStatus,
    Member,
    Versions,
    WorkerReport,
    WorkerStatus,
)
from resilient_jax.telemetry.event_log import EventLog

HOST = HostName("host-0")
PATIENCE_S = 0.3
MANY = 10**9
LONG_S = 5.0
"""After that long a job that should have been given up ends by itself, so that the test does."""


def trained(step: int) -> JobReport:
    """One host that trains and has done so many steps."""
    report = WorkerReport(generation=GenerationNumber(1), has_finished_step=True, step=step)
    status = HostStatus(
        host=HOST,
        agent_id="a",
        agent_pid=0,
        address="",
        versions=Versions(python="", resilient_jax="", jax="", jaxlib=""),
        worker=WorkerStatus(incarnation=Incarnation(1), pid=0, report=report),
        step=step,
    )
    member = Member(host=HOST, incarnation=Incarnation(1), process_index=ProcessIndex(0))
    generation = Generation(number=GenerationNumber(1), phase=GenerationPhase.ACTIVE, members=(member,))
    return JobReport(job="job", generation=generation, leader=HOST, hosts=(status,))


class FakeJob:
    """Trains a step at each look, and ends after `steps` of them, or at last when nobody should look any more."""

    def __init__(self, run_directory: Path, steps: int, code: int) -> None:
        self.run_directory = run_directory
        self.process = SimpleNamespace(poll=self._poll, returncode=code)
        self.launcher_pid = 0
        self._steps = steps
        self._done = 0
        self._end_s = time.monotonic() + LONG_S

    def _poll(self) -> int | None:
        is_over = self._done >= self._steps or time.monotonic() > self._end_s
        return self.process.returncode if is_over else None

    def read_report(self) -> JobReport:
        self._done += 1
        return trained(self._done)

    def read_tail(self, lines: int) -> str:
        return ""

    def find_processes(self) -> list[int]:
        return []


class FakeReference:
    """Of a script that has no ledger."""

    def extend_to(self, steps: int) -> dict[int, object]:
        return {}


@pytest.fixture(autouse=True)
def alone_and_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(campaign_module, "list_shared_segments", frozenset)


def live(manifest: CampaignManifest, folder: Path, *, steps: int, code: int) -> CampaignResult:
    """What a campaign finds about a job that ends after `steps` with exit code `code`."""
    job = cast(LocalJob, FakeJob(folder, steps, code))
    lifetimes = ActiveFaults()
    watch = JobMonitor(job, tail_events(folder), tail_ledger(folder / "ledger"), lifetimes)
    around = FaultEnvironment(network=None, disk=None, checkpoint_root=folder)
    reference = cast(ReferenceRun, FakeReference())
    return Campaign(manifest, watch, lifetimes, reference, around, folder / "end", lambda text: None).run()


def one_host(*, steps: int = 0, exit_code: int = 0) -> CampaignManifest:
    """A campaign in which nothing is broken."""
    job, ending = ChaosJob(hosts=1, steps=steps), ExpectedExit(code=exit_code)
    return CampaignManifest(job=job, expected_exit=ending, recovery_timeout_s=PATIENCE_S)


def found_by(findings: CampaignResult) -> list[tuple[Invariant, str]]:
    return [(violation.invariant, violation.description) for violation in findings.violations]


def test_a_job_that_ends_well_before_it_was_told_to_is_found(tmp_path: Path) -> None:
    found = found_by(live(one_host(), tmp_path, steps=1, code=0))
    assert found == [(Invariant.EXIT, "ended by itself at step 1 before it was told to")]


def test_a_job_that_survives_what_should_end_it_is_given_up(tmp_path: Path) -> None:
    found = found_by(live(one_host(exit_code=85), tmp_path, steps=MANY, code=85))
    assert found == [(Invariant.EXIT, f"the end of the job did not happen within {PATIENCE_S:g} s")]


def test_a_job_that_fails_as_it_should_is_well(tmp_path: Path) -> None:
    assert found_by(live(one_host(exit_code=85), tmp_path, steps=10, code=85)) == []


@pytest.mark.parametrize("steps", [0, 10])
def test_a_job_that_trains_on_beyond_its_last_step_is_given_up(steps: int, tmp_path: Path) -> None:
    found = found_by(live(one_host(steps=steps), tmp_path, steps=MANY, code=0))
    assert [invariant for invariant, _ in found] == [Invariant.EXIT]
    assert "trains on" in found[0][1]


LASTS_UNTIL = str(EventKind.GENERATION_PHASE)


def wait_in_vain(folder: Path, lifetimes: ActiveFaults) -> None:
    """For an event that does not come."""
    watch = JobMonitor(
        cast(LocalJob, FakeJob(folder, MANY, 0)), tail_events(folder), tail_ledger(folder), lifetimes
    )
    assert not watch.try_wait_event(Trigger(event=EventKind.WORLD_FORMED), PATIENCE_S)


def test_a_fault_ends_with_an_event_that_comes_just_before_another_one_is_waited_for(tmp_path: Path) -> None:
    ended: list[str] = []
    lifetimes = ActiveFaults()
    lifetimes.add(lambda: ended.append("it"), after_s=None, until=LASTS_UNTIL)
    with contextlib.closing(EventLog(tmp_path / "host-0.events.jsonl", HOST)) as log:
        log.record(EventKind.GENERATION_PHASE)
        wait_in_vain(tmp_path, lifetimes)
    assert ended == ["it"]


def test_a_fault_ends_with_an_event_that_comes_while_another_one_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    lifetimes = ActiveFaults()
    with contextlib.closing(EventLog(tmp_path / "host-0.events.jsonl", HOST)) as log:

        def tell(_: float) -> None:
            if log.recent:
                return
            lifetimes.add(lambda: ended.append("it"), after_s=None, until=LASTS_UNTIL)
            log.record(EventKind.GENERATION_PHASE)

        monkeypatch.setattr(time, "sleep", tell)
        wait_in_vain(tmp_path, lifetimes)
    assert ended == ["it"]
