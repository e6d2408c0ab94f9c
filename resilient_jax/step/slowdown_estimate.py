"""What slow hosts cost a job whose hosts all have the same work, and what it would be without them. Pure.

    step = microbatches, shared by speed or evenly, until the last host is done; then the reduction

A host whose microbatches are slow costs less than its speed, as others take over its share; one with a slow link costs
all of what the reduction takes longer, for no share gives that back.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.pipeline_schedule.makespan import estimate_finish_s
from resilient_jax.policy.devices_after_loss import (
    DeviceChoice,
    DevicesAfterLoss,
    choose_devices_to_leave_out,
    explain_all_devices,
)
from resilient_jax.protocol.slow_hosts import Slowdown
from resilient_jax.protocol.step_timing import StepTiming

CAUSED_BY_HOST: Final = frozenset(
    {FindingKind.COMPUTE, FindingKind.MEMORY, FindingKind.INPUT, FindingKind.LINK}
)
"""Kinds of slowness that a host has by itself. Others may be the script's, which any host in its place would run."""
LeaveOut = Callable[[Finding], DeviceChoice | str]
"""Returns which slow devices a host does without, and its speed then as a fraction of that with all; or why none."""
PredictSpeed = Callable[[HostName, float], float]
"""Returns the speed of a job, as a fraction of that with all hosts sound, with a sound host in the place of one. That
host has a share of the usual speed: 1, less with fewer devices, or 0 if no host takes the place."""


def estimate_slowdown(
    generation: GenerationNumber,
    hosts: Sequence[HostName],
    findings: Sequence[Finding],
    timings: Sequence[Sequence[StepTiming]],
    num_microbatches: int,
    *,
    is_balanced: bool,
    after_loss: DevicesAfterLoss = "even",
) -> Slowdown | None:
    """Return what slow hosts cost; None: no host's own fault is known, or no sound host has told what its steps take.

    Args:
        generation: number of the generation that the steps were made in.
        hosts: in order of their indexes.
        findings: the hosts that are slow; one each.
        timings: what the last steps took, by host.
        num_microbatches: the number in each step.
        is_balanced: whether microbatches are shared by speed.
        after_loss: what a host does with the devices that are left when others are taken out.
    """
    slow = {HostName(finding.host): finding for finding in findings}
    candidates = [slow[host] for host in hosts if host in slow and slow[host].kind in CAUSED_BY_HOST]
    measured = {host: _compute_microbatch_s(told) for host, told in zip(hosts, timings, strict=True)}
    sound = [seconds for host, seconds in measured.items() if host not in slow and seconds > 0]
    if not candidates or not sound:
        return None
    usual_s = statistics.median(sound)
    reduction_s = _compute_reduction_s(timings)

    def predict_s(still_slow: Mapping[HostName, Finding], shares: Mapping[HostName, float]) -> float:
        """Return the seconds of a step; some hosts are slow, or have a share of the usual speed; 0: they are gone."""
        present = [host for host in hosts if shares.get(host, 1.0)]
        seconds = [
            max(measured[host] or usual_s * still_slow[host].factor, usual_s)
            if host in still_slow and still_slow[host].kind is not FindingKind.LINK
            else usual_s / shares.get(host, 1.0)
            for host in present
        ]
        speeds = [1 / one for one in seconds]
        # Not by speed they are shared by the number of devices.
        shared_by = speeds if is_balanced else [shares.get(host, 1.0) for host in present]
        finish_s = estimate_finish_s(num_microbatches, shared_by, speeds)
        return finish_s + _scale_reduction_s(reduction_s, slow, still_slow)

    def predict_speed(host: HostName, share: float) -> float:
        still_slow = {name: finding for name, finding in slow.items() if name != host}
        return full_s / predict_s(still_slow, {host: share})

    def leave_out(found: Finding) -> DeviceChoice | str:
        choice = choose_devices_to_leave_out(found.device_speeds, found.slow_devices, after_loss)
        return choice or explain_all_devices(found.slow_devices, after_loss)

    full_s = predict_s({}, {})
    slowdown = Slowdown(generation=generation, kept=full_s / predict_s(slow, {}))
    return compare_actions(slowdown, candidates, predict_speed, leave_out, has_spare=len(hosts) > 1)


def compare_actions(
    slowdown: Slowdown,
    candidates: Sequence[Finding],
    predict_speed: PredictSpeed,
    leave_out: LeaveOut,
    *,
    has_spare: bool,
) -> Slowdown:
    """Return a slowdown with its slowest host, and the speed of the job after each action about that host.

    Args:
        slowdown: what slow hosts cost if nothing is done.
        candidates: what was found about hosts that may be the slowest; of equal ones the first is.
        has_spare: whether the job can go on with one host less.
    """
    found = max(candidates, key=lambda one: predict_speed(HostName(one.host), 1.0))
    host, choice = HostName(found.host), leave_out(found)
    out, why = (found.slow_devices, choice) if isinstance(choice, str) else (choice.out, "")
    return msgspec.structs.replace(
        slowdown,
        host=host,
        replaced=predict_speed(host, 1.0),
        without=predict_speed(host, 0.0) if has_spare else 0.0,
        devices=out,
        slow_devices=found.slow_devices,
        fewer_devices=0.0 if isinstance(choice, str) else predict_speed(host, choice.speed),
        why_all_devices=why,
    )


def _compute_microbatch_s(told: Sequence[StepTiming]) -> float:
    """Return what a microbatch takes on a host; 0: it has computed none."""
    works = [work for timing in told for work in timing.works if work.microbatches]
    return statistics.median(work.seconds / work.microbatches for work in works) if works else 0.0


def _compute_reduction_s(timings: Sequence[Sequence[StepTiming]]) -> float:
    """Return what reductions take after the last host has come to them; 0: not known."""
    waits = [
        min(found)
        for step in zip(*timings, strict=False)
        if (found := [timing.wait_s for timing in step if timing.wait_s > 0])
    ]
    return statistics.median(waits) if waits else 0.0


def _scale_reduction_s(
    measured_s: float, slow: Mapping[HostName, Finding], still_slow: Mapping[HostName, Finding]
) -> float:
    """Return what a reduction takes if only `still_slow` links are slow; the slowest one sets its time."""
    now, then = (
        max((one.factor for one in found.values() if one.kind is FindingKind.LINK), default=1.0)
        for found in (slow, still_slow)
    )
    return measured_s * then / now
