"""The losses that a cluster may meet, one of each kind, and what each would make of a plan."""

import collections
import dataclasses
from collections.abc import Collection, Iterator
from typing import Final

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.placement import place_replicas
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_request import PlanConstraints
from resilient_jax.planning.replanning import (
    DEFAULT_COMPILE_S,
    ReplanOption,
    estimate_next_failure_s,
    is_same_program,
    make_option,
    try_keep,
    try_unequal,
)
from resilient_jax.planning.search import search_plans
from resilient_jax.planning.unequal_plan import UnequalPlan
from resilient_jax.topology import Host, Topology

COMPILED_AHEAD_HOSTS: Final = 2
"""A job compiles what it would need after the loss of so many hosts while it trains."""
MAX_PLANS: Final = 64
"""Among the fastest plans, in which that whose replicas are inside hosts is looked for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PossibleLoss:
    """One loss, for all that are like it.

    Attributes:
        kind: such as "a device", or "a rack".
        names: what is lost, as `Topology.without` takes it.
    """

    kind: str
    names: tuple[str, ...]
    num_alike: int

    def describe(self) -> str:
        """Return a text such as "a rack: host-0 to host-3, 4 hosts"."""
        first, last = self.names[0], self.names[-1]
        lost = (
            f"{first} to {last}, {len(self.names)} hosts" if len(self.names) > 2 else " and ".join(self.names)
        )
        return f"{self.kind}: {lost}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossEstimate:
    """What a loss makes of a plan, by the cost model.

    Attributes:
        best: the fastest plan that a job can run with what is left, and what precedes its first step. A pipeline keeps
            its axes, and replicas inside hosts stay inside, as far as such a plan fits.
        kept: the plan before, its program on as many replicas as are left; None: it does not fit.
        kept_stages_s: a step in which the replicas that have lost a host compute nothing, in seconds; 0: the plan is no
            pipeline, or no replica is complete.
        unequal: a faster plan of unequal teams that no job runs; None: there is none.
    """

    best: ReplanOption
    kept: ReplanOption | None
    kept_stages_s: float
    unequal: ReplanOption | None


def list_possible_losses(topology: Topology) -> list[PossibleLoss]:
    """Return a loss of each kind: a device, a host, two hosts, and a failure domain of each level and size.

    Hosts of one accelerator, with as many devices of the same speeds, are alike; the last of them stands for all. Two
    hosts are of different failure domains where there are several. A loss that leaves no host is none of them.
    """
    losses = [loss for loss in _list_losses(topology) if _is_survivable(topology, loss)]
    return list({loss.names: loss for loss in reversed(losses)}.values())[::-1]


def estimate_loss(
    plan: Plan, topology: Topology, lost: Collection[str], *, min_replicas: int = 1
) -> LossEstimate:
    """Return what a loss makes of a plan.

    Args:
        topology: topology on which the plan runs, before the loss.
        lost: hosts and devices, as `Topology.without` takes them.
        min_replicas: as in `replan`.

    Raises:
        PlanError: no plan fits what is left, or it is too little for as many replicas.
    """
    now, hosts = topology.without(*lost), {name for name in lost if "/" not in name}
    horizon = estimate_next_failure_s(now)
    # Programs for fewer devices of a host are not compiled ahead.
    compile_s = 0.0 if 0 < len(hosts) == len(lost) <= COMPILED_AHEAD_HOSTS else DEFAULT_COMPILE_S

    def price(after: Plan) -> ReplanOption:
        return make_option(plan, after, horizon, 0.0, 0.0 if is_same_program(plan, after) else compile_s)

    kept = try_keep(plan, now, min_replicas)
    plans = [kept] if kept is not None else []
    if kept is None or plan.layout.axes.pipeline == 1:
        plans.append(_search_best(plan, now, min_replicas))
    options = [price(after) for after in plans]
    unequal = try_unequal(plan, now, horizon, 0.0, compile_s, min_replicas)
    if unequal is not None and _can_run(unequal.plan, plan):
        options.append(unequal)
    best = min(options, key=lambda option: option.step_time_s)
    return LossEstimate(
        best=best,
        kept=price(kept) if kept is not None else None,
        kept_stages_s=_price_kept_stages_s(plan, topology, hosts),
        unequal=unequal if unequal is not None and unequal.step_time_s < best.step_time_s else None,
    )


def _search_best(plan: Plan, now: Topology, min_replicas: int) -> Plan:
    """Return the fastest plan that may follow: after one that is no pipeline none, and with replicas inside hosts if it
    has them; after a pipeline, whose axes do not fit any more, any.
    """
    given = {Axis.PIPELINE: 1} if plan.layout.axes.pipeline == 1 else {}
    request = plan.request
    found = search_plans(
        request.program_cost,
        now,
        global_batch=request.global_batch,
        calibration=request.calibration,
        constraints=PlanConstraints(given, min_replicas=min_replicas),
        number_format=request.number_format,
        top=MAX_PLANS,
    )
    inside = [one for one in found if one.layout.host_slots == 1]
    return inside[0] if plan.layout.host_slots == 1 and inside else found[0]


def _can_run(after: Plan | UnequalPlan, before: Plan) -> bool:
    """Return whether a job can go on with unequal teams: they share no host, and are pipelines only if it was one."""
    assert isinstance(after, UnequalPlan), "equal replicas are searched apart"
    hosts = [host.name for team in after.teams for host in team.plan.request.topology.hosts]
    layouts = [team.plan.layout for team in after.teams]
    # Each stage is on a host, as is a replica without stages.
    if len(set(hosts)) < len(hosts) or any(layout.axes.pipeline != layout.host_slots for layout in layouts):
        return False
    was = before.layout.axes
    if was.pipeline == 1:
        return all(layout.axes.pipeline == 1 for layout in layouts)
    # A pipeline keeps the axes of its stages' devices, and some replica may have fewer stages.
    return all(
        layout.axes.pipeline <= was.pipeline and layout.axes._replace(pipeline=was.pipeline) == was
        for layout in layouts
    )


def _price_kept_stages_s(plan: Plan, topology: Topology, lost: set[str]) -> float:
    if plan.layout.axes.pipeline == 1 or not lost:
        return 0.0
    placed = place_replicas(topology, plan.request.pool, plan.layout, plan.compositions, plan.blocks)
    replicas = [{topology.hosts[place].name for place in places} for places in placed]
    broken = [hosts for hosts in replicas if hosts & lost]
    out = lost.union(*broken)
    if not broken or len(out) == len(topology.hosts):
        return 0.0
    kept = try_keep(plan, topology.without(*out), 1)
    return kept.step_time_s if kept is not None else 0.0


def _list_losses(topology: Topology) -> Iterator[PossibleLoss]:
    alike: dict[object, list[Host]] = collections.defaultdict(list)
    for host in topology.hosts:
        alike[host.accelerator, host.devices, host.device_speeds, host.speed].append(host)
    for hosts in alike.values():
        last = hosts[-1]
        if last.devices > 1:
            indexes = range(last.devices + len(last.lost_devices))
            index = max(set(indexes) - set(last.lost_devices))
            names = (f"{last.name}/{index}",)
            yield PossibleLoss(kind="a device", names=names, num_alike=len(hosts) * last.devices)
    for hosts in alike.values():
        yield PossibleLoss(kind="a host", names=(hosts[-1].name,), num_alike=len(hosts))
    if (pair := _find_pair(topology)) is not None:
        num_hosts = len(topology.hosts)
        yield PossibleLoss(kind="two hosts", names=pair, num_alike=num_hosts * (num_hosts - 1) // 2)
    for level in topology.failure_levels[1:]:
        sizes: dict[int, list[tuple[str, ...]]] = collections.defaultdict(list)
        for domain in topology.domains(level):
            sizes[len(domain.hosts)].append(tuple(domain.hosts))
        for domains in sizes.values():
            yield PossibleLoss(kind=f"a {level}", names=domains[-1], num_alike=len(domains))


def _find_pair(topology: Topology) -> tuple[str, str] | None:
    if len(topology.hosts) < 3:
        return None
    *others, last = topology.hosts
    apart = [host for host in others if host.domains[-1:] != last.domains[-1:]]
    return (apart or others)[-1].name, last.name


def _is_survivable(topology: Topology, loss: PossibleLoss) -> bool:
    hosts = {name.partition("/")[0] for name in loss.names}
    return any("/" in name for name in loss.names) or len(hosts) < len(topology.hosts)
