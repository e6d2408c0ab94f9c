"""The options that a job has at a change of members, with their prices. Pure.

Each option is a course of pauses and speeds until the next failure (`recovery_score`). Some exclude each other by the
rules: hosts that can go on in place never form a new world, and no older state is taken while there is a newer one.
Such an option is listed with its score, and with the reason why it is not possible.

Hosts are counted by their devices (`host_shares`): one that works with half of them is half a host.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from resilient_jax.ids import HostName
from resilient_jax.membership.failure_forecast import estimate_rate
from resilient_jax.membership.return_groups import ExpectedReturn, ReturnGroup, group_returns, list_phases
from resilient_jax.membership.stage_prices import find_stage_break_even_s, price_copied, price_cut, price_kept
from resilient_jax.planning.recovery_score import Phase, score_phases
from resilient_jax.protocol.plan_records import PlanChange
from resilient_jax.protocol.recovery_records import JobHistory, RecoveryAction, RecoveryOption, TimedChange
from resilient_jax.protocol.state_records import StageLoss

PRIOR_S: Final[Mapping[TimedChange, float]] = {
    TimedChange.SHRINK: 0.2,
    TimedChange.KEEP_STAGES: 0.2,
    TimedChange.NEW_AXES: 0.6,
    TimedChange.GROW: 0.6,
    TimedChange.REFORM: 3.0,
    TimedChange.REFORM_COLD: 8.0,
    TimedChange.RESTORE: 3.0,
    TimedChange.RETURN: 5.0,
    TimedChange.REDIVIDE: 0.6,
}
"""Seconds until a job has measured its own: docs/benchmarks.md, the stalls of a small model on 4 hosts of one machine.
A large model and a GPU need more; the first change of each kind corrects that."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The members are idle after a loss, and know who is left.

    Attributes:
        places: the hosts that the job has at most.
        ready: the hosts that can go on now.
        num_seated: ready hosts that were no members before.
        num_cold: seated hosts that have loaded no programs, for which all would wait in a new world.
        cold_join_because: why cold hosts cannot prepare in a seat of the new world and join then; empty if they can.
        num_lost: hosts lost at one moment, counted as they were before.
        awaited: the hosts that are expected back, the soonest first.
        new_world_because: why the ready hosts cannot go on in their world; empty if they can.
        can_join_in_place: whether hosts that come later will have seats in the world of the ready ones.
        needs_restore: whether no host has the newest state, only a snapshot or a checkpoint.
        may_wait: whether the job may wait; the rules allow it once in a change.
        stage: what the loss makes of a pipeline; None: unknown.
        plan: what the loss makes of planned axes; None: unknown.
        has_new_axes: whether the best axes for the hosts that are left are others than the job has.
        stage_return_s: until the one host of `stage` is expected to be ready, in seconds; None: that host is not
            awaited, or there are several lost hosts, whose stages are kept until their blocks are copied.
    """

    places: float
    ready: float
    num_seated: float = 0
    num_cold: float = 0
    cold_join_because: str = ""
    num_lost: float = 1
    awaited: tuple[ExpectedReturn, ...] = ()
    new_world_because: str = ""
    can_join_in_place: bool = True
    needs_restore: bool = False
    may_wait: bool = True
    stage: StageLoss | None = None
    plan: PlanChange | None = None
    has_new_axes: bool = False
    stage_return_s: float | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether those that are ready can go on in their world."""
        return not self.new_world_because


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Hosts are ready to join while others train.

    Attributes:
        places: hosts that the job has at most.
        training: the hosts that train.
        awaited: the other hosts that are expected back, the soonest first.
        new_world_because: why the ready hosts cannot join in place; empty if they can.
        is_last_copy: whether the next loss may be that of the state.
        has_stage: whether the stage of a ready host was kept for it.
        before: what was chosen for the same hosts before; None: nothing was.
        plan: what the change makes of planned axes; None: unknown.
        has_new_axes: whether the best axes with the hosts that join are others than the job has.
    """

    places: float
    training: float
    joining: float
    awaited: tuple[ExpectedReturn, ...] = ()
    new_world_because: str = ""
    is_last_copy: bool = False
    has_stage: bool = False
    before: RecoveryAction | None = None
    plan: PlanChange | None = None
    has_new_axes: bool = False

    @property
    def can_join_in_place(self) -> bool:
        """Whether those that are ready have taken seats of the world in which the others train."""
        return not self.new_world_because


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the options of a job cost.

    Attributes:
        seconds: seconds by change: the job's own measurement, or the prior.
        joiner_losses: how often hosts that join now are expected to be lost, or to leave, until the next failure.
    """

    seconds: Mapping[TimedChange, float]
    next_failure_s: float
    joiner_losses: float = 0.0


