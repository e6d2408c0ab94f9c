"""The planned axes of a job at a change of members: what a loss would make, and the axes that follow. Pure.

Each worker could choose the axes by itself. The leader does, because it knows what a change takes, and when the lost
host is expected back; every worker obeys the record.
"""

from collections.abc import Collection

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.protocol.plan_records import PlanAxes, PlanLoss, PlanOutlook
from resilient_jax.protocol.records import Generation, HostStatus
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryDecision


def find_plan_loss(
    kept: Collection[HostStatus], joiners: Collection[HostStatus], lost: Collection[HostName]
) -> tuple[PlanOutlook, PlanLoss] | None:
    """Return what workers have estimated of the loss of a host; None: not known, as of several hosts at once.

    Of two workers whose programs are not equally ready the later one counts, because all wait for it.

    Args:
        kept: the members that are left.
        joiners: hosts that join in this change.
        lost: the members that were lost in this change.
    """
    if len(lost) != 1 or joiners:
        return None
    (host,) = lost
    reports = [status.worker.report for status in kept if status.worker is not None]
    newest = max((report.entered for report in reports), default=0)
    found = [
        (plans, loss)
        for plans in (report.plans for report in reports)
        if plans is not None and (plans.generation, plans.num_hosts) == (newest, len(kept) + 1)
        for loss in plans.losses
        if host in loss.hosts
    ]
    return max(found, key=lambda one: one[1].prepare_s, default=None)


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
