"""What the leader of a job would do after a loss, by the policy that it asks, with the speeds of the cost model."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from resilient_jax.cluster.device_selection import DevicesAfterLoss, select_devices
from resilient_jax.ids import HostName
from resilient_jax.membership.recovery_options import Admission, Loss, Prices, price_job
from resilient_jax.membership.recovery_policy import Choice, choose_admission, choose_after_loss
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.possible_losses import (
    LossEstimate,
    PossibleLoss,
    estimate_loss,
    list_possible_losses,
)
from resilient_jax.planning.replanning import ReplanAction
from resilient_jax.protocol.plan_records import PlanChange
from resilient_jax.protocol.recovery_records import JobHistory, RecoveryAction, RecoveryOption, TimedChange
from resilient_jax.protocol.state_records import StageLoss
from resilient_jax.topology import Topology


class ActionPlan(NamedTuple):
    """The plan that runs after an action: its shape, and the seconds of a step."""

    shape: str
    step_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecidedChange:
    """One decision of the policy.

    Attributes:
        when: such as "when host-7 is back with 4 devices"; empty: at once.
        choice: of the policy.
        before_s: a step before the loss, in seconds.
        after: of the actions that are possible, the plan that runs then; of others none.
        estimate: what the loss makes of the plan.
    """

    when: str
    choice: Choice
    before_s: float
    after: Mapping[RecoveryAction, ActionPlan]
    estimate: LossEstimate

    def find_speed(self, option: RecoveryOption) -> float:
        """Return the speed after an action as a part of that before the loss; 0: nothing trains."""
        found = self.after.get(option.action)
        return self.before_s / found.step_s if found is not None else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossDecision:
    """What would be done after a loss.

    Attributes:
        loss: the loss.
        changes: the decisions, in order; empty: the job stops.
        why_stop: why no plan fits; empty: one does.
    """

    loss: PossibleLoss
    changes: tuple[DecidedChange, ...] = ()
    why_stop: str = ""


class _Job(NamedTuple):
    """The job that loses something."""

    plan: Plan
    topology: Topology
    prices: Prices
    has_spare: bool
    min_replicas: int

    def estimate(self, lost: Sequence[str]) -> LossEstimate:
        return estimate_loss(self.plan, self.topology, lost, min_replicas=self.min_replicas)


def decide_losses(
    plan: Plan,
    topology: Topology,
    after_loss: DevicesAfterLoss,
    has_spare: bool = False,
    min_replicas: int = 1,
) -> list[LossDecision]:
    """Return what the policy would choose after each possible loss.

    A host that is lost is not expected back. One that has lost a device is, with the devices that are left, as soon as
    its worker has started again.

    Args:
        plan: the plan that runs.
        topology: on which it runs.
        after_loss: what a host does with the devices that are left; see `JobConfig`.
        has_spare: whether a host spares.
        min_replicas: as of `replan`.
    """
    prices = price_job(JobHistory(), [HostName(host.name) for host in topology.hosts])
    job = _Job(plan, topology, prices, has_spare, min_replicas)
    return [_decide(job, loss, after_loss) for loss in list_possible_losses(topology)]


def _decide(job: _Job, loss: PossibleLoss, after_loss: DevicesAfterLoss) -> LossDecision:
    (first, *_), hosts = loss.names, len(job.topology.hosts)
    name, is_device, index = first.partition("/")
    try:
        if not is_device:
            return LossDecision(loss=loss, changes=(_decide_loss(job, loss.names),))
        host = job.topology.host(HostName(name))
        lost = (*host.lost_devices, int(index))
        used = select_devices(host.devices + len(host.lost_devices), lost, after_loss)
        out = [f"{name}/{device}" for device in host.living_devices if device not in used]
        if used and hosts == 1:
            return LossDecision(loss=loss, changes=(_decide_restart(job, out),))
        # The worker ends with its device, and its host is a member again when the next one is ready.
        changes = [_decide_loss(job, (name,), is_back=bool(used))]
        if used and changes[0].choice.action is not RecoveryAction.REPLACE:
            changes.append(_decide_return(job, name, out, len(used), changes[0].estimate))
        return LossDecision(loss=loss, changes=tuple(changes))
    except PlanError as error:
        return LossDecision(loss=loss, why_stop=str(error))


def _decide_loss(job: _Job, lost: Sequence[str], *, is_back: bool = False) -> DecidedChange:
    """Return the decision after the loss of hosts."""
    estimate, places = job.estimate(lost), len(job.topology.hosts)
    takes_place = job.has_spare and len(lost) == 1
    is_pipeline = job.plan.layout.axes.pipeline > 1
    return_s = job.prices.seconds[TimedChange.RETURN]
    before_s, best = job.plan.step_time_s, estimate.best
    kept_s = estimate.kept.step_time_s if estimate.kept is not None else 0.0
    stage = StageLoss(
        hosts=tuple(map(HostName, lost)),
        kept=before_s / estimate.kept_stages_s if estimate.kept_stages_s else 0.0,
        cut=before_s / best.step_time_s,
        move_s=best.transition_s,
    )
    loss = Loss(
        places=places,
        ready=places - len(lost) + takes_place,
        num_seated=int(takes_place),
        num_lost=len(lost),
        awaited=(return_s,) if is_back else (),
        needs_restore=best.migration.bytes_lost > 0,
        stage=stage if is_pipeline and not takes_place else None,
        plan=None if is_pipeline or takes_place else _make_change(job, estimate, before_s),
        has_new_axes=not is_pipeline and best.action is not ReplanAction.KEEP,
        stage_return_s=return_s if is_back else None,
    )
    after = {
        RecoveryAction.SHRINK: ActionPlan(best.plan.shape, best.step_time_s),
        RecoveryAction.RESTORE: ActionPlan(best.plan.shape, best.step_time_s),
        RecoveryAction.REPLACE: ActionPlan(job.plan.shape, before_s),
        RecoveryAction.WAIT: ActionPlan(job.plan.shape, before_s),
    }
    if estimate.kept is not None:
        after[RecoveryAction.KEEP_AXES] = ActionPlan(estimate.kept.plan.shape, kept_s)
    if estimate.kept_stages_s:
        after[RecoveryAction.KEEP_STAGES] = ActionPlan(job.plan.shape, estimate.kept_stages_s)
    choice = choose_after_loss(loss, _add_moves(job.prices, estimate))
    return _make_decided("", choice, before_s, after, estimate)


def _add_moves(prices: Prices, estimate: LossEstimate) -> Prices:
    """Return prices with the state that moves, which the programs of new axes have in theirs already."""
    kept, seconds = estimate.kept, dict(prices.seconds)
    seconds[TimedChange.SHRINK] += kept.migration_s if kept is not None else 0.0
    seconds[TimedChange.RESTORE] += estimate.best.transition_s
    return dataclasses.replace(prices, seconds=seconds)


def _decide_return(
    job: _Job, name: str, out: Sequence[str], used: int, meanwhile: LossEstimate
) -> DecidedChange:
    """Return the decision when a host is back with the devices that are left."""
    places, estimate, before_s = len(job.topology.hosts), job.estimate(out), job.plan.step_time_s
    best, present = estimate.best, meanwhile.best
    admission = Admission(
        places=places,
        training=places - 1,
        joining=1,
        plan=_make_change(job, estimate, present.step_time_s),
        has_new_axes=best.plan.shape != present.plan.shape and best.action is not ReplanAction.KEEP,
    )
    after = {
        RecoveryAction.JOIN: ActionPlan(best.plan.shape, best.step_time_s),
        RecoveryAction.POSTPONE: ActionPlan(present.plan.shape, present.step_time_s),
    }
    if estimate.kept is not None:
        after[RecoveryAction.KEEP_AXES] = ActionPlan(estimate.kept.plan.shape, estimate.kept.step_time_s)
    when = f"when {name} is back with {used} {'device' if used == 1 else 'devices'}"
    return _make_decided(when, choose_admission(admission, job.prices), before_s, after, estimate)


def _decide_restart(job: _Job, out: Sequence[str]) -> DecidedChange:
    """Return the decision of a job of one host, whose worker starts again with the devices that are left."""
    estimate = job.estimate(out)
    loss = Loss(places=1, ready=1, num_lost=0, is_in_place=False, needs_restore=True)
    best = estimate.best
    after = {RecoveryAction.RESTORE: ActionPlan(best.plan.shape, best.step_time_s)}
    choice = choose_after_loss(loss, _add_moves(job.prices, estimate))
    return _make_decided("", choice, job.plan.step_time_s, after, estimate)


def _make_change(job: _Job, estimate: LossEstimate, present_s: float) -> PlanChange:
    """Return what a loss or a join makes of planned axes; speeds are parts of that of steps of `present_s`."""
    kept, best = estimate.kept, estimate.best
    return PlanChange(
        groups=(),
        kept=present_s / kept.step_time_s if kept is not None else 0.0,
        best=present_s / best.step_time_s,
        best_axes=(),
        prepare_s=best.transition_s,
    )


def _make_decided(
    when: str,
    choice: Choice,
    before_s: float,
    after: Mapping[RecoveryAction, ActionPlan],
    estimate: LossEstimate,
) -> DecidedChange:
    possible = {option.action for option in choice.options if not option.why_not}
    return DecidedChange(
        when=when,
        choice=choice,
        before_s=before_s,
        after={action: plan for action, plan in after.items() if action in possible},
        estimate=estimate,
    )


def print_losses(console: Console, decisions: Sequence[LossDecision]) -> None:
    """Print what would be done after each possible loss: a row for each option, and the reason of each choice."""
    table = Table("loss", "", "plan", title="after each possible loss, the choice first")
    for name in ("step", "speed", "pause", "score"):
        table.add_column(name, justify="right")
    for decision in decisions:
        what = f"{decision.loss.describe()} (1 of {decision.loss.num_alike})"
        if not decision.changes:
            table.add_row(escape(what), "stop", "-", "-", "0", "-", "0")
        for change in decision.changes:
            for place, option in enumerate(o for o in change.choice.options if not o.why_not):
                shape, step_s = change.after[option.action]
                table.add_row(
                    escape(change.when or what) if place == 0 else "",
                    str(option.action),
                    shape,
                    f"{step_s:.4g} s",
                    f"{change.find_speed(option):.3f}",
                    f"{option.pause_s:.3g} s",
                    f"{option.score:.6f}",
                )
    console.print(table)
    for decision in decisions:
        what = decision.loss.describe()
        if not decision.changes:
            console.print(f"{escape(what)}: the job stops: {escape(decision.why_stop)}")
        for change in decision.changes:
            about = f"{what}, {change.when}" if change.when else what
            console.print(f"{escape(about)}: {escape(explain_change(change))}")


def explain_change(change: DecidedChange) -> str:
    """Return the reason of a choice, with what the cost model adds to it."""
    lost, unequal = change.estimate.best.migration.bytes_lost, change.estimate.unequal
    sentences = [change.choice.reason]
    if lost and change.choice.action is RecoveryAction.RESTORE:
        sentences.append(
            f"{lost / 1e9:.3g} GB are on no host that is left, and come from parity or a checkpoint"
        )
    if unequal is not None:
        speed = change.before_s / unequal.step_time_s
        sentences.append(f"teams that no job runs, {unequal.plan.shape}, would have {speed:.3f} of the speed")
    return "; ".join(sentences)


def describe_loss(decision: LossDecision) -> dict[str, object]:
    """Return a decision in types that JSON has: of each change the choice is the first option."""
    return {
        "kind": decision.loss.kind,
        "lost": decision.loss.names,
        "num_alike": decision.loss.num_alike,
        "why_stop": decision.why_stop,
        "changes": [_describe_change(change) for change in decision.changes],
    }


def _describe_change(change: DecidedChange) -> dict[str, object]:
    migration = change.estimate.best.migration
    return {
        "when": change.when,
        "reason": explain_change(change),
        "next_failure_s": change.choice.next_failure_s,
        "bytes_moved": migration.bytes_moved,
        "bytes_lost": migration.bytes_lost,
        "options": [
            {
                "action": option.action,
                "shape": change.after[option.action].shape if option.action in change.after else "",
                "speed": change.find_speed(option),
                "pause_s": option.pause_s,
                "score": option.score,
                "why_not": option.why_not,
            }
            for option in change.choice.options
        ],
    }