def price_job(history: JobHistory, hosts: Collection[HostName], joining: Collection[HostName] = ()) -> Prices:
    """Return the prices for a job, from its history.

    Args:
        hosts: hosts that train from the change on, those that join included.
    """
    measured = {time.change: time.typical_s for time in history.times}
    next_failure_s = 1 / estimate_rate(history, hosts)
    return Prices(
        seconds={change: measured.get(change, prior_s) for change, prior_s in PRIOR_S.items()},
        next_failure_s=next_failure_s,
        joiner_losses=next_failure_s * estimate_rate(history, joining, with_notices=True) if joining else 0.0,
    )


CHANGE_OF: Final[Mapping[RecoveryAction, TimedChange]] = {
    RecoveryAction.SHRINK: TimedChange.SHRINK,
    RecoveryAction.KEEP_AXES: TimedChange.SHRINK,
    RecoveryAction.REPLACE: TimedChange.GROW,
    RecoveryAction.REFORM: TimedChange.REFORM,
    RecoveryAction.REFORM_COLD: TimedChange.REFORM_COLD,
    RecoveryAction.RESTORE: TimedChange.RESTORE,
}


def find_usual(loss: Loss) -> RecoveryAction:
    """Return how the hosts that are ready go on, as the rules have it."""
    if loss.needs_restore:
        return RecoveryAction.RESTORE
    if not loss.is_in_place:
        must_wait = loss.num_cold and loss.cold_join_because
        return RecoveryAction.REFORM_COLD if must_wait else RecoveryAction.REFORM
    return RecoveryAction.REPLACE if loss.num_seated else RecoveryAction.SHRINK


def price_after_loss(action: RecoveryAction, loss: Loss, prices: Prices, why_not: str) -> RecoveryOption:
    """Return the option of an action after a loss that is no wait."""
    ready, awaited = loss.ready, loss.awaited
    if action is RecoveryAction.SHRINK:  # leaves out hosts that are ready in their seats
        ready -= loss.num_seated
    elif action is RecoveryAction.REFORM and loss.num_cold:
        # Beside the training they need about as long as all would wait for them otherwise.
        ready -= loss.num_cold
        preparing = ExpectedReturn(prices.seconds[TimedChange.REFORM_COLD], loss.num_cold)
        awaited = tuple(sorted((*awaited, preparing)))
    first = Phase(pause_s=prices.seconds[CHANGE_OF[action]], speed=ready / loss.places)
    if loss.stage is not None and action is RecoveryAction.SHRINK:
        first = price_cut(loss.stage, _find_present_speed(loss), prices.seconds)
    elif loss.plan is not None and action is RecoveryAction.KEEP_AXES:
        first = dataclasses.replace(first, speed=_find_present_speed(loss) * loss.plan.kept)
    elif loss.plan is not None and action is RecoveryAction.SHRINK:
        first = Phase(pause_s=_find_axes_s(loss, prices), speed=_find_present_speed(loss) * loss.plan.best)
    join_s = find_join_s(loss, prices)
    phases = list_phases(first, ready, group_returns(awaited), join_s=join_s, places=loss.places)
    return make_option(action, phases, prices, why_not)


def price_kept_stage(loss: Loss, prices: Prices, why_not: str) -> tuple[RecoveryOption, ReturnGroup | None]:
    """Return the option to keep the lost stage, and until when its host is waited for; None: it is not, and the stage
    is kept until its blocks are copied.
    """
    action, stage, ready = RecoveryAction.KEEP_STAGES, loss.stage, loss.ready
    if stage is None:
        first = Phase(pause_s=prices.seconds[TimedChange.KEEP_STAGES], speed=ready / loss.places)
        return make_option(action, (first,), prices, why_not), None
    present, join_s = _find_present_speed(loss), find_join_s(loss, prices)
    later = group_returns(loss.awaited)
    copied, divided = price_copied(stage, present, prices.seconds)
    divided_s = copied.pause_s + (copied.training_s or 0.0)
    then = [one._replace(return_s=max(one.return_s - divided_s, 0.0)) for one in later]
    phases = (copied, *list_phases(divided, ready, then, join_s=join_s, places=loss.places))
    without = make_option(action, phases, prices, why_not)
    if loss.stage_return_s is None or not loss.can_join_in_place:
        return without, None
    # Another host that joins sooner would end it.
    sooner = [one.share for one in loss.awaited if one.return_s <= loss.stage_return_s]
    own = ReturnGroup(loss.stage_return_s, len(sooner), sum(sooner))
    later = [own, *(one for one in later if one.return_s > own.return_s)]
    first = price_kept(stage, present, prices.seconds)
    phases = list_phases(first, ready, later, join_s=join_s, places=loss.places)
    awaiting = make_option(action, phases, prices, why_not)
    return (awaiting, own) if awaiting.score >= without.score else (without, None)


