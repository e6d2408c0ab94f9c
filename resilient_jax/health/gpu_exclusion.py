"""When a host is taken out of its job because of a GPU, why, and whether its worker is ended. Pure."""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from resilient_jax.health.gpu_health import GpuFinding, GpuSeverity

SAME_FAULT_S: Final = 30.0
"""What follows a failure so closely belongs to it: the next reading has what an XID said. Later it is another one."""
RENEWAL_S: Final = 10.0
"""A quarantine is written again so long before its end where its reason still stands: longer than between readings."""


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """That a host takes no part.

    Attributes:
        reason: text for people.
        since_s: monotonic time of the decision; distinguishes one exclusion from the next.
        until_s: monotonic time at which the quarantine ends.
        ends_worker: whether what the worker computes is lost or cannot be trusted.
    """

    reason: str = ""
    since_s: float = -math.inf
    until_s: float = -math.inf
    ends_worker: bool = False


NO_EXCLUSION: Final = Exclusion()


def judge_exclusion(
    last: Exclusion,
    new: Sequence[GpuFinding],
    unfit: Sequence[GpuFinding],
    *,
    now_s: float,
    quarantine_s: float,
) -> Exclusion:
    """Return the exclusion that follows from a reading or an XID; `last`, itself, if nothing does.

    Args:
        last: the last exclusion, which may be over, or may have been ended by a person meanwhile.
        new: findings that were not there before.
        unfit: findings of the last readings because of which a GPU must not train.
        now_s: monotonic time.
    """
    failures = [finding for finding in new if finding.severity >= GpuSeverity.UNFIT]
    ends_worker = any(finding.severity is GpuSeverity.FAILED for finding in failures)
    is_another = bool(failures) and now_s >= last.since_s + SAME_FAULT_S
    still_stands = bool(unfit) and now_s >= last.until_s - RENEWAL_S
    if is_another or still_stands:
        why = [*failures, *unfit][0].why
        return Exclusion(reason=why, since_s=now_s, until_s=now_s + quarantine_s, ends_worker=ends_worker)
    if ends_worker and not last.ends_worker:
        return msgspec.structs.replace(last, ends_worker=True)
    return last
