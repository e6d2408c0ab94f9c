"""Confirms the suspicion that a host is slow by a measurement of all hosts' devices."""

import math
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.health.work_series import SHIFT

UNCONFIRMED_LIMIT: Final = 2
"""After so many measurements in a row that find its devices sound, a host that is still slow is reported as `OTHER`.
The first may have come after a busy moment."""


class DeviceRatios(msgspec.Struct, frozen=True):
    """What the devices of a host take, over the median of its peers at the same time.

    Attributes:
        compute: for a matrix product.
        memory: for a pass over memory.
    """

    compute: float
    memory: float


def compare_devices(host: int, compute_s: Sequence[float], memory_s: Sequence[float]) -> DeviceRatios:
    """Return what the devices of one host take over those of the others.

    Args:
        host: its index.
        compute_s: seconds of a matrix product, by host.
        memory_s: seconds of a pass over memory, by host.
    """
    compute, memory = (
        seconds[host] / statistics.median([*seconds[:host], *seconds[host + 1 :]])
        for seconds in (compute_s, memory_s)
    )
    return DeviceRatios(compute, memory)


def confirm_finding(finding: Finding, ratios: DeviceRatios, num_unconfirmed: int) -> Finding | None:
    """Return the finding, of the kind that the measurement shows; None: devices are sound, so it is measured once more.

    Args:
        finding: about a host, from its steps.
        ratios: of its devices.
        num_unconfirmed: how many measurements in a row have shown nothing before this one.
    """
    limit = _find_limit(finding)
    if ratios.compute > limit:
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
    return msgspec.structs.replace(finding, kind=kind, evidence=f"{finding.evidence}; {measured}")


def is_confirmed_still(finding: Finding, ratios: DeviceRatios) -> bool:
    """Return whether devices alone say that a host that was found slow still is, whatever its work is now.

    Args:
        finding: about a host, which a measurement has confirmed.
        ratios: of its devices, now.
    """
    return max(ratios.compute, ratios.memory) > _find_limit(finding)


def _find_limit(finding: Finding) -> float:
    """Return above which ratio devices confirm a finding."""
    # Nearer to what was found than to "as fast as its peers": hosts of one job may differ a little all the time.
    return max(SHIFT, math.sqrt(finding.factor))
