"""The search for a plan of unequal teams: where equal replicas leave devices out, every device can work.

Hosts are divided into parts, each part has plans of `search`, and of all combinations of them the fastest is taken:
whole microbatches are divided so that the teams add up to the batch and the last is done soonest (`makespan`), and
gradients are added up inside of hosts, then between hosts over the links of the level that connects them.

The parts of `search_unequal_plan`: hosts with all devices at full speed stay together, but for a few; the others, by
kind, are cut into slices of their devices: 7 into 7, 4 + 3, 3 + 2 + 2, ... (Chameleon, arXiv 2508.21613, partitions
integers of devices in this way.) Those few whole hosts and the others may also form one part that spans hosts, for a
model that fits in no host. Each part has the plans for its share of the batch; a part without a plan is left out. Not
exact, unlike `search`: it compares these partitions. A caller takes the best of both.

The parts of `search_host_axes_plan`: hosts with as many devices as each other, whose replicas are inside hosts, with
microbatches of a given size. A host of four devices and one of three have tensor 4 and tensor 3, or one device a
replica, where equal replicas of two leave one out.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final

from resilient_jax.errors import CallerError
from resilient_jax.pipeline_schedule.makespan import MachineTeam, divide_work
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_request import HostUse, PlanConstraints, PlanRequest
from resilient_jax.planning.search import search_best
from resilient_jax.planning.team_reduction import TeamReduction
from resilient_jax.planning.unequal_plan import Team, UnequalPlan, explain_teams, list_machines
from resilient_jax.topology import Host

MAX_HOSTS = 1024
"""No larger topologies are searched: where one device of thousands is left out, nothing can be won."""
MAX_WHOLE_HOSTS = 3
"""Whole hosts that may leave the others to form a part with hosts that lost devices."""
MAX_SLICES = 3
"""Slices of a host: a team of fewer devices holds, and adds up, more of the gradients on each."""
MAX_KINDS = 2
"""Kinds of hosts that are cut in slices."""
SHARE_STEPS = (1, 8, 16)
"""A part's share of the batch is rounded to these, and to the last for each host: FSDP and replicas can divide it."""

MIN_GAIN: Final = 0.05
"""A plan whose hosts differ in axes is taken if it is faster by this part of the step: its audits compare fewer hosts,
and each change of axes compiles programs."""
MAX_COMBINATIONS: Final = 4096
"""Of the axes of each number of devices; beyond, those with the slowest replicas are left out first."""

Part = tuple[Host, ...]
"""Hosts, each with the devices that one team uses."""


def search_unequal_plan(request: PlanRequest, min_replicas: int = 1) -> UnequalPlan | None:
    """Return the fastest plan of unequal teams that was found; None if there is none.

    Args:
        request: hosts and devices of it may be unequal, in number or speed.
        min_replicas: least number of replicas of the state, over all teams.
    """
    topology = request.topology
    if len(topology.hosts) > MAX_HOSTS:
        return None
    search = _TeamSearch(request, min_replicas=min_replicas)
    share_plans = _SharePlans(request)
    best: UnequalPlan | None = None
    for taken in range(MAX_WHOLE_HOSTS + 1):
        combinations = share_plans.list_combinations(_list_partitions(topology.hosts, taken))
        limit_s = math.inf if best is None else best.step_time_s
        best = search.find_fastest(combinations, limit_s) or best
        if best is not None and not best.devices_spare:
            break  # whole hosts need not leave the others
    return best


def search_host_axes_plan(
    request: PlanRequest, constraints: PlanConstraints, *, equal_step_s: float = math.inf
) -> UnequalPlan | None:
    """Return the fastest plan with a team for each number of devices that hosts have.

    None where all have as many, where a team has no plan that fits, or where equal axes are as fast, less `MIN_GAIN`.

    Args:
        constraints: what `constrain_to_hosts` returns, for each team, which may leave devices out besides.
        equal_step_s: a step of the best plan with equal axes.
    """
    counts = {host.devices for host in request.topology.hosts}
    if len(counts) == 1:
        return None
    most = max(1, int(MAX_COMBINATIONS ** (1 / len(counts))))
    choices = _search_parts(request, dict.fromkeys(counts, constraints), most)
    search = _TeamSearch(request, keeps_idle=True)
    combinations = list(itertools.product(*choices)) if choices else []
    are_equal = [len({plan.layout.axes for plan in plans}) == 1 for plans in combinations]
    # Those with equal axes are priced as unequal teams are, too: the two estimates of an all-reduce differ.
    equal = search.find_fastest(itertools.compress(combinations, are_equal), equal_step_s)
    if equal is not None:
        equal_step_s = equal.step_time_s
    others = [plans for plans, is_equal in zip(combinations, are_equal, strict=True) if not is_equal]
    return search.find_fastest(others, (1 - MIN_GAIN) * equal_step_s)


