"""The best plan in which hosts with other numbers of devices have replicas with other axes.

Equal replicas leave devices out where hosts have unequal numbers of them, or take axes that suit none: of a host with
four devices and one with three, replicas of two leave one out. Here each number of devices has axes of its own, such as
tensor 4 on the one host and tensor 3 on the other, or one device a replica.

All combinations of the axes that fit are compared. A step takes as long as its slowest replica, with whole microbatches
assigned so that the last is done soonest, and then the all-reduce and the update.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from resilient_jax.pipeline_schedule.makespan import MachineClass, TaskAssignment, assign_tasks
from resilient_jax.planning.host_local_search import list_host_local_plans
from resilient_jax.planning.microbatch_request import MicrobatchRequest
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.team_reduction import TeamReduction
from resilient_jax.planning.unequal_plan import Team, UnequalPlan, explain_teams, list_machines

MIN_GAIN: Final = 0.05
"""A plan whose hosts differ in axes is taken if it is faster by this part of the step: its audits compare fewer hosts,
and each change of axes compiles programs."""
MAX_COMBINATIONS: Final = 4096
"""Of the axes of each number of devices; beyond, those with the slowest replicas are left out first."""


class _TeamPlan(NamedTuple):
    """A plan of one part, with its replicas as machines."""

    plan: Plan
    machines: tuple[MachineClass, ...]


def search_host_axes_plan(
    request: MicrobatchRequest, *, equal_step_s: float = math.inf
) -> UnequalPlan | None:
    """Return the fastest plan with a team for each number of devices that hosts have.

    None where all have as many, where a team has no plan that fits, or where equal axes are as fast, less `MIN_GAIN`.

    Args:
        request: axes that the request gives are those of every team.
        equal_step_s: a step of the best plan with equal axes, as `search_host_local_plan` estimates it.
    """
    parts = list(_split_by_devices(request))
    if len(parts) == 1:
        return None
    choices = [list_host_local_plans(part, allows_spare=True)[0] for part in parts]
    most = max(1, int(MAX_COMBINATIONS ** (1 / len(parts))))
    teams = [[_TeamPlan(plan, tuple(list_machines(plan))) for plan in plans[:most]] for plans in choices]
    reduction = TeamReduction(request.program_cost, request.topology, request.calibration)
    best: UnequalPlan | None = None
    # Priced as unequal teams are, too: the two estimates of an all-reduce differ.
    best_equal_s = equal_step_s
    for chosen in itertools.product(*teams):
        is_equal = len({team.plan.layout.axes for team in chosen}) == 1
        limit_s = best_equal_s
        if not is_equal:
            limit_s = min((1 - MIN_GAIN) * best_equal_s, math.inf if best is None else best.step_time_s)
        found = _combine(chosen, request, reduction, limit_s)
        if found is None:
            continue
        if is_equal:
            best_equal_s = found.step_time_s
        else:
            best = found
    return best if best is not None and best.step_time_s < (1 - MIN_GAIN) * best_equal_s else None


def make_host_axes_plan(
    request: MicrobatchRequest, axes_by_devices: Mapping[int, Mapping[str, int]]
) -> UnequalPlan | None:
    """Return the plan with a team for each number of devices that hosts have, of given axes; None: one does not fit.

    Args:
        request: axes that the request gives do not count.
        axes_by_devices: axes of a replica, by the number of devices of its host.
    """
    teams = []
    for part in _split_by_devices(request):
        axes = axes_by_devices[part.topology.hosts[0].devices]
        plans, _ = list_host_local_plans(dataclasses.replace(part, axes=axes), allows_spare=True)
        if not plans:
            return None
        teams.append(_TeamPlan(plans[0], tuple(list_machines(plans[0]))))
    reduction = TeamReduction(request.program_cost, request.topology, request.calibration)
    return _combine(teams, request, reduction, math.inf)


def _split_by_devices(request: MicrobatchRequest) -> Iterator[MicrobatchRequest]:
    """Yield the request for the hosts with each number of devices, most first."""
    topology = request.topology
    for number in sorted({host.devices for host in topology.hosts}, reverse=True):
        hosts = tuple(host for host in topology.hosts if host.devices == number)
        yield dataclasses.replace(request, topology=dataclasses.replace(topology, hosts=hosts))


def _combine(
    chosen: Sequence[_TeamPlan],
    request: MicrobatchRequest,
    reduction: TeamReduction,
    limit_s: float,
) -> UnequalPlan | None:
    """Return the plan of these teams; None if its step is not shorter than the limit."""
    assigned = assign_tasks(request.num_microbatches, [one for team in chosen for one in team.machines])
    plans = [team.plan for team in chosen]
    optimizer_s = max(plan.step_breakdown.optimizer_s for plan in plans)
    # The all-reduce takes longer to estimate than all else, and most combinations are too slow without it.
    if assigned.makespan_s + optimizer_s >= limit_s:
        return None
    all_reduce_s = reduction.estimate_s(plans)
    if assigned.makespan_s + optimizer_s + all_reduce_s >= limit_s:
        return None
    counts = iter(_count_tasks(assigned))
    teams = tuple(
        Team(plan=team.plan, microbatches=sum(next(counts) for _ in team.machines)) for team in chosen
    )
    return UnequalPlan(
        teams=teams,
        global_batch=request.global_batch,
        device_count=request.topology.device_count,
        gradient_all_reduce_s=all_reduce_s,
        optimizer_s=optimizer_s,
        reason=explain_teams(teams),
    )


def _count_tasks(assigned: TaskAssignment) -> Iterator[int]:
    """Yield the tasks of each class of machines."""
    for classes in assigned.task_counts:
        yield sum(machines * tasks for machines, tasks in classes)
