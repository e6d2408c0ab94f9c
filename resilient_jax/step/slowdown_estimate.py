"""What slow hosts cost a job whose hosts all have the same work, and what it would be without them. Pure.

    step = microbatches, shared by speed or evenly, until the last host is done; then the reduction

A host whose microbatches are slow costs less than its speed, as others take over its share; one with a slow link costs
all of what the reduction takes longer, for no share gives that back.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.slow_hosts import Slowdown
from resilient_jax.protocol.step_timing import StepTiming
from resilient_jax.step.quotas import apportion_microbatches

CAUSED_BY_HOST: Final = frozenset(
    {FindingKind.COMPUTE, FindingKind.MEMORY, FindingKind.INPUT, FindingKind.LINK}
)
"""What is slow of a host itself. What else there is may be the script, which any host in its place would run."""


def estimate_slowdown(
    generation: GenerationNumber,
    hosts: Sequence[HostName],
    findings: Sequence[Finding],
    timings: Sequence[Sequence[StepTiming]],
    num_microbatches: int,
    *,
    is_balanced: bool,
) -> Slowdown | None:
    """Return what slow hosts cost; None: no host's own fault is known, or no sound host has told what its steps take.

    Args:
        generation: in which the steps were.
        hosts: in order of their indexes.
        findings: the hosts that are slow; one each.
        timings: of the last steps, by host.
        num_microbatches: of a step.
        is_balanced: whether they are shared by speed.
    """
    slow = {HostName(finding.host): finding for finding in findings}
    candidates = [host for host in hosts if host in slow and slow[host].kind in CAUSED_BY_HOST]
    measured = {host: _find_microbatch_s(told) for host, told in zip(hosts, timings, strict=True)}
    sound = [seconds for host, seconds in measured.items() if host not in slow and seconds > 0]
    if not candidates or not sound:
        return None
    usual_s = statistics.median(sound)
    waits = [
        min(found)
        for step in zip(*timings, strict=False)
        if (found := [timing.wait_s for timing in step if timing.wait_s > 0])
    ]
    reduction_s = statistics.median(waits) if waits else 0.0

    def predict_s(present: Sequence[HostName], still_slow: Mapping[HostName, Finding]) -> float:
        """Return the seconds of a step of these hosts, some of which are slow."""
        seconds = [
            max(measured[host] or usual_s * still_slow[host].factor, usual_s)
            if host in still_slow and still_slow[host].kind is not FindingKind.LINK
            else usual_s
            for host in present
        ]
        return _find_finish_s(num_microbatches, seconds, is_balanced=is_balanced) + _find_reduction_s(
            reduction_s, slow, still_slow
        )

    full_s, kept_s = predict_s(hosts, {}), predict_s(hosts, slow)
    replaced_s = {
        host: predict_s(hosts, {name: finding for name, finding in slow.items() if name != host})
        for host in candidates
    }
    slowest = min(candidates, key=lambda host: replaced_s[host])
    others = [host for host in hosts if host != slowest]
    left = {name: finding for name, finding in slow.items() if name != slowest}
    return Slowdown(
        generation=generation,
        host=slowest,
        kept=full_s / kept_s,
        replaced=full_s / replaced_s[slowest],
        without=full_s / predict_s(others, left) if others else 0.0,
    )


def _find_microbatch_s(told: Sequence[StepTiming]) -> float:
    """Return what a microbatch takes on a host; 0: it has computed none."""
    works = [work for timing in told for work in timing.works if work.microbatches]
    return statistics.median(work.seconds / work.microbatches for work in works) if works else 0.0


def _find_finish_s(num_microbatches: int, seconds: Sequence[float], *, is_balanced: bool) -> float:
    """Return when the last host is done, from the seconds that a microbatch takes on each."""
    speeds = [1 / one if is_balanced else 1.0 for one in seconds]
    shares = apportion_microbatches(num_microbatches, speeds)
    return max(share * one for share, one in zip(shares, seconds, strict=True))


def _find_reduction_s(
    measured_s: float, slow: Mapping[HostName, Finding], still_slow: Mapping[HostName, Finding]
) -> float:
    """Return what a reduction takes if only `still_slow` links are slow; the slowest one sets its time."""
    now, then = (
        max((one.factor for one in found.values() if one.kind is FindingKind.LINK), default=1.0)
        for found in (slow, still_slow)
    )
    return measured_s * then / now
