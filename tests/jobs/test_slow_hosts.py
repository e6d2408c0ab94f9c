"""A host that stays slow loses its place to a spare, or layers of a pipeline to its peers; no bit changes."""

from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.failpoints import ANY_STEP, FailPoint, FailPointOrder, SlowDeviceAction
from resilient_jax.protocol.recovery_records import RecoveryAction
from tests.chaos.cpu_quota import limit_cpu
from tests.jobs.unequal_pipeline import UnequalPipelinedJob
from tests.support.patience import wait_until
from tests.support.pipelined_job import PipelinedJob
from tests.support.tiny_job import (
    CONFIG_WITHOUT_STANDBYS,
    EACH_DEVICE,
    ONE_DEVICE,
    RECOVERY_S,
    TinyJob,
    act_on_slow_hosts,
    is_training,
)

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
DEVICE_FACTOR, QUARANTINE_S = 25.0, 25
"""How slow a device is, and how long its host does without it."""
STAGE_FACTOR, STAGE_LEARNED_STEPS = 4.0, 34
"""The same of a stage's device: all of what its host does in a step takes so long, one or two seconds. A busy machine
measures less. With one device of two the host has half of its speed, so 3 was too near to that."""

CONFIG = act_on_slow_hosts(CONFIG_WITHOUT_STANDBYS)


def slow_down(device: int, factor: float) -> FailPointOrder:
    """Return the order that makes a device of the host so many times slower."""
    return FailPointOrder(
        failpoint=FailPoint.ON_DEVICE,
        step=ANY_STEP,
        hosts=(SLOW,),
        index=device,
        action=SlowDeviceAction(factor=factor),
    )


def is_decision(action: RecoveryAction, event: Event) -> bool:
    return event.kind is EventKind.RECOVERY_DECIDED and event.detail["action"] == action


def has_devices(event: Event, devices: str) -> bool:
    return event.kind is EventKind.DEVICES_CHANGED and event.detail["devices"] == devices


def trains_on_all(report: JobReport) -> bool:
    return all(not status.devices.describe() for status in report.hosts)


def list_members(report: JobReport) -> list[str]:
    assert report.generation is not None
    return [member.host for member in report.generation.membership.members]


def test_a_spare_takes_the_place_of_a_host_that_stays_slow(tmp_path: Path) -> None:
    options = (*ONE_DEVICE, "--spares", "1")
    with TinyJob(tmp_path, 3, CONFIG, options=options, words=["pace=0", f"rows={ROWS}"]) as tiny:
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
        assert after.generation.state.step == after.generation.planned.boundary_step, "no step was aborted"
        quarantined = [e for e in tiny.job.read_events() if e.kind is EventKind.HOST_QUARANTINED]
        assert [e.detail["quarantined"] for e in quarantined] == [SLOW]
        tiny.finish(more_steps=20)  # without pauses


@pytest.mark.full
def test_a_host_goes_on_without_its_slow_device_until_that_is_sound_again(tmp_path: Path) -> None:
    # Not of two: XLA compiles other programs for a process with a single device.
    options = ("--devices-per-host", "3")
    config = f'{CONFIG}devices_after_loss = "all"\nquarantine_s = {QUARANTINE_S}\n'
    words = [EACH_DEVICE, "pace=0", f"rows={ROWS}"]
    with TinyJob(tmp_path, 2, config, options=options, words=words) as tiny:
        before = tiny.wait_training(2)
        assert before.generation is not None
        wait_until("steps to learn from", lambda: tiny.step() >= LEARNED_STEPS, RECOVERY_S)
        tiny.job.failpoints.set_order(slow_down(1, DEVICE_FACTOR))
        decided = tiny.job.wait_event(
            "fewer devices", lambda e: is_decision(RecoveryAction.FEWER_DEVICES, e), RECOVERY_S
        )
        assert f"{SLOW} is slow (" in str(decided.detail["reason"])
        assert "because of its device 1" in str(decided.detail["reason"])
        tiny.job.wait_event("a worker without it", lambda e: has_devices(e, "0, 2"), RECOVERY_S)
        tiny.wait_training(2, before.generation.number)
        tiny.job.failpoints.release()
        tiny.job.wait_event("a worker with all", lambda e: has_devices(e, "0, 1, 2"), RECOVERY_S)
        tiny.wait_report("all devices", lambda r: trains_on_all(r) and is_training(r, 2))
        tiny.finish(more_steps=20)  # without pauses
        kinds = [event.kind for event in tiny.job.read_events()]
        assert EventKind.HOST_QUARANTINED not in kinds, "the host stays a member"
        assert kinds.count(EventKind.DEVICE_QUARANTINED) == 1


@pytest.mark.full
def test_a_stage_goes_on_without_its_slow_device_until_that_is_sound_again(tmp_path: Path) -> None:
    config = f'{CONFIG}devices_after_loss = "all"\nquarantine_s = {QUARANTINE_S}\n'
    with UnequalPipelinedJob(tmp_path, 2, 1, axes={"fsdp": 2}, words=["pace=0"], config=config) as job:
        before = job.wait_training(2)
        assert before.generation is not None
        job.job.wait_for(
            "steps to learn from", lambda: job.step() >= STAGE_LEARNED_STEPS or None, job.patience_s
        )
        job.job.failpoints.set_order(slow_down(1, STAGE_FACTOR))
        decided = job.job.wait_event(
            "fewer devices", lambda e: is_decision(RecoveryAction.FEWER_DEVICES, e), job.patience_s
        )
        assert f"{SLOW} is slow (" in str(decided.detail["reason"])
        assert "because of its device 1" in str(decided.detail["reason"])
        job.job.wait_event(
            "a stage of one device",
            lambda e: e.kind is EventKind.PIPELINE_FORMED and "(1 of 2 devices)" in str(e.detail["cut"]),
            job.patience_s,
        )
        job.wait_training(2, before.generation.number)
        job.job.failpoints.release()
        job.job.wait_event("a worker with all", lambda e: has_devices(e, "0, 1"), job.patience_s)
        job.job.wait_event(
            "a stage of both devices",
            lambda e: (
                e.kind is EventKind.PIPELINE_FORMED
                and (e.generation or 0) > (decided.generation or 0) + 1
                and "devices)" not in str(e.detail["cut"])
            ),
            job.patience_s,
        )
        job.finish()


@pytest.mark.full
def test_a_slow_stage_loses_layers(tmp_path: Path) -> None:
    with PipelinedJob(tmp_path, 2, 2, words=["pace=0"], config=CONFIG) as job:
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
        assert [host for host, _ in after.generation.record.slowness.speeds] == [SLOW]
        formed = [
            e for e in job.job.read_events() if e.kind is EventKind.PIPELINE_FORMED and e.host == "host-0"
        ]
        cuts = [str(e.detail["cut"]) for e in formed]
        assert cuts[0] == "host-0 0-2 -> host-1 3-5"
        assert cuts[1] in ("host-0 0-3 -> host-1 4-5", "host-0 0-4 -> host-1 5-5")
        assert not cuts[2:]
        kept = [e for e in job.job.read_events() if e.kind is EventKind.PIPELINE_STATE_KEPT]
        assert len(kept) == 2, "blocks came from memory"
        assert [int(e.detail["received"]) for e in kept] == [0, 0], "nothing moved in the pause"
        assert [e.host for e in kept if int(e.detail["copied"]) > 0] == ["host-0"]
        kinds = [e.kind for e in job.job.read_events()]
        assert EventKind.SNAPSHOT_RESTORED not in kinds
        job.finish()
