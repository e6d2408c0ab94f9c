"""A host that stays slow loses its place to a spare, or layers of a pipeline to its peers; no bit changes."""

from pathlib import Path

import pytest
from agents import wait_until
from pipelined_job import PipelinedJob
from tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, RECOVERY_S, TinyJob

from resilient_jax.chaos.cpu_quota import limit_cpu
from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.recovery_records import RecoveryAction

SLOW_SHARE = 0.2
"""Of a core. With more of it, the little that these jobs compute would fit into the quota; with less, a measurement of
the devices takes so long that the next one is a minute away."""
SLOWER_SHARE = 0.1
"""The same where a host has work for some 20 ms a step."""
ROWS = 4096
"""Of a microbatch: enough for that."""
LEARNED_STEPS = 66
"""Twenty steps to learn from, and the rest to be wrong about a healthy host."""
SLOW, SPARE = "host-1", "host-3"


def is_decision(action: RecoveryAction, event: Event) -> bool:
    return event.kind is EventKind.RECOVERY_DECIDED and event.detail["action"] == action


def is_divided_evenly_again(event: Event) -> bool:
    return is_decision(RecoveryAction.REDIVIDE, event) and "is slow" not in str(event.detail["reason"])


def list_members(report: JobReport) -> list[str]:
    assert report.generation is not None
    return [member.host for member in report.generation.members]


@pytest.mark.timeout(180)
def test_a_spare_takes_the_place_of_a_host_that_stays_slow(tmp_path: Path) -> None:
    options = (*ONE_DEVICE, "--spares", "1")
    with TinyJob(
        tmp_path, 3, CONFIG_WITHOUT_STANDBYS, options=options, words=["pace=0", f"rows={ROWS}"]
    ) as tiny:
        before = tiny.wait_training(3)
        assert before.generation is not None
        wait_until("steps to learn from", lambda: tiny.step() >= LEARNED_STEPS, RECOVERY_S)
        (pid,) = find_pids(tiny.read_report(), JobComponent.WORKER, SLOW)
        lift = limit_cpu(pid, SLOWER_SHARE)
        try:
            decided = tiny.job.wait_event(
                "that it is replaced", lambda e: is_decision(RecoveryAction.REPLACE, e), RECOVERY_S
            )
            after = tiny.wait_training(3, before.generation.number)
        finally:
            lift()
        assert f"{SLOW} is slow (" in str(decided.detail["reason"])
        assert sorted(list_members(after)) == ["host-0", "host-2", SPARE]
        assert after.generation is not None
        assert after.generation.step == after.generation.boundary_step, "no step was broken off"
        quarantined = [e for e in tiny.job.read_events() if e.kind is EventKind.HOST_QUARANTINED]
        assert [e.detail["quarantined"] for e in quarantined] == [SLOW]
        tiny.finish()


@pytest.mark.timeout(600)
def test_a_slow_stage_loses_layers_and_gets_them_back_when_it_is_sound(tmp_path: Path) -> None:
    with PipelinedJob(tmp_path, 2, 2, words=["pace=0"]) as job:
        before = job.wait_training(2)
        assert before.generation is not None
        job.job.wait_for("steps to learn from", lambda: job.step() >= LEARNED_STEPS or None, job.patience_s)
        (pid,) = find_pids(job.read_report(), JobComponent.WORKER, SLOW)
        lift = limit_cpu(pid, SLOW_SHARE)
        try:
            decided = job.job.wait_event(
                "fewer layers", lambda e: is_decision(RecoveryAction.REDIVIDE, e), job.patience_s
            )
            after = job.wait_training(2, before.generation.number)
        finally:
            lift()
        assert f"{SLOW} is slow (" in str(decided.detail["reason"])
        assert after.generation is not None
        assert [host for host, _ in after.generation.slowness.speeds] == [SLOW]
        # Measured while it was slow, its devices took long; the next time is when that was a hundredth of the time.
        job.job.wait_event("layers as before", is_divided_evenly_again, job.patience_s)
        healthy = job.wait_training(2, after.generation.number)
        assert healthy.generation is not None
        assert healthy.generation.slowness.speeds == ()
        formed = [
            e for e in job.job.read_events() if e.kind is EventKind.PIPELINE_FORMED and e.host == "host-0"
        ]
        cuts = [str(e.detail["cut"]) for e in formed]
        assert cuts[0] == "host-0 0-2 -> host-1 3-5"
        assert cuts[1] in ("host-0 0-3 -> host-1 4-5", "host-0 0-4 -> host-1 5-5")
        assert cuts[2:] == cuts[:1]
        kinds = [e.kind for e in job.job.read_events()]
        assert kinds.count(EventKind.PIPELINE_STATE_KEPT) == 4, "blocks came from memory"
        assert EventKind.SNAPSHOT_RESTORED not in kinds
        job.finish()