def _find_present_speed(loss: Loss) -> float:
    """Return the speed before the loss, as a part of that of all hosts."""
    return (loss.ready + loss.num_lost) / loss.places


def find_reachable(loss: Loss) -> float:
    """Return the best speed that any option reaches, as a part of that of all hosts."""
    back = min(loss.ready + count_awaited(loss), loss.places) / loss.places
    if loss.stage is not None:
        left = max(loss.stage.cut, loss.stage.kept)
    elif loss.plan is not None:
        left = max(loss.plan.best, loss.plan.kept)
    else:
        return back
    here = _find_present_speed(loss) * left
    return max(here, back) if loss.awaited else here


def count_awaited(change: Loss | Admission) -> float:
    """Return how many hosts are expected back, by their devices."""
    return sum(one.share for one in change.awaited)


def _find_axes_s(loss: Loss, prices: Prices) -> float:
    """Return the pause of a shrink to the best axes, in seconds: no shorter than with those that the job has."""
    form_s = prices.seconds[TimedChange.SHRINK]
    if loss.plan is None or not loss.has_new_axes:
        return form_s
    return max(form_s, prices.seconds[TimedChange.NEW_AXES]) + loss.plan.prepare_s


def find_break_even_s(loss: Loss, prices: Prices) -> float:
    """Return when what is kept, a stage or axes, has cost as much as to give it up would, in seconds; until the next
    failure at most.

    To give it up then is 2-competitive: whenever the host is back, at most about twice the least is lost.
    """
    # T = (longer pause) / (speed lost)
    most_s = prices.next_failure_s
    if loss.stage is not None:
        return min(find_stage_break_even_s(loss.stage, _find_present_speed(loss), prices.seconds), most_s)
    assert loss.plan is not None, "else nothing is kept"
    longer_s = _find_axes_s(loss, prices) - prices.seconds[TimedChange.SHRINK]
    slower = _find_present_speed(loss) * (loss.plan.best - loss.plan.kept)
    return min(max(longer_s, 0.0) / slower, most_s) if slower > 0 else most_s


def find_join_break_even_s(admission: Admission, prices: Prices) -> float:
    """Return the same of axes that are kept although hosts join."""
    assert admission.plan is not None, "else nothing is kept"
    present = min(admission.training + admission.joining, admission.places) / admission.places
    # T = (longer pause) / (speed lost)
    slower = present * (1 - admission.plan.kept / admission.plan.best)
    most_s = prices.next_failure_s
    return min(admission.plan.prepare_s / slower, most_s) if slower > 0 else most_s


def price_wait(loss: Loss, prices: Prices, num_groups: int, why_not: str) -> RecoveryOption:
    """Return the option of a wait for the first groups of hosts that come back."""
    groups = group_returns(loss.awaited)
    last = groups[num_groups - 1] if num_groups else ReturnGroup(prices.seconds[TimedChange.RETURN], 0, 0)
    join_s = find_join_s(loss, prices)
    ready = min(loss.ready + last.hosts, loss.places)
    usual = find_usual(loss)
    # In a new world all wait for the programs of those that have come.
    change = TimedChange.REFORM_COLD if usual is RecoveryAction.REFORM else CHANGE_OF[usual]
    pause_s = last.return_s + max(join_s, prices.seconds[change])
    first = Phase(pause_s=pause_s, speed=ready / loss.places)
    later = groups[num_groups:]
    phases = list_phases(first, loss.ready, later, join_s=join_s, places=loss.places)
    return make_option(RecoveryAction.WAIT, phases, prices, why_not)


def find_join_s(change: Loss | Admission, prices: Prices) -> float:
    """Return the pause in which hosts join that are ready, in seconds."""
    return prices.seconds[TimedChange.GROW if change.can_join_in_place else TimedChange.REFORM_COLD]


def explain_refusal(action: RecoveryAction, usual: RecoveryAction, loss: Loss) -> str:
    """Return why an action after a loss is not possible; empty if it is."""
    if action is usual:
        return ""
    match action:
        case RecoveryAction.WAIT:
            return _explain_wait_refusal(loss)
        case RecoveryAction.KEEP_STAGES | RecoveryAction.KEEP_AXES:
            explain = (
                _explain_stage_refusal if action is RecoveryAction.KEEP_STAGES else _explain_axes_refusal
            )
            return explain(usual, loss)
        case RecoveryAction.RESTORE:
            return "the hosts have a newer state"
        case RecoveryAction.REFORM | RecoveryAction.REFORM_COLD if usual is not RecoveryAction.RESTORE:
            return _explain_reform_refusal(action, loss)
        case RecoveryAction.REPLACE if usual is RecoveryAction.SHRINK:
            return "no other host is ready in a seat"
        case RecoveryAction.SHRINK if usual is RecoveryAction.REPLACE:
            return "other hosts are ready in their seats"
        case _:
            if usual is RecoveryAction.RESTORE:
                return "no host has the newest state"
            return f"the hosts cannot go on in place: {loss.new_world_because}"


