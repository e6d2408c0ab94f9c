"""The best plan whose replicas are each inside one host, for programs that compute one microbatch per call."""

from collections.abc import Iterator, Mapping, Sequence

from resilient_jax.planning.axes import Axis, parse_axis_sizes
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.errors import NoFeasiblePlan, PlanError
from resilient_jax.planning.microbatch_request import MicrobatchRequest
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_explanation import explain_choice
from resilient_jax.planning.plan_request import PlanConstraints
from resilient_jax.planning.search import search_plans

MAX_PLANS_PER_SEARCH = 16
"""Replica axes considered for each number of replicas and size of FSDP: more than exist on a host."""


def search_host_local_plan(request: MicrobatchRequest) -> Plan:
    """Return the fastest plan in which a host has one replica or several; of given axes, pipelines are not considered.

    Losing a host then leaves all other replicas complete. All replicas have the same axes. A host with fewer devices
    than others has fewer of them; devices that are too few for one more are spare.

    Raises:
        NoFeasiblePlan: no such plan fits in memory.
        PlanError: no plan satisfies the request.
    """
    found, errors = list_host_local_plans(request)
    if found:
        return explain_choice(found)[0]
    infeasible = [error for error in errors if isinstance(error, NoFeasiblePlan)]
    if infeasible:
        raise infeasible[0]
    devices = [host.devices for host in request.topology.hosts]
    numbers = " or ".join(map(str, sorted(set(devices))))
    raise PlanError(
        f"{request.program_cost.name}: found no plan on {request.topology.name} in which replicas fill hosts of "
        f"{numbers} devices with microbatches of {request.microbatch_size} examples, expected one. Take microbatches "
        f"of a multiple of {min(devices)} examples, at least as many of them as hosts, or other given axes "
        f"({dict(request.axes) or 'none'})"
    )


def list_host_local_plans(
    request: MicrobatchRequest, *, allows_spare: bool = False
) -> tuple[list[Plan], list[PlanError]]:
    """Return the plans of `search_host_local_plan`, the fastest first, and why other axes have none.

    With `allows_spare` hosts that have as many devices as each other may leave some out, such as one of seven.
    """
    devices = [host.devices for host in request.topology.hosts]
    fills_hosts = len(set(devices)) == 1 and not allows_spare
    choices = _choices(
        devices, request.sharded_examples, parse_axis_sizes(request.axes), fills_hosts=fills_hosts
    )
    errors: list[PlanError] = []
    found: list[Plan] = []
    for width, given in choices:
        try:
            plans = search_plans(
                request.program_cost,
                request.topology,
                global_batch=request.global_batch,
                calibration=request.calibration,
                constraints=PlanConstraints(
                    given, MicrobatchConfig(sequences=request.microbatch_size // given[Axis.FSDP])
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
