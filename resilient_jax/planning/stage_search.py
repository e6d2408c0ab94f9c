"""The best axes for the devices of each host, where a replica is a pipeline of hosts."""

from collections.abc import Iterator, Mapping

from resilient_jax.planning.axes import Axis, parse_axis_sizes
from resilient_jax.planning.candidate_table import find_divisors
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.errors import NoFeasiblePlan, PlanError
from resilient_jax.planning.microbatch_request import MicrobatchRequest
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_explanation import explain_choice
from resilient_jax.planning.plan_request import PlanConstraints
from resilient_jax.planning.search import search_plans

STAGE_PLAN_AXES = (Axis.FSDP, Axis.EXPERT, Axis.TENSOR)
"""Axes inside of a stage."""


def search_stage_plan(request: MicrobatchRequest, num_stages: int) -> Plan:
    """Return the fastest plan whose replicas have `num_stages` stages, each of which is all devices of one host.

    Args:
        request: has all hosts; some are spares if `num_stages` does not divide their number. Of axes, `STAGE_PLAN_AXES`
            may be given.
        num_stages: hosts of a replica.

    Raises:
        NoFeasiblePlan: no such plan fits in memory.
        PlanError: hosts have different numbers of devices, or no plan satisfies the request.
    """
    topology = request.topology
    devices = {host.devices for host in topology.hosts}
    if len(devices) != 1:
        raise PlanError(
            f"topology {topology.name}: found hosts with {sorted(devices)} devices, expected as many on each: all "
            "stages have the same axes"
        )
    given = parse_axis_sizes(request.axes)
    if others := sorted(set(given) - set(STAGE_PLAN_AXES)):
        raise PlanError(
            f"axes: found sizes of {', '.join(others)}, expected of {', '.join(STAGE_PLAN_AXES)}: the pipeline says "
            "which hosts are a replica"
        )
    # With fewer hosts than stages all of them are one replica.
    stages = min(num_stages, len(topology.hosts))
    errors: list[PlanError] = []
    found: list[Plan] = []
    for sizes in _list_choices(min(devices), request.sharded_examples, given):
        fixed = {
            Axis.REPLICA: len(topology.hosts) // stages,
            Axis.PIPELINE: stages,
            Axis.SEQUENCE: 1,
            **sizes,
        }
        microbatch = MicrobatchConfig(sequences=request.microbatch_size // sizes[Axis.FSDP])
        try:
            found += search_plans(
                request.program_cost,
                topology,
                global_batch=request.global_batch,
                calibration=request.calibration,
                constraints=PlanConstraints(fixed, microbatch),
            )
        # The program does not allow such axes, or no plan with them fits.
        except PlanError as error:
            errors.append(error)
    if found:
        return explain_choice(sorted(found, key=lambda plan: plan.step_time_s))[0]
    infeasible = [error for error in errors if isinstance(error, NoFeasiblePlan)]
    if infeasible or errors:
        raise (infeasible or errors)[0]
    raise PlanError(
        f"{request.program_cost.name}: found no axes for {min(devices)} devices with "
        f"{dict(request.axes) or 'none given'}, expected given sizes that divide the devices of a host, and an fsdp "
        f"that divides {request.sharded_examples}, as the microbatches of training and evaluation allow"
    )


def _list_choices(devices: int, examples: int, given: Mapping[Axis, int]) -> Iterator[dict[Axis, int]]:
    """Yield the sizes of the axes of a stage that use all devices of a host."""
    for tensor in find_divisors(devices):
        for expert in find_divisors(devices // tensor):
            sizes = {Axis.FSDP: devices // tensor // expert, Axis.EXPERT: expert, Axis.TENSOR: tensor}
            is_given = all(sizes[axis] == size for axis, size in given.items())
            if is_given and examples % sizes[Axis.FSDP] == 0:
                yield sizes
