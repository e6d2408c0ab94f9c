"""The planned axes of a job at a change of members: what it would make, and the axes that follow. Pure.

Each worker could choose the axes by itself. The leader does, because it knows what a change takes, and when the lost
hosts are expected back; every worker obeys the record.
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.plan_records import PlanAxes, PlanChange, PlanOutlook
from resilient_jax.protocol.records import Generation, HostStatus
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryDecision


def find_plan_loss(
    kept: Collection[HostStatus], joiners: Collection[HostStatus]
) -> tuple[PlanOutlook, PlanChange] | None:
    """Return what workers have estimated of the loss of the hosts that are gone; None: not known.

    These are all that were in the newest generation that a member has entered, however they were lost.

    Args:
        kept: the members that are left.
        joiners: hosts that join in this change.
    """
    if joiners:
        return None
    left = {status.host for status in kept}
    return _find_latest(
        (plans, loss)
        for plans in _list_outlooks(kept)
        if not left.difference(*plans.groups)
        for loss in plans.losses
        if loss.groups == _list_groups(plans.groups, list_lost(plans, kept))
    )


def list_lost(plans: PlanOutlook, kept: Collection[HostStatus]) -> list[HostName]:
    """Return the hosts of an estimate that are not left."""
    left = {status.host for status in kept}
    return [host for group in plans.groups for host in group if host not in left]


def find_plan_join(
    members: Collection[HostStatus], joining: Collection[HostStatus]
) -> tuple[PlanOutlook, PlanChange] | None:
    """Return what members have estimated of the join of these hosts; None: not known.

    Args:
        members: that train, and all stay.
        joining: hosts that are ready. Of one with fewer devices than its own it is not known.
    """
    present, added = {status.host for status in members}, {status.host for status in joining}
    if any(status.devices for status in joining):
        return None
    return _find_latest(
        (plans, join)
        for plans in _list_outlooks(members)
        if present == set().union(*plans.groups) and not added.difference(*plans.absent)
        for join in plans.joins
        if join.groups == _list_groups(plans.absent, added)
    )


def _list_outlooks(members: Collection[HostStatus]) -> list[PlanOutlook]:
    """Return what members report of the newest generation that any of them has entered."""
    reports = [status.worker.report for status in members if status.worker is not None]
    newest = max((report.entered for report in reports), default=0)
    return [
        report.plans for report in reports if report.plans is not None and report.plans.generation == newest
    ]


def _list_groups(groups: Sequence[Collection[HostName]], hosts: Collection[HostName]) -> tuple[int, ...]:
    """Return the groups of these hosts, one for each."""
    return tuple(index for index, group in enumerate(groups) for host in group if host in hosts)


def _find_latest(
    found: Iterable[tuple[PlanOutlook, PlanChange]],
) -> tuple[PlanOutlook, PlanChange] | None:
    # Of workers whose programs are not equally ready the latest one counts, because all wait for it.
    return max(found, key=lambda one: one[1].prepare_s, default=None)


def note_axes(decision: RecoveryDecision, outlook: PlanOutlook, change: PlanChange) -> RecoveryDecision:
    """Return the decision about a change with the axes of the generation that it leads to."""
    if decision.action is RecoveryAction.KEEP_AXES:
        return msgspec.structs.replace(decision, plan_axes=outlook.axes)
    if decision.action not in (RecoveryAction.SHRINK, RecoveryAction.JOIN, RecoveryAction.REFORM):
        return decision
    is_new = change.best_axes != outlook.axes
    # In a new world programs of no axes are ready: its pause has that in it.
    is_slower = is_new and decision.action is not RecoveryAction.REFORM
    return msgspec.structs.replace(
        decision,
        plan_axes=change.best_axes,
        has_new_axes=is_new,
        prepare_s=change.prepare_s if is_slower else 0.0,
    )


def list_axes(before: Generation, decision: RecoveryDecision | None, formed: Generation) -> PlanAxes:
    """Return the axes of the next generation; empty: those of the best plan for its hosts, whichever these are.

    Args:
        before: the present generation.
        decision: the last one.
        formed: the next generation.
    """
    if decision is None or find_decided_number(decision) != formed.number:
        return ()
    hosts = {member.host for member in formed.members}
    # Until the boundary others may have come or gone.
    is_as_decided = hosts == {*(member.host for member in before.members), *decision.joining}
    return decision.plan_axes if is_as_decided or not decision.joining else ()


def find_decided_number(decision: RecoveryDecision) -> GenerationNumber:
    """Return the number of the generation that a choice leads to, if it is carried out."""
    # Hosts that join do in the next one; after a loss the number has changed before the choice.
    return GenerationNumber(decision.number + bool(decision.joining))


def keeps_axes(generation: Generation) -> bool:
    """Return whether the generation has the axes from before the change that it began with, which are not the best."""
    return _find_kept_in(generation) == generation.number


def gives_up_axes(generation: Generation) -> bool:
    """Return whether a planned change, of which this is the record, ends the axes that were kept until then."""
    return _find_kept_in(generation) == generation.number - 1


def _find_kept_in(generation: Generation) -> int | None:
    """Return the number of the generation that the last decision kept axes for; None: it did something else."""
    decision = generation.decision
    if decision is None or decision.action is not RecoveryAction.KEEP_AXES:
        return None
    return find_decided_number(decision)
