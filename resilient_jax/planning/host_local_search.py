"""The best plan whose replicas are each inside one host, for programs that compute one microbatch per call."""

from collections.abc import Iterator, Mapping

from resilient_jax.planning.axes import Axis, AxisSizes, parse_axis_sizes
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.errors import NoFeasiblePlan, PlanError
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_explanation import explain_choice
from resilient_jax.planning.plan_request import NO_FIXED_AXES, PlanConstraints
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search import DEFAULT_CALIBRATION, search_plans
from resilient_jax.topology import Topology

MAX_PLANS_PER_SEARCH = 16
"""Replica axes considered for each number of replicas and size of FSDP: more than exist on a host."""


def search_host_local_plan(
    program_cost: ProgramCost,
    topology: Topology,
    *,
    microbatch_size: int,
    global_batch: int,
    calibration: Calibration = DEFAULT_CALIBRATION,
    axes: AxisSizes = NO_FIXED_AXES,
) -> Plan:
    """Return the fastest plan in which a host has one replica or several, each with microbatches of `microbatch_size`.

    Losing a host then leaves all other replicas complete.

    Args:
        program_cost: cost of the program, for one example.
        topology: the available hosts.
        microbatch_size: examples that a replica computes at a time, under every plan.
        global_batch: examples in a step.
        calibration: constants of the cost model.
        axes: sizes that are given; pipelines are not considered.

    Raises:
        NoFeasiblePlan: no such plan fits in memory.
        PlanError: hosts have different numbers of devices, or no plan satisfies the request.
    """
    devices = {host.devices for host in topology.hosts}
    if len(devices) != 1:
        raise PlanError(
            f"topology {topology.name}: found hosts with {sorted(devices)} devices, expected as many on each: a "
            "replica has the same axes wherever it is"
        )
    errors: list[PlanError] = []
    found: list[Plan] = []
    for given in _choices(topology, min(devices), microbatch_size, parse_axis_sizes(axes)):
        try:
            found += search_plans(
                program_cost,
                topology,
                global_batch=global_batch,
                calibration=calibration,
                constraints=PlanConstraints(
                    given, MicrobatchConfig(sequences=microbatch_size // given[Axis.FSDP])
                ),
                top=MAX_PLANS_PER_SEARCH,
            )
        # The program does not allow such axes, or no plan with them fits.
        except PlanError as error:
            errors.append(error)
    filling = [
        plan for plan in found if plan.layout.devices_per_slot == min(devices) and not plan.devices_spare
    ]
    if filling:
        return explain_choice(sorted(filling, key=lambda plan: plan.step_time_s))[0]
    infeasible = [error for error in errors if isinstance(error, NoFeasiblePlan)]
    if infeasible:
        raise infeasible[0]
    raise PlanError(
        f"{program_cost.name}: found no plan on {topology.name} in which replicas fill hosts of {min(devices)} devices "
        f"with microbatches of {microbatch_size} examples, expected one. Take microbatches of a multiple of "
        f"{min(devices)} examples, at least as many of them as hosts, or other given axes ({dict(axes) or 'none'})"
    )


def _choices(
    topology: Topology, devices: int, microbatch_size: int, axes: Mapping[Axis, int]
) -> Iterator[dict[Axis, int]]:
    """Yield numbers of replicas that use all devices, with sizes of FSDP that divide replica and microbatch."""
    for width in range(1, devices + 1):
        # width: devices of a replica, a divisor of the host's; R = hosts devices / width; f divides width and
        # microbatch.
        replicas, rest = divmod(len(topology.hosts) * devices, width)
        for fsdp in range(1, width + 1):
            if devices % width or rest or width % fsdp or microbatch_size % fsdp:
                continue
            given = {Axis.REPLICA: replicas, Axis.FSDP: fsdp, Axis.PIPELINE: 1}
            if all(given.get(axis, size) == size for axis, size in axes.items()):
                yield {**axes, **given}
