"""Confirms the suspicion that a host or a link is slow by a measurement of all hosts' devices or links."""

import math
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.health.link_comparison import Pairs, find_slow_link
from resilient_jax.health.work_series import SHIFT

UNCONFIRMED_LIMIT: Final = 2
"""After so many measurements in a row that find its devices sound, a host that is still slow is reported as `OTHER`.
The first may have come after a busy moment."""

WHOLE_INPUT_SHARE: Final = 0.9
"""Of the additional time: then waits for data explain all of it, whatever a measurement on a busy machine shows."""
MIN_LINK_RATIO: Final = 1.5
"""What else is sent over links makes them vary more than devices do."""


class DeviceRatios(msgspec.Struct, frozen=True):
    """What the devices of a host take, over the median of its peers at the same time.

    Attributes:
        compute: ratio of a matrix product.
        memory: ratio of a pass over memory.
        disk: ratio of a read of the input's files; None: this host or its peers have none on a disk.
    """

    compute: float
    memory: float
    disk: float | None = None


def compare_devices(
    host: int, compute_s: Sequence[float], memory_s: Sequence[float], disk_s: Sequence[float]
) -> DeviceRatios:
    """Return what the devices of one host take over those of the others.

    Args:
        host: index of the host.
        compute_s: seconds of a matrix product, by host.
        memory_s: seconds of a pass over memory, by host.
        disk_s: seconds of a read of the input's files, by host; 0: the host has none.
    """
    compute, memory, disk = (
        seconds[host] / usual
        if (usual := statistics.median([*seconds[:host], *seconds[host + 1 :]]))
        else 0.0
        for seconds in (compute_s, memory_s, disk_s)
    )
    return DeviceRatios(compute, memory, disk or None)


def confirm_finding(finding: Finding, ratios: DeviceRatios, num_unconfirmed: int) -> Finding | None:
    """Return the finding, of the kind that the measurement shows; None: devices are sound, so it is measured once more.

    Args:
        finding: finding about a host, from the host's steps.
        num_unconfirmed: measurements in a row before this one that have shown nothing.
    """
    limit = _find_limit(finding)
    # A slow processor would slow down the microbatches themselves, too.
    is_input_alone = finding.kind is FindingKind.INPUT and finding.input_share >= WHOLE_INPUT_SHARE
    if ratios.compute > limit and not is_input_alone:
        kind = FindingKind.COMPUTE
    elif finding.kind is FindingKind.INPUT:
        kind = FindingKind.INPUT
    elif ratios.memory > limit:
        kind = FindingKind.MEMORY
    elif num_unconfirmed + 1 >= UNCONFIRMED_LIMIT:
        kind = FindingKind.OTHER
    else:
        return None
    measured = (
        f"a matrix product takes {ratios.compute:.2f} times and a pass over memory {ratios.memory:.2f} times what the "
        "median of its peers takes at the same time"
    )
    if kind is FindingKind.INPUT and ratios.disk is not None:
        measured += f"; a read of its input's files, past the page cache, takes {ratios.disk:.2f} times"
    return msgspec.structs.replace(finding, kind=kind, evidence=f"{finding.evidence}; {measured}")


def name_slow_devices(
    finding: Finding, compute_speeds: Sequence[float], memory_speeds: Sequence[float]
) -> Finding:
    """Return a confirmed finding with the devices of its host that are slower than its other ones, if any are.

    Args:
        finding: finding about a host whose devices were measured.
        compute_speeds: speed of each device by its number, in a matrix product, as a part of the speed of the host's
            fastest device; 0: the host does not use the device.
        memory_speeds: speeds in a pass over memory, as `compute_speeds`.
    """
    if finding.kind not in (FindingKind.COMPUTE, FindingKind.MEMORY):
        return finding
    speeds = compute_speeds if finding.kind is FindingKind.COMPUTE else memory_speeds
    known = tuple((number, round(speed, 3)) for number, speed in enumerate(speeds) if speed > 0)
    slow = tuple(number for number, speed in known if speed * _find_limit(finding) < 1)
    if not slow:
        return finding
    measured = ", ".join(f"device {number} has {speed:.2f}" for number, speed in known if number in slow)
    return msgspec.structs.replace(
        finding,
        device_speeds=known,
        slow_devices=slow,
        evidence=f"{finding.evidence}; of the speed of its fastest device its {measured}",
    )


def is_confirmed_still(finding: Finding, ratios: DeviceRatios) -> bool:
    """Return whether devices alone say that a host that was found slow still is, whatever its work is now.

    Args:
        finding: finding about a host, which a measurement has confirmed.
        ratios: ratios of the host's devices now.
    """
    return max(ratios.compute, ratios.memory) > _find_limit(finding)


def confirm_link(
    finding: Finding,
    hosts: Sequence[str],
    rounds: Sequence[Pairs],
    seconds: Sequence[Sequence[float]],
    before: Sequence[Sequence[float]],
) -> Finding | None:
    """Return the finding about links as one about the host whose link is slow; None: all links are alike, or unknown.

    Args:
        finding: finding about links, from reductions.
        hosts: names of hosts, by index.
        rounds: rounds of the measurement, as `pair_hosts` returned them.
        seconds: seconds of an exchange, by host and round.
        before: the least seconds of an exchange before, by host and round.
    """
    slow = find_slow_link(rounds, seconds, before, max(MIN_LINK_RATIO, _find_limit(finding)))
    if slow is None:
        return None
    peers = "each of its peers" if slow.peer is None else hosts[slow.peer]
    measured = (
        f"an exchange of {hosts[slow.host]} with {peers} takes {slow.ratio:.1f} times as long as before, other pairs "
        f"{slow.usual:.1f} times ({slow.seconds:.3g} s instead of {slow.before_s:.3g} s)"
    )
    return msgspec.structs.replace(finding, host=hosts[slow.host], evidence=f"{finding.evidence}; {measured}")


def _find_limit(finding: Finding) -> float:
    """Return above which ratio a measurement confirms a finding."""
    # Nearer to what was found than to "as fast as its peers": hosts of one job may differ a little all the time.
    return max(SHIFT, math.sqrt(finding.factor))