def make_host_axes_plan(
    request: PlanRequest, constraints_by_devices: Mapping[int, PlanConstraints]
) -> UnequalPlan | None:
    """Return the plan with a team for each number of devices that hosts have, of given axes; None: one does not fit.

    Args:
        constraints_by_devices: the constraints of each team, by the number of devices of its hosts.
    """
    choices = _search_parts(request, constraints_by_devices, 1)
    search = _TeamSearch(request, keeps_idle=True)
    return search.combine([plans[0] for plans in choices], math.inf) if choices else None


def _search_parts(
    request: PlanRequest, constraints_by_devices: Mapping[int, PlanConstraints], top: int
) -> list[tuple[Plan, ...]]:
    """Return the best plans of the hosts with each number of devices, most devices first; [] if some have none."""
    parts: dict[int, list[Host]] = {}
    for host in sorted(request.topology.hosts, key=lambda host: -host.devices):
        parts.setdefault(host.devices, []).append(host)
    try:
        return [
            search_best(
                request.on_hosts(hosts, request.global_batch),
                constraints_by_devices[devices]._replace(host_use=HostUse.INSIDE),
                top,
            )
            for devices, hosts in parts.items()
        ]
    except CallerError:  # no plan fits, or no tensor of the program can be divided so
        return []


def _list_partitions(hosts: Sequence[Host], taken: int) -> Iterator[tuple[Part, ...]]:
    """Yield the partitions of the hosts' devices into parts, of which the first has all but `taken` whole hosts."""
    kinds: dict[tuple[str, int, float, float], list[Host]] = {}
    for host in itertools.chain.from_iterable(map(_split_by_speed, hosts)):
        kinds.setdefault((host.accelerator.name, host.devices, host.speed, host.link_speed), []).append(host)
    main_kind = max(kinds, key=lambda kind: (kind[1] * kind[2], kind[3], len(kinds[kind])))
    whole = kinds.pop(main_kind)
    groups = [tuple(group) for group in (whole[:taken], *kinds.values()) if group]
    if taken >= len(whole) or not groups:
        return
    main = tuple(whole[taken:])
    together = tuple(itertools.chain(*groups))
    # Devices of a host that differ in speed are in teams of their own.
    if len({host.name for host in together}) == len(together):
        yield main, together
    if len(groups) <= MAX_KINDS:
        for slices in itertools.product(*map(_slice_hosts, groups)):
            yield main, *itertools.chain(*slices)


def _split_by_speed(host: Host) -> Iterator[Host]:
    """Yield a host for the devices of each speed."""
    counts = Counter(host.device_speeds or (host.speed,) * host.devices)
    for speed, devices in sorted(counts.items(), reverse=True):
        yield dataclasses.replace(host, devices=devices, speed=speed, device_speeds=(), lost_devices=())


def _slice_hosts(hosts: Part) -> Iterator[tuple[Part, ...]]:
    """Yield the ways to cut equal hosts into slices of their devices, all alike."""
    for sizes in _partition(hosts[0].devices, MAX_SLICES):
        yield tuple(tuple(dataclasses.replace(host, devices=size) for host in hosts) for size in sizes)


