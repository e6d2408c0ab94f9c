"""The planned axes of a job at a change of members: what it would make, and the axes that follow. Pure.

Each worker could choose the axes by itself. The leader does, because it knows what a change takes, and when the lost
hosts are expected back; every worker obeys the record.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Final

import msgspec

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.plan_records import PlanAxes, PlanChange, PlanConstants, PlanOutlook
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryDecision

AXES_ACTIONS: Final = frozenset(
    {RecoveryAction.SHRINK, RecoveryAction.JOIN, RecoveryAction.REPLACE, RecoveryAction.REFORM}
)
"""The actions that lead to the best axes for the hosts that train then."""


def find_plan_change(
    kept: Collection[HostStatus], joiners: Collection[HostStatus]
) -> tuple[PlanOutlook, PlanChange] | None:
    """Return what workers have estimated of a change to these hosts; None: not known.

    It is a change from all that were in the newest generation that a member has entered, however some were lost. A host
    that joins is in the place of one of its group.
    """
    joining = {status.host for status in joiners}
    present = joining.union(status.host for status in kept)
    if any(status.devices.num_used for status in joiners):  # fewer than its own
        return None
    return _find_latest(
        (plans, change)
        for plans in _list_outlooks(kept)
        if not present.difference(*plans.groups, *plans.absent) and joining.isdisjoint(plans.incomplete)
        for change in _list_changes(plans, present)
    )


def _list_changes(plans: PlanOutlook, present: Collection[HostName]) -> Iterator[PlanChange]:
    """Yield what is estimated of the change to these hosts, which are of the groups of an estimate."""
    numbers = [len(group) for group in plans.groups]
    then = [sum(host in present for host in (*here, *away)) for here, away in _pair_groups(plans)]
    lost = [max(number - left, 0) for number, left in zip(numbers, then, strict=True)]
    joined = [max(left - number, 0) for number, left in zip(numbers, then, strict=True)]
    if any(lost) and any(joined):
        return  # hosts in the places of others that were not like them
    changed, changes = (joined, plans.joins) if any(joined) else (lost, plans.losses)
    groups = tuple(index for index, number in enumerate(changed) for _ in range(number))
    yield from (change for change in changes if change.groups == groups)


def _pair_groups(plans: PlanOutlook) -> Iterator[tuple[tuple[HostName, ...], tuple[HostName, ...]]]:
    """Yield the hosts of each group that are in the generation, and those that are not."""
    return itertools.zip_longest(plans.groups, plans.absent, fillvalue=())


def list_lost(plans: PlanOutlook, kept: Collection[HostStatus]) -> list[HostName]:
    """Return the hosts of an estimate that are not left."""
    left = {status.host for status in kept}
    return [host for group in plans.groups for host in group if host not in left]


def _list_outlooks(members: Collection[HostStatus]) -> list[PlanOutlook]:
    """Return what members report of the newest generation that any of them has entered."""
    reports = [status.worker.report for status in members if status.worker is not None]
    newest = max((report.entered for report in reports), default=0)
    return [
        report.findings.plans
        for report in reports
        if report.findings.plans is not None and report.findings.plans.generation == newest
    ]


def _find_latest(
    found: Iterable[tuple[PlanOutlook, PlanChange]],
) -> tuple[PlanOutlook, PlanChange] | None:
    # Of workers whose programs are not equally ready the latest one counts, because all wait for it.
    return max(found, key=lambda one: one[1].prepare_s, default=None)


def note_axes(
    before: Generation, decision: RecoveryDecision, outlook: PlanOutlook, change: PlanChange
) -> RecoveryDecision:
    """Return the decision about a change of the present generation with the axes of the next one."""
    if decision.action is RecoveryAction.KEEP_AXES:
        return msgspec.structs.replace(decision, plan_axes=outlook.axes)
    if decision.action not in AXES_ACTIONS:
        return decision
    axes = _find_next_axes(before, outlook, change)
    is_new = axes != outlook.axes
    # In a new world programs of no axes are ready: its pause has that in it.
    is_slower = is_new and decision.action is not RecoveryAction.REFORM
    return msgspec.structs.replace(
        decision,
        plan_axes=axes,
        has_new_axes=is_new,
        prepare_s=change.prepare_s if is_slower else 0.0,
    )


def list_axes(
    before: Generation,
    decision: RecoveryDecision | None,
    kept: Collection[HostStatus],
    joiners: Collection[HostStatus],
) -> PlanAxes:
    """Return the axes of the next generation; empty: those of the best plan for its hosts, whichever these are."""
    if decision is not None and decision.plan_axes and find_decided_number(decision) == before.number:
        members = {*(member.host for member in before.membership.members), *decision.joining}
        # Until the boundary others may have come or gone.
        if not decision.joining or members == {status.host for status in (*kept, *joiners)}:
            return decision.plan_axes
    # Of a change that was decided for another reason, such as a notice, or the end of axes that were kept.
    change = find_plan_change(kept, joiners)
    return _find_next_axes(before, *change) if change is not None else ()


def _find_next_axes(before: Generation, outlook: PlanOutlook, change: PlanChange) -> PlanAxes:
    # The same hosts keep their axes: nobody has weighed what others cost. But not those that were kept until now.
    was_kept = _find_kept_in(before) in (before.number, before.number - 1)
    return change.best_axes if change.groups or was_kept else outlook.axes


def find_constants(before: Generation, kept: Collection[HostStatus]) -> PlanConstants:
    """Return the constants of the cost model by which the next generation plans: those fitted to the most plans."""
    found = max(_list_outlooks(kept), key=lambda outlook: outlook.num_measured, default=None)
    return found.fitted if found is not None and found.fitted else before.shape.plan_constants


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
    decision = generation.record.decision
    if decision is None or decision.action is not RecoveryAction.KEEP_AXES:
        return None
    return find_decided_number(decision)
