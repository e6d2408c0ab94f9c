"""Stages of a pipeline that are kept though their hosts are away: meanwhile their replicas compute nothing. Pure.

The generation has the hosts of all replicas in their order, absent ones too, and every worker divides the model by it.
The other hosts of such a replica stay holders of their blocks. So nothing moves but the blocks of a host that is back.
"""

from collections.abc import Collection, Iterable
from typing import Final

from resilient_jax.ids import HostName
from resilient_jax.membership.facts import MembershipState, list_live_workers
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryDecision
from resilient_jax.protocol.state_records import StageLoss, StatePart, UnitKind

MAX_GROUPS: Final = 8
"""Of hosts that are noted as long as no member has said in which order they are: that takes one step."""


def find_stage_loss(kept: Collection[HostStatus], joiners: Collection[HostStatus]) -> StageLoss | None:
    """Return what a loss makes of a pipeline, as its first members have estimated it; None: not known.

    Of many hosts at once it is known by their number alone. With hosts that take their places the model is cut anew in
    any case.
    """
    parts = _list_newest_parts(kept)
    outlook = next((part.outlook for part in parts if part.outlook is not None), None)
    left = {status.host for status in kept}
    if outlook is None or joiners or not outlook.hosts.issuperset(left):
        return None
    lost = outlook.hosts - left
    if not lost:
        return None
    losses = next((part.losses for part in parts if part.losses), ())
    exact = next((one for one in losses if set(one.hosts) == lost), None)
    return exact or outlook.estimate(lost)


def list_order(generation: Generation, kept: Collection[HostStatus]) -> tuple[HostName, ...]:
    """Return the hosts of all replicas in their order, as before the loss; empty: no member that is left says it."""
    reported = (part.order for part in _list_newest_parts(kept) if part.order)
    return generation.shape.stage_hosts or next(reported, ())


def list_groups(state: MembershipState) -> tuple[tuple[HostName, ...], ...]:
    """Return the hosts of replicas up to the generation that ends, oldest first; none where members have no blocks.

    Args:
        state: has the members as they were when the generation formed, unless that has been noted.
    """
    generation = state.generation
    # In one that is aborted while it forms, blocks have not moved yet.
    if generation.phase in (GenerationPhase.QUIESCE, GenerationPhase.FORM):
        return generation.shape.earlier_stage_hosts
    parts = [worker.report.held.part for worker in list_live_workers(state)]
    has_blocks = any(part is not None and part.kind is UnitKind.BLOCKS for part in parts)
    if not has_blocks and not generation.shape.earlier_stage_hosts:
        return ()
    hosts = generation.shape.stage_hosts or tuple(member.host for member in generation.membership.members)
    return (*generation.shape.earlier_stage_hosts, hosts)[-MAX_GROUPS:]


def note_stage_hosts(
    state: MembershipState,
    formed: Generation,
    decision: RecoveryDecision | None,
    kept: Collection[HostStatus],
) -> Generation:
    """Return the next generation with the order of the hosts of replicas, or with those from which it follows.

    Args:
        state: has the generation that ends.
    """
    stage_hosts = _list_stage_hosts(state.generation, formed, decision)
    order = list_order(state.generation, kept)
    earlier = () if stage_hosts else (order,) if order else list_groups(state)
    return change_fields(formed, stage_hosts=stage_hosts, earlier_stage_hosts=earlier)


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
    members = {member.host for member in formed.membership.members}
    return before.shape.stage_hosts if members == set(before.shape.stage_hosts) else ()


def list_absent(generation: Generation) -> tuple[HostName, ...]:
    """Return the hosts whose stages are kept."""
    return tuple(
        host for host in generation.shape.stage_hosts if generation.membership.find_member(host) is None
    )


def _list_newest_parts(kept: Iterable[HostStatus]) -> list[StatePart]:
    """Return the parts of members that are of the newest generation which any of them trained in."""
    parts: list[StatePart] = [
        status.worker.report.held.part
        for status in kept
        if status.worker is not None and status.worker.report.held.part is not None
    ]
    newest = max((part.generation for part in parts), default=0)
    return [part for part in parts if part.generation == newest]
