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
from collections.abc import Iterator, Sequence
from typing import Final

from resilient_jax.planning.axes import AxisSizes
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.host_local_search import list_host_local_plans
from resilient_jax.planning.makespan import TaskAssignment, assign_tasks
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_request import NO_FIXED_AXES
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search import DEFAULT_CALIBRATION
from resilient_jax.planning.team_reduction import TeamReduction
from resilient_jax.planning.unequal_plan import Team, UnequalPlan, explain_teams, list_machines
from resilient_jax.topology import Topology

MIN_GAIN: Final = 0.05
"""A plan whose hosts differ in axes is taken if it is faster by this part of the step: its audits compare fewer hosts,
and each change of axes compiles programs."""
MAX_COMBINATIONS: Final = 4096
"""Of the axes of each number of devices; beyond, those with the slowest replicas are left out first."""


def search_host_axes_plan(
    program_cost: ProgramCost,
    topology: Topology,
    *,
    microbatch_size: int,
    global_batch: int,
    calibration: Calibration = DEFAULT_CALIBRATION,
    axes: AxisSizes = NO_FIXED_AXES,
    equal_step_s: float = math.inf,
) -> UnequalPlan | None:
    """Return the fastest plan with a team for each number of devices that hosts have.

    None where all have as many, where a team has no plan that fits, or where equal axes are as fast, less `MIN_GAIN`.

    Args:
        program_cost: cost of the program, for one example.
        topology: the available hosts.
        microbatch_size: examples that a replica computes at a time, in every team.
        global_batch: examples in a step.
        calibration: constants of the cost model.
        axes: sizes that are given to every team.
        equal_step_s: a step of the best plan with equal axes, as `search_host_local_plan` estimates it.
    """
    parts = list(_split_by_devices(topology))
    if len(parts) == 1:
        return None
    choices = [
        list_host_local_plans(
            program_cost,
            part,
            microbatch_size=microbatch_size,
            global_batch=global_batch,
            calibration=calibration,
            axes=axes,
        )[0]
        for part in parts
    ]
    most = max(1, int(MAX_COMBINATIONS ** (1 / len(parts))))
    reduction = TeamReduction(program_cost, topology, calibration)
    best: UnequalPlan | None = None
    # Priced as unequal teams are, too: the two estimates of an all-reduce differ.
    best_equal_s = equal_step_s
    for plans in itertools.product(*(plans[:most] for plans in choices)):
        found = _combine(plans, topology, global_batch // microbatch_size, reduction)
        if len({plan.layout.axes for plan in plans}) == 1:
            best_equal_s = min(best_equal_s, found.step_time_s)
        elif best is None or found.step_time_s < best.step_time_s:
            best = found
    return best if best is not None and best.step_time_s < (1 - MIN_GAIN) * best_equal_s else None


def _split_by_devices(topology: Topology) -> Iterator[Topology]:
    """Yield the topology of the hosts with each number of devices, most first."""
    for number in sorted({host.devices for host in topology.hosts}, reverse=True):
        hosts = tuple(host for host in topology.hosts if host.devices == number)
        yield dataclasses.replace(topology, hosts=hosts)


def _combine(
    plans: Sequence[Plan], topology: Topology, num_microbatches: int, reduction: TeamReduction
) -> UnequalPlan:
    machines = [list_machines(plan) for plan in plans]
    assigned = assign_tasks(num_microbatches, list(itertools.chain(*machines)))
    counts = iter(_count_tasks(assigned))
    teams = tuple(
        Team(plan=plan, microbatches=sum(next(counts) for _ in own))
        for plan, own in zip(plans, machines, strict=True)
    )
    return UnequalPlan(
        teams=teams,
        global_batch=num_microbatches * plans[0].microbatch_sequences,
        device_count=topology.device_count,
        gradient_all_reduce_s=reduction.estimate_s(plans),
        optimizer_s=max(plan.step_breakdown.optimizer_s for plan in plans),
        reason=explain_teams(teams),
    )


def _count_tasks(assigned: TaskAssignment) -> Iterator[int]:
    """Yield the tasks of each class of machines."""
    for classes in assigned.task_counts:
        yield sum(machines * tasks for machines, tasks in classes)
