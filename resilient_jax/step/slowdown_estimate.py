"""What slow hosts cost a job whose hosts all have the same work, and what it would be without them. Pure.

    step = microbatches, shared by speed or evenly, until the last host is done; then the reduction

A host whose microbatches are slow costs less than its speed, as others take over its share; one with a slow link costs
all of what the reduction takes longer, for no share gives that back.
"""

import statistics
import types
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
NO_SHARES: Final[Mapping[HostName, float]] = types.MappingProxyType({})


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
    candidates = [host for host in hosts if host in slow and slow[host].kind in CAUSED_BY_HOST]
    measured = {host: _compute_microbatch_s(told) for host, told in zip(hosts, timings, strict=True)}
    sound = [seconds for host, seconds in measured.items() if host not in slow and seconds > 0]
    if not candidates or not sound:
        return None
    usual_s = statistics.median(sound)
    reduction_s = _compute_reduction_s(timings)

    def predict_s(
        present: Sequence[HostName],
        still_slow: Mapping[HostName, Finding],
        shares: Mapping[HostName, float] = NO_SHARES,
    ) -> float:
        """Return the seconds of a step of these hosts; some are slow, or have a share of the usual speed."""
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

    full_s, kept_s = predict_s(hosts, {}), predict_s(hosts, slow)
    replaced_s = {host: predict_s(hosts, _leave_out(slow, host)) for host in candidates}
    slowest = min(candidates, key=lambda host: replaced_s[host])
    others = [host for host in hosts if host != slowest]
    left = _leave_out(slow, slowest)
    slowdown = Slowdown(
        generation=generation,
        host=slowest,
        kept=full_s / kept_s,
        replaced=full_s / replaced_s[slowest],
        without=full_s / predict_s(others, left) if others else 0.0,
    )
    found = slow[slowest]
    choice = choose_devices_to_leave_out(found.device_speeds, found.slow_devices, after_loss)
    return add_fewer_devices(
        slowdown,
        found,
        choice or explain_all_devices(found.slow_devices, after_loss),
        lambda share: full_s / predict_s(hosts, left, {slowest: share}),
    )


def _leave_out(slow: Mapping[HostName, Finding], host: HostName) -> dict[HostName, Finding]:
    return {name: finding for name, finding in slow.items() if name != host}


def add_fewer_devices(
    slowdown: Slowdown,
    found: Finding,
    choice: DeviceChoice | str,
    predict_speed: Callable[[float], float],
) -> Slowdown:
    """Return what slow hosts cost, with the speed of the job without slow devices of the slowest host.

    Args:
        slowdown: what they cost if no device is left out.
        found: what was found about the slowest host.
        choice: devices that the slowest host does without; or why it keeps all of them.
        predict_speed: gives the speed of the job if the host has this part of its usual speed.
    """
    slow_devices = found.slow_devices
    slowdown = msgspec.structs.replace(slowdown, devices=slow_devices, slow_devices=slow_devices)
    if isinstance(choice, str):
        return msgspec.structs.replace(slowdown, why_all_devices=choice)
    return msgspec.structs.replace(slowdown, devices=choice.out, fewer_devices=predict_speed(choice.speed))


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
