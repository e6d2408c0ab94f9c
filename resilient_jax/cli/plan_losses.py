"""What the leader of a job would do after a loss, by the policy that it asks, with the speeds of the cost model."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from resilient_jax.ids import HostName
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.possible_losses import (
    LossEstimate,
    PossibleLoss,
    estimate_loss,
    list_possible_losses,
)
from resilient_jax.planning.replanning import ReplanAction, ReplanOption
from resilient_jax.planning.state_migration import count_lost_bytes
from resilient_jax.policy.choice import Choice, choose
from resilient_jax.policy.devices_after_loss import DevicesAfterLoss, select_devices
from resilient_jax.policy.loss_options import CHANGE_OF
from resilient_jax.policy.prices import Prices, price_job
from resilient_jax.policy.return_groups import ExpectedReturn
from resilient_jax.policy.situations import Admission, Loss
from resilient_jax.protocol.plan_records import PlanChange
from resilient_jax.protocol.recovery_records import JobHistory, RecoveryAction, RecoveryOption, TimedChange
from resilient_jax.protocol.state_records import StageLoss
from resilient_jax.topology import Topology

_ALONE: Final = "no host of its world is left"
"""Why a job of one host whose worker ends goes on in a new world."""


class ActionPlan(NamedTuple):
    """The plan that runs after an action: its shape, and the seconds of a step."""

    shape: str
    step_s: float

    @classmethod
    def of(cls, option: ReplanOption) -> "ActionPlan":
        """Return the plan of an option."""
        return cls(option.plan.shape, option.step_time_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecidedChange:
    """One decision of the policy.

    Attributes:
        when: such as "when host-7 is back with 4 devices"; empty: at once.
        choice: what the policy chose, with all options.
        before_s: seconds of a step before the loss.
        after: the plan that runs after each action that is possible.
        estimate: what the loss makes of the plan; None: a spare makes up for it.
        bytes_lost: size of the state that only lost hosts held.
    """

    when: str
    choice: Choice
    before_s: float
    after: Mapping[RecoveryAction, ActionPlan]
    estimate: LossEstimate | None
    bytes_lost: float

    def compute_speed(self, option: RecoveryOption) -> float:
        """Return the speed after an action as a fraction of that before the loss; 0: nothing trains."""
        found = self.after.get(option.action)
        return self.before_s / found.step_s if found is not None else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossDecision:
    """What would be done after a loss.

    Attributes:
        changes: the decisions, in order; empty: the job stops.
        why_stop: why no plan fits; empty: a plan does.
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

    def count_hosts(self, num_devices: int) -> float:
        """Return what hosts with so many devices count, as the leader counts: as fractions of the largest one."""
        return num_devices / max(host.devices + len(host.lost_devices) for host in self.topology.hosts)

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
        topology: cluster that the plan runs on.
        after_loss: what a host does with the devices that are left; see `JobConfig`.
        has_spare: whether a host spares.
        min_replicas: least number of replicas; see `replan`.
    """
    prices = price_job(JobHistory(), [HostName(host.name) for host in topology.hosts])
    job = _Job(plan, topology, prices, has_spare, min_replicas)
    return [_decide(job, loss, after_loss) for loss in list_possible_losses(topology)]


def _decide(job: _Job, loss: PossibleLoss, after_loss: DevicesAfterLoss) -> LossDecision:
    name, is_device, index = loss.names[0].partition("/")
    try:
        if not is_device:
            return LossDecision(loss=loss, changes=(_decide_loss(job, loss.names),))
        host = job.topology.host(HostName(name))
        lost = (*host.lost_devices, int(index))
        used = select_devices(host.devices + len(host.lost_devices), lost, after_loss)
        out = [f"{name}/{device}" for device in host.living_devices if device not in used]
        if len(job.topology.hosts) == 1:
            if not used:
                return LossDecision(
                    loss=loss, why_stop=f"{name} is the only host, and goes on without no device"
                )
            return LossDecision(loss=loss, changes=(_decide_restart(job, out, len(used)),))
        # The worker ends with its device, and its host is a member again when the next one is ready.
        first = _decide_loss(job, (name,), num_back=len(used))
        if not used or first.choice.action is RecoveryAction.REPLACE:
            return LossDecision(loss=loss, changes=(first,))
        return LossDecision(loss=loss, changes=(first, *_decide_return(job, name, out, len(used), first)))
    except PlanError as error:
        return LossDecision(loss=loss, why_stop=str(error))


def _decide_loss(job: _Job, lost: Sequence[str], *, num_back: int = 0) -> DecidedChange:
    """Return the decision after the loss of hosts; `num_back`: the devices with which one is expected back."""
    plan, hosts, seated = job.plan, job.topology.hosts, int(job.has_spare)
    # A spare is like the host whose place it takes.
    missing = lost[seated:]
    estimate = job.estimate(missing) if missing else None
    present, is_pipeline = ActionPlan(plan.shape, plan.step_time_s), plan.layout.axes.pipeline > 1
    is_any_left = len(hosts) - len(lost) + seated > 0
    kept = sum(host.devices for host in hosts if host.name not in lost)
    replaced = sum(job.topology.host(name).devices for name in lost[:seated])
    return_s = job.prices.seconds[TimedChange.RETURN]
    loss = Loss(
        places=job.count_hosts(sum(host.devices + len(host.lost_devices) for host in hosts)),
        ready=job.count_hosts(kept + replaced),
        num_seated=job.count_hosts(replaced),
        num_lost=job.count_hosts(sum(job.topology.host(name).devices for name in lost)),
        awaited=(ExpectedReturn(return_s, job.count_hosts(num_back)),) if num_back else (),
        new_world_because="" if is_any_left else _ALONE,
        can_join_in_place=is_any_left,
        needs_restore=count_lost_bytes(plan, lost) > 0,
        stage_return_s=return_s if num_back else None,
    )
    if estimate is not None and not seated:
        loss = dataclasses.replace(
            loss,
            stage=_make_stage(job, lost, estimate) if is_pipeline else None,
            plan=None if is_pipeline else _make_change(job, estimate),
            has_new_axes=not is_pipeline and estimate.best.action is not ReplanAction.KEEP,
        )
    then = present if estimate is None else ActionPlan.of(estimate.best)
    after = dict.fromkeys(CHANGE_OF, then) | {RecoveryAction.WAIT: present}
    if estimate is not None and estimate.kept is not None:
        after[RecoveryAction.KEEP_AXES] = ActionPlan.of(estimate.kept)
    if estimate is not None and estimate.kept_stages_s:
        after[RecoveryAction.KEEP_STAGES] = ActionPlan(plan.shape, estimate.kept_stages_s)
    choice = choose(loss, _add_moves(job.prices, estimate))
    return _make_decided("", choice, job, after, estimate, lost)


def _add_moves(prices: Prices, estimate: LossEstimate | None) -> Prices:
    """Return prices with the state that moves, which the programs of new axes have in theirs already."""
    if estimate is None:
        return prices
    kept, seconds = estimate.kept, dict(prices.seconds)
    seconds[TimedChange.SHRINK] += kept.migration_s if kept is not None else 0.0
    for change in (TimedChange.RESTORE, TimedChange.REFORM, TimedChange.REFORM_COLD):
        seconds[change] += estimate.best.transition_s
    return dataclasses.replace(prices, seconds=seconds)


def _decide_return(
    job: _Job, name: str, out: Sequence[str], used: int, first: DecidedChange
) -> tuple[DecidedChange, ...]:
    """Return the decision when a host is back with the devices that are left; none if no plan has a place for it."""
    hosts = job.topology.hosts
    try:
        estimate = job.estimate(out)
    except PlanError:
        return ()
    # The axes that follow are not foreseen: a host with fewer devices than the topology gives it is like no other.
    admission = Admission(
        places=job.count_hosts(sum(host.devices + len(host.lost_devices) for host in hosts)),
        training=job.count_hosts(sum(host.devices for host in hosts if host.name != name)),
        joining=job.count_hosts(used),
        is_last_copy=len(hosts) == 2,
        has_stage=first.choice.action is RecoveryAction.KEEP_STAGES,
    )
    after = {
        RecoveryAction.JOIN: ActionPlan.of(estimate.best),
        RecoveryAction.POSTPONE: first.after[first.choice.action],
    }
    when = f"when {name} is back with {used} {'device' if used == 1 else 'devices'}"
    choice = choose(admission, job.prices)
    return (_make_decided(when, choice, job, after, estimate, ()),)


def _decide_restart(job: _Job, out: Sequence[str], used: int) -> DecidedChange:
    """Return the decision of a job of one host, whose worker starts again with the devices that are left."""
    estimate, ready = job.estimate(out), job.count_hosts(used)
    loss = Loss(places=1, ready=ready, num_lost=0, new_world_because=_ALONE, needs_restore=True)
    after = {RecoveryAction.RESTORE: ActionPlan.of(estimate.best)}
    choice = choose(loss, _add_moves(job.prices, estimate))
    return _make_decided("", choice, job, after, estimate, ())


def _make_stage(job: _Job, lost: Sequence[str], estimate: LossEstimate) -> StageLoss:
    """Return what the loss of hosts makes of a pipeline."""
    before_s, kept_s = job.plan.step_time_s, estimate.kept_stages_s
    return StageLoss(
        hosts=tuple(map(HostName, lost)),
        kept=before_s / kept_s if kept_s else 0.0,
        cut=before_s / estimate.best.step_time_s,
        move_s=estimate.best.transition_s,
    )


def _make_change(job: _Job, estimate: LossEstimate) -> PlanChange:
    """Return what a loss makes of planned axes."""
    kept, best, present_s = estimate.kept, estimate.best, job.plan.step_time_s
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
    job: _Job,
    after: Mapping[RecoveryAction, ActionPlan],
    estimate: LossEstimate | None,
    lost: Sequence[str],
) -> DecidedChange:
    possible = {option.action for option in choice.options if not option.why_not}
    return DecidedChange(
        when=when,
        choice=choice,
        before_s=job.plan.step_time_s,
        after={action: plan for action, plan in after.items() if action in possible},
        estimate=estimate,
        bytes_lost=count_lost_bytes(job.plan, lost) if lost else 0.0,
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
                    f"{change.compute_speed(option):.3f}",
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
    unequal = change.estimate.unequal if change.estimate is not None else None
    sentences = [change.choice.reason]
    if change.bytes_lost:
        lost = f"{change.bytes_lost / 1e9:.3g} GB are on no worker that is left"
        sentences.append(f"{lost}, and come from a snapshot in memory, its parity, or a checkpoint")
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
    return {
        "when": change.when,
        "reason": explain_change(change),
        "next_failure_s": change.choice.next_failure_s,
        "bytes_moved": change.estimate.best.migration.bytes_moved if change.estimate is not None else None,
        "bytes_lost": change.bytes_lost,
        "options": [
            {
                "action": option.action,
                "shape": change.after[option.action].shape if option.action in change.after else "",
                "speed": change.compute_speed(option),
                "pause_s": option.pause_s,
                "score": option.score,
                "why_not": option.why_not,
            }
            for option in change.choice.options
        ],
    }
