"""Stages of a pipeline that are kept for hosts which are away: meanwhile their replicas compute nothing. Pure.

The generation has the hosts of all replicas in their order, absent ones too, and every worker divides the model by it.
The other hosts of such a replica stay holders of their blocks. So nothing moves but the blocks of a host that is back.
"""

from collections.abc import Collection, Iterable

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.protocol.records import Generation, HostStatus
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryDecision
from resilient_jax.protocol.state_records import StageLoss, StatePart


def find_stage_loss(
    kept: Collection[HostStatus], joiners: Collection[HostStatus], awaited: Collection[HostName]
) -> StageLoss | None:
    """Return what the loss of a host makes of a pipeline, as its first members have estimated it; None: not known.

    Of several hosts at once it is not. With hosts that take their places the model is cut anew in any case.

    Args:
        kept: the members that are left.
        joiners: hosts that join in this change.
        awaited: the hosts that are expected back.
    """
    losses = _find_losses(kept)
    lost = [one for one in losses if one.host not in {status.host for status in kept}]
    is_one = len(lost) == 1 and len(losses) == len(kept) + 1
    return lost[0] if is_one and not joiners and lost[0].host in awaited else None


def list_order(generation: Generation, kept: Collection[HostStatus]) -> tuple[HostName, ...]:
    """Return the hosts of all replicas in their order, as before the loss."""
    return generation.stage_hosts or tuple(one.host for one in _find_losses(kept))


def note_stage_hosts(
    before: Generation, formed: Generation, decision: RecoveryDecision | None, kept: Collection[HostStatus]
) -> Generation:
    """Return the next generation with the order of the hosts of replicas, or with that from which it follows.

    Args:
        before: the generation that ends.
        formed: the next one.
        decision: about the change.
        kept: the members that are left.
    """
    stage_hosts = _list_stage_hosts(before, formed, decision)
    earlier = () if stage_hosts else list_order(before, kept)
    return msgspec.structs.replace(formed, stage_hosts=stage_hosts, earlier_stage_hosts=earlier)


def _list_stage_hosts(
    before: Generation, formed: Generation, decision: RecoveryDecision | None
) -> tuple[HostName, ...]:
    """Return the hosts of all replicas in their order, with those whose stages are kept; empty: the members.

    Until another host joins, the order stays when all are back, so that no more blocks move than must.
    """
    if decision is not None and (decision.action, decision.number) == (
        RecoveryAction.KEEP_STAGES,
        formed.number,
    ):
        return decision.stage_hosts
    members = {member.host for member in formed.members}
    return before.stage_hosts if members == set(before.stage_hosts) else ()


def list_absent(generation: Generation) -> tuple[HostName, ...]:
    """Return the hosts for which stages are kept."""
    return tuple(host for host in generation.stage_hosts if generation.find_member(host) is None)


def _find_losses(kept: Iterable[HostStatus]) -> tuple[StageLoss, ...]:
    """Return what members report of possible losses in the generation that they trained in last."""
    parts: list[StatePart] = [
        status.worker.report.part
        for status in kept
        if status.worker is not None and status.worker.report.part is not None
    ]
    newest = max((part.generation for part in parts), default=0)
    return next((part.losses for part in parts if part.losses and part.generation == newest), ())
