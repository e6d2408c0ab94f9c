"""The planned axes of a job at a change of members: what losses would make, and the axes that follow. Pure.

Each worker could choose the axes by itself. The leader does, because it knows what a change takes, and when the lost
hosts are expected back; every worker obeys the record.
"""

from collections.abc import Collection

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.protocol.plan_records import PlanAxes, PlanLoss, PlanOutlook
from resilient_jax.protocol.records import Generation, HostStatus
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryDecision


def find_plan_loss(
    kept: Collection[HostStatus], joiners: Collection[HostStatus]
) -> tuple[PlanOutlook, PlanLoss] | None:
    """Return what workers have estimated of the loss of the hosts that are gone; None: not known.

    These are all that were in the newest generation that a member has entered, however they were lost. Of two workers
    whose programs are not equally ready the later one counts, because all wait for it.

    Args:
        kept: the members that are left.
        joiners: hosts that join in this change.
    """
    if joiners:
        return None
    reports = [status.worker.report for status in kept if status.worker is not None]
    newest = max((report.entered for report in reports), default=0)
    left = {status.host for status in kept}
    found = [
        (plans, loss)
        for plans in (report.plans for report in reports)
        if plans is not None and plans.generation == newest
        for loss in plans.losses
        if loss.groups == _list_lost_groups(plans, left)
    ]
    return max(found, key=lambda one: one[1].prepare_s, default=None)


def _list_lost_groups(plans: PlanOutlook, left: Collection[HostName]) -> tuple[int, ...]:
    """Return the groups of the hosts that are gone, one for each; none if others than estimated are left."""
    if not set(left) <= {host for group in plans.groups for host in group}:
        return ()
    return tuple(index for index, group in enumerate(plans.groups) for host in group if host not in left)


def note_axes(decision: RecoveryDecision, outlook: PlanOutlook, loss: PlanLoss) -> RecoveryDecision:
    """Return the decision after a loss with the axes of the generation that it leads to."""
    if decision.action is RecoveryAction.KEEP_AXES:
        return msgspec.structs.replace(decision, plan_axes=outlook.axes)
    if decision.action is not RecoveryAction.SHRINK:
        return decision
    is_new = loss.best_axes != outlook.axes
    return msgspec.structs.replace(
        decision,
        plan_axes=loss.best_axes,
        has_new_axes=is_new,
        prepare_s=loss.prepare_s if is_new else 0.0,
    )


def list_axes(decision: RecoveryDecision | None, formed: Generation) -> PlanAxes:
    """Return the axes of the next generation; empty: those of the best plan for its hosts, whichever these are.

    Args:
        decision: the last one.
        formed: the next generation.
    """
    return decision.plan_axes if decision is not None and decision.number == formed.number else ()


def keeps_axes(generation: Generation) -> bool:
    """Return whether the generation has the axes from before the loss that it began with, which are not the best."""
    return _find_kept_in(generation) == generation.number


def gives_up_axes(generation: Generation) -> bool:
    """Return whether a planned change, of which this is the record, ends the axes that were kept until then."""
    return _find_kept_in(generation) == generation.number - 1


def _find_kept_in(generation: Generation) -> int | None:
    """Return the number of the generation that the last decision kept axes for; None: it did something else."""
    decision = generation.decision
    return decision.number if decision is not None and decision.action is RecoveryAction.KEEP_AXES else None
