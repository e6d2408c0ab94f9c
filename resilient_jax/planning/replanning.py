"""What a job would do when the cluster of a plan changes: a plan and a topology, read as situations of the policy.

The decisions are those of a job (`policy.choice`), one after the other as a job meets them: about the hosts that are
lost, about each host that is back with fewer devices, about each host whose speed has changed, about hosts that are
new. Speeds are the cost model's. Pauses and the time to the next failure are those of a job that has measured none yet,
with the state that moves. A lost host is not expected back; one that has lost a device is, once its worker has started
again.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.next_plans import (
    DEFAULT_COMPILE_S,
    NextPlan,
    NextPlans,
    NextPlanSearch,
    is_same_program,
    price_kept_stages_s,
)
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.replan_decision import ReplanDecision, ReplanStep
from resilient_jax.planning.state_migration import count_lost_bytes
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.policy.choice import choose
from resilient_jax.policy.devices_after_loss import (
    DevicesAfterLoss,
    choose_devices_to_leave_out,
    explain_all_devices,
    select_devices,
)
from resilient_jax.policy.loss_options import CHANGE_OF
from resilient_jax.policy.prices import PRIOR_S, Prices, price_job
from resilient_jax.policy.return_groups import ExpectedReturn
from resilient_jax.policy.situations import Admission, Loss, SlowTraining
from resilient_jax.protocol.plan_records import PlanChange
from resilient_jax.protocol.recovery_records import JobHistory, RecoveryAction, RecoveryDecision, TimedChange
from resilient_jax.protocol.slow_hosts import Slowdown, name_devices
from resilient_jax.protocol.state_records import StageLoss
from resilient_jax.topology import Host, Topology

COMPILED_AHEAD_HOSTS: Final = 2
"""A job compiles what it would need after the loss of so many hosts while it trains; and of one that joins."""
ALONE: Final = "no host of its world is left"
"""Why hosts of which none trained before go on in a new world."""
STAGE_DEVICES: Final = "what a stage of a pipeline would do with fewer devices is not estimated"
MAX_NAMES: Final = 4
"""Of hosts in a text."""


def replan(
    plan: Plan,
    topology: Topology,
    *,
    next_failure_s: float | None = None,
    compile_s: float = DEFAULT_COMPILE_S,
    is_compiled: Callable[[Plan | UnequalPlan], bool] | None = None,
    min_replicas: int = 1,
    has_spare: bool = False,
    devices_after_loss: DevicesAfterLoss = "even",
) -> ReplanDecision:
    """Return what a job would do now that the topology has changed, by the policy that the leader of a job asks.

    Args:
        plan: the plan that ran.
        topology: the hosts available now, as `without`, `slowed` and `with_hosts` return it.
        next_failure_s: expected time to the next failure; None: that of a job which has seen none yet.
        compile_s: time of compiling a program that no cache has.
        is_compiled: whether a cache has the program of a plan; None: a job has compiled ahead what it foresees.
        min_replicas: least number of replicas of the state; as in `search_plan`.
        has_spare: whether a host spares.
        devices_after_loss: what a host does with the devices that are left; see `JobConfig`.

    Raises:
        PlanError: no plan fits what is left, with as many replicas; the message says what would suffice.

    Example:
        >>> after = replan(plan, topology.without("host-07").slowed("host-11", 0.6))  # doctest: +SKIP
        >>> print(after.reason, after.step_time_s, after.bytes_moved)  # doctest: +SKIP
    """
    if not ((next_failure_s is None or 0 < next_failure_s < math.inf) and compile_s >= 0):
        raise PlanError(
            f"replan: found next_failure_s {next_failure_s}, compile_s {compile_s}, expected a finite time > 0 and a "
            "time >= 0"
        )
    clusters = [
        [host.devices + len(host.lost_devices) for host in cluster.hosts]
        for cluster in (plan.request.topology, topology)
    ]
    most = max(map(max, clusters))
    job = _Job(
        search=NextPlanSearch(min_replicas=min_replicas, compile_s=compile_s, is_compiled=is_compiled),
        before_s=plan.step_time_s,
        most=most,
        places=max(map(sum, clusters)) / most,
        next_failure_s=next_failure_s,
        after_loss=devices_after_loss,
    )
    return ReplanDecision(before=plan, steps=tuple(job.decide(plan, topology, has_spare=has_spare)))


class _Present(NamedTuple):
    """What runs between two changes.

    Attributes:
        plan: the plan that runs; of unequal teams the last one of equal replicas.
        running: what follows if nothing is changed.
        topology: the hosts that train.
    """

    plan: Plan
    running: NextPlan
    topology: Topology

    @property
    def is_pipeline(self) -> bool:
        """Whether the hosts are stages."""
        return self.plan.layout.axes.pipeline > 1

    def on(self, hosts: Iterable[Host]) -> Topology:
        """Return the topology with these hosts."""
        return dataclasses.replace(self.topology, hosts=tuple(hosts))

    def follow(self, chosen: NextPlan, hosts: Iterable[Host]) -> "_Present":
        """Return what runs after a choice."""
        plan = chosen.plan if isinstance(chosen.plan, Plan) else self.plan
        return _Present(plan, NextPlan(plan=chosen.plan, step_time_s=chosen.step_time_s), self.on(hosts))

    def compute_speed(self, plan: NextPlan | None) -> float:
        """Return the speed with another plan as a part of the present one; 0: there is none."""
        return self.running.step_time_s / plan.step_time_s if plan is not None else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The job whose cluster changes: how it searches plans, and how its leader counts and prices.

    Attributes:
        before_s: seconds of a step before all changes.
        most: devices of the largest host.
        places: hosts that the job has at most, counted by their devices.
    """

    search: NextPlanSearch
    before_s: float
    most: int
    places: float
    next_failure_s: float | None
    after_loss: DevicesAfterLoss

    def decide(self, plan: Plan, topology: Topology, *, has_spare: bool) -> Iterator[ReplanStep]:
        """Yield the decisions about all changes from the topology of a plan to another one."""
        was = {host.name: host for host in plan.request.topology.hosts}
        given = {host.name: host for host in topology.hosts}
        broken = [
            name for name in was if name in given and was[name].lost_devices != given[name].lost_devices
        ]
        now = self._select_devices(given, broken)
        lost = [name for name in was if name in broken or name not in now]
        back = [now[name] for name in lost if name in now]
        present = _Present(plan, NextPlan(plan=plan, step_time_s=plan.step_time_s), plan.request.topology)
        if len(lost) == len(was) and not has_spare:
            yield self._decide_restart(present, present.on(now.values()), _describe_loss(lost, back))
            return
        seated, is_kept = lost[: int(has_spare)], False
        if lost:
            step, present = self._decide_loss(present, lost, seated, back)
            is_kept = step.choice.action is RecoveryAction.KEEP_STAGES
            yield step
        joins = [
            ([host], f"when {host.name} is back with {host.devices} device{'s'[: host.devices != 1]}")
            for host in back
            if host.name not in seated
        ]
        for hosts, when in joins:
            present, steps = self._decide_join(present, hosts, when, has_stage=is_kept)
            yield from steps
        changed = [now[name] for name in was if name not in lost and _differ(was[name], now[name])]
        for host in sorted(changed, key=lambda host: host.speed):
            step, present = self._decide_slow(present, host, has_spare=has_spare and not seated)
            yield step
        if new := [host for name, host in now.items() if name not in was]:
            when = f"when {_join([host.name for host in new])} can join"
            yield from self._decide_join(present, new, when, has_stage=False)[1]

    def _select_devices(
        self, hosts: Mapping[HostName, Host], broken: Collection[HostName]
    ) -> dict[HostName, Host]:
        """Return the hosts with the devices that they use after some were lost, without those that use none."""
        found = dict(hosts)
        for name in broken:
            host = found.pop(name)
            used = select_devices(host.devices + len(host.lost_devices), host.lost_devices, self.after_loss)
            if used:
                found[name] = _restrict(host, used)
        if not found:
            raise PlanError(f"{_join(list(broken))} is the only host, and goes on without no device")
        return found

    def _count(self, hosts: Iterable[Host]) -> float:
        """Return what hosts count, as the leader counts: as parts of the largest one."""
        return sum(host.devices for host in hosts) / self.most

    def _price(self, hosts: Iterable[Host], joining: Iterable[Host] = ()) -> Prices:
        prices = price_job(JobHistory(), {host.name for host in hosts}, [host.name for host in joining])
        if self.next_failure_s is None:
            return prices
        losses = prices.joiner_losses * self.next_failure_s / prices.next_failure_s
        return dataclasses.replace(prices, next_failure_s=self.next_failure_s, joiner_losses=losses)

    def _make_step(
        self,
        when: str,
        choice: RecoveryDecision,
        plans: Mapping[RecoveryAction, NextPlan | None],
        found: NextPlans | None = None,
        bytes_lost: float = 0.0,
    ) -> ReplanStep:
        possible = {option.action for option in choice.options if not option.why_not}
        return ReplanStep(
            when=when,
            choice=choice,
            before_s=self.before_s,
            plans={one: plan for one, plan in plans.items() if one in possible and plan is not None},
            unequal=found.unequal if found is not None else None,
            bytes_lost=bytes_lost,
        )

    def _decide_restart(self, present: _Present, topology: Topology, when: str) -> ReplanStep:
        """Return the decision where all workers have ended, and start again with what is left."""
        found = self.search.search(present.plan, topology, is_foreseen=False)
        loss = Loss(
            places=self.places,
            ready=self._count(topology.hosts),
            num_lost=0,
            new_world_because=ALONE,
            needs_restore=True,
        )
        choice = choose(loss, _add_moves(self._price(topology.hosts), found))
        return self._make_step(when, choice, {RecoveryAction.RESTORE: found.best}, found)

    def _decide_loss(
        self,
        present: _Present,
        lost: Sequence[HostName],
        seated: Collection[HostName],
        back: Sequence[Host],
    ) -> tuple[ReplanStep, _Present]:
        """Return the decision of those that are left after a loss.

        Args:
            seated: the lost hosts in whose places spares are. A spare is like the host whose place it takes.
            back: what lost hosts have left when their workers have started again.
        """
        plan, hosts = present.plan, present.topology.hosts
        left = [host for host in hosts if host.name not in lost or host.name in seated]
        found: NextPlans | None = None
        if len(left) < len(hosts):
            is_foreseen = len(hosts) - len(left) <= COMPILED_AHEAD_HOSTS
            found = self.search.search(plan, present.on(left), is_foreseen=is_foreseen)
        kept_s = 0.0 if seated else price_kept_stages_s(plan, present.topology, set(lost))
        keep_stages = NextPlan(plan=plan, step_time_s=kept_s) if kept_s else None
        bytes_lost = count_lost_bytes(plan, lost)
        return_s = PRIOR_S[TimedChange.RETURN]
        loss = Loss(
            places=self.places,
            ready=self._count(left),
            num_seated=self._count(host for host in hosts if host.name in seated),
            num_lost=self._count(host for host in hosts if host.name in lost),
            awaited=tuple(ExpectedReturn(return_s, self._count([host]), host.name) for host in back),
            needs_restore=bytes_lost > 0,
            stage_return_s=return_s if len(lost) == len(back) == 1 else None,
        )
        if found is not None and not seated and present.is_pipeline:
            stage = StageLoss(
                hosts=tuple(lost),
                kept=present.compute_speed(keep_stages),
                cut=present.compute_speed(found.best),
                move_s=found.best.transition_s,
            )
            loss = dataclasses.replace(loss, stage=stage)
        elif found is not None and not seated:
            is_new = not is_same_program(plan, found.best.plan)
            loss = dataclasses.replace(loss, plan=_describe_axes(present, found), has_new_axes=is_new)
        choice = choose(loss, _add_moves(self._price([*left, *back]), found))
        plans = {
            **dict.fromkeys(CHANGE_OF, found.best if found is not None else present.running),
            RecoveryAction.KEEP_AXES: found.kept if found is not None else None,
            RecoveryAction.KEEP_STAGES: keep_stages,
            RecoveryAction.WAIT: present.running,
        }
        step = self._make_step(_describe_loss(lost, back), choice, plans, found, bytes_lost)
        return step, present.follow(step.chosen, left)

    def _decide_join(
        self, present: _Present, hosts: Sequence[Host], when: str, *, has_stage: bool
    ) -> tuple[_Present, tuple[ReplanStep, ...]]:
        """Return the decision about hosts that are ready to join; there is none where no plan has places for them."""
        training = present.topology.hosts
        together = [*training, *hosts]
        # A host with fewer devices than the topology gives it is like no other: axes with it are not foreseen.
        is_complete = not any(host.lost_devices for host in hosts)
        is_foreseen = is_complete and len(hosts) == 1
        try:
            found = self.search.search(present.plan, present.on(together), is_foreseen=is_foreseen)
        except PlanError:
            return present, ()
        admission = Admission(
            places=self.places,
            training=self._count(training),
            joining=self._count(hosts),
            is_last_copy=len(training) == 1,
            has_stage=has_stage,
            plan=_describe_axes(present, found) if is_complete and not present.is_pipeline else None,
            has_new_axes=not is_same_program(present.plan, found.best.plan),
        )
        choice = choose(admission, self._price(together, hosts))
        plans = {
            RecoveryAction.JOIN: found.best,
            RecoveryAction.KEEP_AXES: found.kept,
            RecoveryAction.POSTPONE: present.running,
        }
        step = self._make_step(when, choice, plans, found)
        if choice.action is RecoveryAction.POSTPONE:
            return present, (step,)
        return present.follow(step.chosen, together), (step,)

    def _decide_slow(self, present: _Present, host: Host, *, has_spare: bool) -> tuple[ReplanStep, _Present]:
        """Return the decision about a host whose speed has changed."""
        hosts, old = present.topology.hosts, present.topology.host(host.name)
        others = [one for one in hosts if one.name != host.name]
        part = min(host.speed / old.speed, host.link_speed / old.link_speed)
        speeds = dict(zip(host.living_devices, host.device_speeds, strict=False))
        fastest = max(speeds.values(), default=1.0)
        slow = tuple(device for device, speed in speeds.items() if speed < fastest)
        left = choose_devices_to_leave_out(
            [(device, speed / fastest) for device, speed in speeds.items()],
            slow,
            self.after_loss,
            host.lost_devices,
        )
        fewer = _restrict(host, left.used) if left is not None and not present.is_pipeline else None
        plans = self._list_slow_plans(present, host, fewer, part)
        part_of = {action: present.compute_speed(one) for action, one in plans.items()}
        slowdown = Slowdown(
            generation=GenerationNumber(0),
            host=host.name if part < 1 else HostName(""),
            kept=part_of[RecoveryAction.KEEP],
            replaced=part_of[RecoveryAction.REPLACE],
            without=part_of[RecoveryAction.TAKE_OUT],
            redivided=part_of[RecoveryAction.REDIVIDE],
            devices=left.out if left is not None else slow,
            fewer_devices=part_of[RecoveryAction.FEWER_DEVICES],
            why_all_devices=STAGE_DEVICES
            if slow and present.is_pipeline
            else explain_all_devices(slow, self.after_loss),
        )
        training = SlowTraining(
            places=self.places,
            training=self._count(hosts),
            slowdown=slowdown,
            has_spare=has_spare,
            refusal_fewer_devices="" if others else "the next loss may be that of the state",
        )
        choice = choose(training, self._price(hosts))
        what = f"{name_devices(slow)} of {host.name}" if slow else host.name
        step = self._make_step(f"with {what} at {part:.3g} of its speed", choice, plans)
        after = {
            RecoveryAction.REPLACE: hosts,
            RecoveryAction.TAKE_OUT: others,
            RecoveryAction.FEWER_DEVICES: [*others, fewer or host],
        }
        return step, present.follow(step.chosen, after.get(choice.action, [*others, host]))

    def _list_slow_plans(
        self, present: _Present, host: Host, fewer: Host | None, part: float
    ) -> dict[RecoveryAction, NextPlan | None]:
        """Return the plan after each action on a host that has a part of its speed; None: there is none."""
        plan, others = present.plan, [one for one in present.topology.hosts if one.name != host.name]
        same = self.search.try_same_axes(plan, present.on([*others, host]))

        def search_on(hosts: Sequence[Host]) -> NextPlan | None:
            return self.search.try_search(plan, present.on(hosts)) if hosts and part < 1 else None

        # All hosts wait for the slowest, at most: what a step takes besides computing does not become slower.
        kept_s = present.running.step_time_s / min(part, 1.0)
        kept = NextPlan(plan=present.running.plan, step_time_s=kept_s)
        if same is not None and is_same_program(plan, same) and same.step_time_s < kept_s:
            kept = NextPlan(plan=same, step_time_s=same.step_time_s)
        redivided: NextPlan | None = None
        if same is not None and present.is_pipeline:
            redivided = self.search.price(plan, same, is_foreseen=True)
        return {
            RecoveryAction.KEEP: kept,
            RecoveryAction.REPLACE: present.running if part < 1 else None,
            RecoveryAction.TAKE_OUT: search_on(others),
            RecoveryAction.FEWER_DEVICES: search_on([*others, fewer] if fewer is not None else []),
            RecoveryAction.REDIVIDE: redivided,
        }