def _explain_wait_refusal(loss: Loss) -> str:
    """Return why no host is waited for after a loss; empty if one may be."""
    if not loss.awaited:
        return "no host is on its way back"
    if loss.is_in_place and loss.can_join_in_place:
        return "a host that comes back joins in place"
    return "" if loss.may_wait else "the rules wait no longer in this change"


def _explain_reform_refusal(action: RecoveryAction, loss: Loss) -> str:
    """Return why another new world than the usual one is not possible after a loss; empty if it is."""
    if loss.is_in_place:
        return "the hosts can go on in place"
    if action is RecoveryAction.REFORM:
        return f"the hosts that have no programs must join: {loss.cold_join_because}"
    return "" if loss.num_cold else "all hosts that are ready have loaded programs"


def _explain_stage_refusal(usual: RecoveryAction, loss: Loss) -> str:
    """Return why the stage of a lost host cannot be kept; empty if it can."""
    if loss.stage is None:
        return "no stage of a pipeline is to be kept"
    if usual is not RecoveryAction.SHRINK:
        why = f": {loss.new_world_because}" if loss.new_world_because else ""
        return f"the hosts do not go on as they are in their world{why}"
    return "" if loss.stage.kept else "no other replica is complete"


def _explain_axes_refusal(usual: RecoveryAction, loss: Loss) -> str:
    """Return why the axes that the job has cannot be kept after a loss; empty if they can."""
    if loss.plan is not None and usual is not RecoveryAction.SHRINK:
        if loss.new_world_because:
            return f"the hosts cannot go on in place: {loss.new_world_because}"
        return "other hosts are ready" if loss.num_seated else "no host has the newest state"
    return explain_new_axes(loss)


def explain_new_axes(change: Loss | Admission) -> str:
    """Return why the axes that the job has cannot be kept by the hosts that would train; empty if they can."""
    if change.plan is None:
        return "no planned axes are known for the hosts that would train"
    if not change.has_new_axes:
        return "the best axes are those that the job has"
    return "" if change.plan.kept else "its axes do not fit the hosts that would train"


def price_join(
    action: RecoveryAction, admission: Admission, prices: Prices, why_not: str, risk_s: float
) -> RecoveryOption:
    """Return the option that hosts which are ready join now: with the best axes, or with those that the job has."""
    places, join_s = admission.places, find_join_s(admission, prices)
    ready = min(admission.training + admission.joining, places)
    first = Phase(pause_s=join_s, speed=ready / places)
    if admission.plan is not None and admission.has_new_axes:
        # The planner's speeds are rough: they count in their proportion, and never against a join.
        kept = first.speed * admission.plan.kept / admission.plan.best
        is_kept = action is RecoveryAction.KEEP_AXES
        first = Phase(
            pause_s=join_s + (0.0 if is_kept else admission.plan.prepare_s),
            speed=kept if is_kept else first.speed,
        )
    phases = list_phases(first, ready, group_returns(admission.awaited), join_s=join_s, places=places)
    return make_option(action, phases, prices, why_not, risk_s=risk_s)


def price_gather(
    admission: Admission, prices: Prices, num_groups: int, why_not: str, risk_s: float
) -> RecoveryOption:
    """Return the option that hosts which are ready join together with the first groups of those that come back."""
    places, join_s = admission.places, find_join_s(admission, prices)
    groups = group_returns(admission.awaited)
    last = groups[num_groups - 1] if num_groups else ReturnGroup(prices.seconds[TimedChange.RETURN], 0, 0)
    present = admission.training + admission.joining
    wait = Phase(pause_s=0.0, speed=admission.training / places, training_s=last.return_s)
    joined = Phase(pause_s=join_s, speed=min(present + last.hosts, places) / places)
    # From the join on, which is so long after the choice.
    later = [one._replace(return_s=max(one.return_s - last.return_s, 0.0)) for one in groups[num_groups:]]
    phases = (wait, *list_phases(joined, present, later, join_s=join_s, places=places))
    return make_option(RecoveryAction.GATHER, phases, prices, why_not, risk_s=risk_s)


def make_option(
    action: RecoveryAction,
    phases: tuple[Phase, ...],
    prices: Prices,
    why_not: str = "",
    *,
    risk_s: float = 0.0,
) -> RecoveryOption:
    """Return an option with its score; `risk_s` is a further loss of time, at any moment until the next failure."""
    first, *later = phases
    priced = (dataclasses.replace(first, pause_s=first.pause_s + risk_s), *later)
    return RecoveryOption(
        action=action,
        score=score_phases(priced, prices.next_failure_s),
        pause_s=first.pause_s,
        speed=first.speed,
        why_not=why_not,
    )