def _partition(number: int, most_parts: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """Yield the partitions of a number into at most so many parts, largest first.

    >>> list(_partition(4, 2))
    [(4,), (3, 1), (2, 2)]
    """
    if number == 0:
        yield ()
    elif most_parts:
        for first in range(min(number, largest or number), 0, -1):
            for rest in _partition(number - first, most_parts - 1, first):
                yield (first, *rest)


class _SharePlans:
    """The plans of parts for their shares of the batch, each searched once."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._speed = sum(_get_speed(host) for host in request.topology.hosts)
        self._plans: dict[Part, tuple[Plan, ...]] = {}

    def list_combinations(self, partitions: Iterable[Sequence[Part]]) -> Iterator[tuple[Plan, ...]]:
        """Yield the teams of all partitions."""
        for parts in partitions:
            able = [plans for part in parts if (plans := self._find_plans(part))]
            if able:
                yield from itertools.product(*able)

    def _find_plans(self, part: Part) -> tuple[Plan, ...]:
        """Return different plans of a part, for its share of the batch and numbers near it."""
        if part not in self._plans:
            fluid = self._request.global_batch * sum(map(_get_speed, part)) / self._speed
            steps = (*SHARE_STEPS, SHARE_STEPS[-1] * len(part))
            shares = {min(self._request.global_batch, max(1, round(fluid / step)) * step) for step in steps}
            found = {}
            for share in sorted(shares):
                plan = self._search(part, share)
                if plan is not None:
                    found.setdefault((plan.layout.axes, plan.microbatch, plan.replicas), plan)
            self._plans[part] = tuple(found.values())
        return self._plans[part]

    def _search(self, part: Part, share: int) -> Plan | None:
        try:
            return search_best(self._request.on_hosts(part, share))[0]
        except CallerError:  # nothing fits, the share is too small for the part, or its devices divide no dim
            return None


def _get_speed(host: Host) -> float:
    return host.devices * host.speed


class _TeamSearch:
    """Combines the plans of teams to plans of all devices.

    Args:
        min_replicas: least number of replicas of the state, over all teams.
        keeps_idle: whether a team without microbatches is a part of the plan, as its hosts hold the state.
    """

    def __init__(self, request: PlanRequest, *, min_replicas: int = 1, keeps_idle: bool = False) -> None:
        self._request = request
        self._min_replicas = min_replicas
        self._keeps_idle = keeps_idle
        self._reduction = TeamReduction(request.program_cost, request.topology, request.calibration)
        self._machines: dict[tuple[object, ...], MachineTeam] = {}

    def find_fastest(self, combinations: Iterable[tuple[Plan, ...]], limit_s: float) -> UnequalPlan | None:
        """Return the fastest plan of any of these teams; None if there is none whose step is shorter than the limit."""
        bounds = [(self._bound_s(plans), plans) for plans in combinations]
        best: UnequalPlan | None = None
        for least_s, plans in sorted(bounds, key=itemgetter(0)):
            if least_s >= limit_s:
                break
            found = self.combine(plans, limit_s)
            if found is not None and found.step_time_s < limit_s:
                best, limit_s = found, found.step_time_s
        return best

    def _bound_s(self, plans: Sequence[Plan]) -> float:
        """Return what a step takes at least: as if sequences could be divided, and without the all-reduce."""
        speed = sum(self._get_machines(plan).speed for plan in plans)
        return self._request.global_batch / speed + max(plan.step_breakdown.optimizer_s for plan in plans)

    def _get_machines(self, plan: Plan) -> MachineTeam:
        key = (plan.layout.axes, plan.microbatch, plan.replica_classes)
        if key not in self._machines:
            machines = tuple(list_machines(plan))
            self._machines[key] = MachineTeam(task_size=plan.microbatch_sequences, machines=machines)
        return self._machines[key]

    def combine(self, plans: Sequence[Plan], limit_s: float) -> UnequalPlan | None:
        """Return the plan of these teams; None if microbatches cannot add up, not by the limit, or replicas are few."""
        # step = max_i makespan_i(n_i) + all-reduce + update, in s.
        after_s = self._reduction.estimate_s(plans) + max(plan.step_breakdown.optimizer_s for plan in plans)
        counts = divide_work(
            self._request.global_batch, [self._get_machines(plan) for plan in plans], limit_s - after_s
        )
        if counts is None:
            return None
        # Why a plan was the best of its part says nothing about the teams together.
        teams = tuple(
            Team(plan=dataclasses.replace(plan, reasons=()), microbatches=number)
            for plan, number in zip(plans, counts, strict=True)
            if number or self._keeps_idle
        )
        used = [team.plan for team in teams]
        if sum(plan.replicas for plan in used) < self._min_replicas:
            return None
        return UnequalPlan(
            teams=teams,
            global_batch=self._request.global_batch,
            device_count=self._request.topology.device_count,
            gradient_all_reduce_s=self._reduction.estimate_s(used),
            optimizer_s=max(plan.step_breakdown.optimizer_s for plan in used),
            reason=explain_teams(teams),
        )
