"""The best plan whose replicas are each inside one host, for programs that compute one microbatch per call."""

import math
from collections.abc import Iterator, Mapping, Sequence

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
    evaluation_size: int | None = None,
) -> Plan:
    """Return the fastest plan in which a host has one replica or several, each with microbatches of `microbatch_size`.

    Losing a host then leaves all other replicas complete. All replicas have the same axes. A host with fewer devices
    than others has fewer of them; devices that are too few for one more are spare.

    Args:
        program_cost: cost of the program, for one example.
        topology: the available hosts.
        microbatch_size: examples that a replica computes at a time, under every plan.
        global_batch: examples in a step.
        calibration: constants of the cost model.
        axes: sizes that are given; pipelines are not considered.
        evaluation_size: examples of an evaluation's microbatch, which FSDP shards, too; None: as in training.

    Raises:
        NoFeasiblePlan: no such plan fits in memory.
        PlanError: no plan satisfies the request.
    """
    found, errors = list_host_local_plans(
        program_cost,
        topology,
        microbatch_size=microbatch_size,
        global_batch=global_batch,
        calibration=calibration,
        axes=axes,
        evaluation_size=evaluation_size,
    )
    if found:
        return explain_choice(found)[0]
    infeasible = [error for error in errors if isinstance(error, NoFeasiblePlan)]
    if infeasible:
        raise infeasible[0]
    devices = [host.devices for host in topology.hosts]
    numbers = " or ".join(map(str, sorted(set(devices))))
    raise PlanError(
        f"{program_cost.name}: found no plan on {topology.name} in which replicas fill hosts of {numbers} devices "
        f"with microbatches of {microbatch_size} examples, expected one. Take microbatches of a multiple of "
        f"{min(devices)} examples, at least as many of them as hosts, or other given axes ({dict(axes) or 'none'})"
    )


def list_host_local_plans(
    program_cost: ProgramCost,
    topology: Topology,
    *,
    microbatch_size: int,
    global_batch: int,
    calibration: Calibration = DEFAULT_CALIBRATION,
    axes: AxisSizes = NO_FIXED_AXES,
    evaluation_size: int | None = None,
    allows_spare: bool = False,
) -> tuple[list[Plan], list[PlanError]]:
    """Return the plans of `search_host_local_plan`, the fastest first, and why other axes have none.

    With `allows_spare` hosts that have as many devices as each other may leave some out, such as one of seven.
    """
    devices = [host.devices for host in topology.hosts]
    fills_hosts = len(set(devices)) == 1 and not allows_spare
    # FSDP shards the examples of both.
    examples = math.gcd(microbatch_size, evaluation_size or microbatch_size)
    errors: list[PlanError] = []
    found: list[Plan] = []
    for width, given in _choices(devices, examples, parse_axis_sizes(axes), fills_hosts=fills_hosts):
        try:
            plans = search_plans(
                program_cost,
                topology,
                global_batch=global_batch,
                calibration=calibration,
                constraints=PlanConstraints(
                    given, MicrobatchConfig(sequences=microbatch_size // given[Axis.FSDP])
                ),
                top=MAX_PLANS_PER_SEARCH,
            )
            found += [
                plan
                for plan in plans
                if (_fills_hosts(plan) if fills_hosts else _is_inside_hosts(plan, width))
            ]
        # The program does not allow such axes, or no plan with them fits.
        except PlanError as error:
            errors.append(error)
    return sorted(found, key=lambda plan: plan.step_time_s), errors


def _fills_hosts(plan: Plan) -> bool:
    """Return whether a plan's replicas, each on one host, use all devices of equal hosts."""
    return plan.layout.devices_per_slot == plan.request.topology.hosts[0].devices and not plan.devices_spare


def _is_inside_hosts(plan: Plan, width: int) -> bool:
    """Return whether a plan's replicas have `width` devices each, all on one host."""
    return plan.layout.axes.devices == width and plan.layout.host_slots == 1


def _choices(
    devices: Sequence[int], examples: int, axes: Mapping[Axis, int], *, fills_hosts: bool
) -> Iterator[tuple[int, dict[Axis, int]]]:
    """Yield the devices of a replica, with numbers of replicas and sizes of FSDP that divide replica and examples."""
    for width in range(1, min(devices) + 1):
        # width: devices of a replica, a divisor of the host's where it fills hosts; R = sum over hosts
        # floor(devices / width); f divides width and examples.
        if fills_hosts and devices[0] % width:
            continue
        replicas = sum(count // width for count in devices)
        for fsdp in range(1, width + 1):
            if width % fsdp or examples % fsdp:
                continue
            given = {Axis.REPLICA: replicas, Axis.FSDP: fsdp, Axis.PIPELINE: 1}
            if all(given.get(axis, size) == size for axis, size in axes.items()):
                yield width, {**axes, **given}
