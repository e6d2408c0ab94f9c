"""The search for a plan of unequal teams: where equal replicas leave devices out, every device can work.

1. Hosts with all devices at full speed stay together, but for a few; the others, by kind, are cut into slices of their
   devices: 7 into 7, 4 + 3, 3 + 2 + 2, ... (Chameleon, arXiv 2508.21613, partitions integers of devices in this way.)
   Those few whole hosts and the others may also form one part that spans hosts, for a model that fits in no host.
2. Each part gets the plan of `search` for its share of the batch; a part without a plan is left out.
3. Whole microbatches are assigned so that the teams add up to the batch and the last is done soonest (`team_quotas`).
4. Gradients are added up inside of hosts, then between hosts over the links of the level that connects them.

Not exact, unlike `search`: it compares the partitions above. A caller takes the best of both.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from resilient_jax.errors import CallerError
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search import DEFAULT_CALIBRATION, search_plan
from resilient_jax.planning.team_quotas import TeamRate, find_quotas
from resilient_jax.planning.team_reduction import TeamReduction
from resilient_jax.planning.unequal_plan import Team, UnequalPlan, explain_teams, list_machines
from resilient_jax.topology import Host, Topology

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

Part = tuple[Host, ...]
"""Hosts, each with the devices that one team uses."""


def search_unequal_plan(
    program_cost: ProgramCost,
    topology: Topology,
    *,
    global_batch: int,
    calibration: Calibration = DEFAULT_CALIBRATION,
    number_format: str | None = None,
    min_replicas: int = 1,
) -> UnequalPlan | None:
    """Return the fastest plan of unequal teams that was found; None if there is none.

    Args:
        topology: the available hosts, with unequal numbers of devices or speeds.
        global_batch: sequences in a step.
        number_format: as in `search_plan`.
        min_replicas: least number of replicas of the state, over all teams.

    Example:
        >>> search_unequal_plan(cost, topology.without("host-1/3"), global_batch=128).shape  # doctest: +SKIP
        'fsdp 8 and pipeline 7'
    """
    if len(topology.hosts) > MAX_HOSTS:
        return None
    search = _TeamSearch(program_cost, topology, global_batch, calibration, number_format)
    best: UnequalPlan | None = None
    for taken in range(MAX_WHOLE_HOSTS + 1):
        for least_s, plans in search.list_combinations(_list_partitions(topology.hosts, taken), min_replicas):
            limit_s = math.inf if best is None else best.step_time_s
            if least_s >= limit_s:
                break
            found = search.combine(plans, limit_s)
            if found is not None and found.replicas >= min_replicas and found.step_time_s < limit_s:
                best = found
        if best is not None and not best.devices_spare:
            break  # whole hosts need not leave the others
    return best


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


class _TeamSearch:
    """The plans of parts, each searched once, and their combinations."""

    def __init__(
        self,
        program_cost: ProgramCost,
        topology: Topology,
        global_batch: int,
        calibration: Calibration,
        number_format: str | None,
    ) -> None:
        self._program_cost = program_cost
        self._topology = topology
        self._batch = global_batch
        self._calibration = calibration
        self._number_format = number_format
        self._reduction = TeamReduction(program_cost, topology, calibration)
        self._speed = sum(_get_speed(host) for host in topology.hosts)
        self._plans: dict[Part, tuple[Plan, ...]] = {}
        self._rates: dict[int, TeamRate] = {}

    def find_plans(self, part: Part) -> tuple[Plan, ...]:
        """Return different plans of a part, for its share of the batch and numbers near it."""
        if part not in self._plans:
            fluid = self._batch * sum(map(_get_speed, part)) / self._speed
            steps = (*SHARE_STEPS, SHARE_STEPS[-1] * len(part))
            shares = {min(self._batch, max(1, round(fluid / step)) * step) for step in steps}
            found = {}
            for share in sorted(shares):
                plan = self._search(part, share)
                if plan is not None:
                    found.setdefault((plan.layout.axes, plan.microbatch, plan.replicas), plan)
            self._plans[part] = tuple(found.values())
        return self._plans[part]

    def _search(self, part: Part, share: int) -> Plan | None:
        try:
            return search_plan(
                self._program_cost,
                dataclasses.replace(self._topology, hosts=part),
                global_batch=share,
                calibration=self._calibration,
                number_format=self._number_format,
            )
        except CallerError:  # nothing fits, the share is too small for the part, or its devices divide no dim
            return None

    def _get_rate(self, plan: Plan) -> TeamRate:
        if id(plan) not in self._rates:
            self._rates[id(plan)] = TeamRate(plan.microbatch_sequences, list_machines(plan))
        return self._rates[id(plan)]

    def list_combinations(
        self, partitions: Iterable[Sequence[Part]], min_replicas: int
    ) -> list[tuple[float, tuple[Plan, ...]]]:
        """Return the teams of all partitions, and seconds that no step of theirs is shorter than, ascending."""
        found = []
        for parts in partitions:
            able = [plans for part in parts if (plans := self.find_plans(part))]
            for plans in itertools.product(*able) if able else ():
                if sum(plan.replicas for plan in plans) >= min_replicas:
                    found.append((self._bound_s(plans), plans))
        return sorted(found, key=lambda one: one[0])

    def _bound_s(self, plans: Sequence[Plan]) -> float:
        """Return what a step takes at least: as if sequences could be divided, and without the all-reduce."""
        sequences_per_s = sum(self._get_rate(plan).sequences_per_s for plan in plans)
        return self._batch / sequences_per_s + max(plan.step_breakdown.optimizer_s for plan in plans)

    def combine(self, plans: Sequence[Plan], limit_s: float) -> UnequalPlan | None:
        """Return the plan of these teams; None if their microbatches cannot add up, or not below the limit."""
        # step = max_i makespan_i(n_i) + all-reduce + update, in s.
        after_s = self._reduction.estimate_s(plans) + max(plan.step_breakdown.optimizer_s for plan in plans)
        quotas = find_quotas(self._batch, [self._get_rate(plan) for plan in plans], limit_s - after_s)
        if quotas is None:
            return None
        teams = tuple(
            Team(plan=plan, microbatches=number) for plan, number in zip(plans, quotas, strict=True) if number
        )
        used = [team.plan for team in teams]
        return UnequalPlan(
            teams=teams,
            global_batch=self._batch,
            device_count=self._topology.device_count,
            gradient_all_reduce_s=self._reduction.estimate_s(used),
            optimizer_s=max(plan.step_breakdown.optimizer_s for plan in used),
            reason=explain_teams(teams),
        )


def _get_speed(host: Host) -> float:
    return host.devices * host.speed