def _add_moves(prices: Prices, found: NextPlans | None) -> Prices:
    """Return prices with the state that moves, which the programs of new axes have in theirs already."""
    if found is None:
        return prices
    seconds = dict(prices.seconds)
    seconds[TimedChange.SHRINK] += found.kept.migration_s if found.kept is not None else 0.0
    for change in (TimedChange.RESTORE, TimedChange.REFORM, TimedChange.REFORM_COLD):
        seconds[change] += found.best.transition_s
    return dataclasses.replace(prices, seconds=seconds)


def _describe_axes(present: _Present, found: NextPlans) -> PlanChange:
    """Return what a change makes of planned axes."""
    return PlanChange(
        groups=(),
        kept=present.compute_speed(found.kept),
        best=present.compute_speed(found.best),
        best_axes=(),
        prepare_s=found.best.transition_s,
    )


def _restrict(host: Host, used: Collection[int]) -> Host:
    """Return a host that uses only these devices."""
    for device in host.living_devices:
        if device not in used:
            host = host.without_device(device)
    return host


def _differ(old: Host, new: Host) -> bool:
    return (old.speed, old.device_speeds, old.link_speed) != (new.speed, new.device_speeds, new.link_speed)


def _describe_loss(lost: Sequence[HostName], back: Iterable[Host]) -> str:
    """Return what was lost, such as "when host-3 is lost and host-4 has lost devices"."""
    broken = [host.name for host in back]
    gone = [name for name in lost if name not in broken]
    texts = [f"{_join(gone)} {'is' if len(gone) == 1 else 'are'} lost"] if gone else []
    texts += [f"{_join(broken)} {'has' if len(broken) == 1 else 'have'} lost devices"] if broken else []
    return f"when {' and '.join(texts)}"


def _join(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    return f"{shown} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else shown
