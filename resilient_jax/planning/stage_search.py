"""The best axes for the devices of each host, where a replica is a pipeline of hosts."""

from collections.abc import Iterator, Mapping

from resilient_jax.planning.axes import Axis, AxisSizes, parse_axis_sizes
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.candidate_table import find_divisors
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.errors import NoFeasiblePlan, PlanError
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_explanation import explain_choice
from resilient_jax.planning.plan_request import NO_FIXED_AXES, PlanConstraints
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search import DEFAULT_CALIBRATION, search_plans
from resilient_jax.topology import Topology

STAGE_PLAN_AXES = (Axis.FSDP, Axis.EXPERT, Axis.TENSOR)
"""Axes inside of a stage."""


def search_stage_plan(
    program_cost: ProgramCost,
    topology: Topology,
    *,
    num_stages: int,
    microbatch_size: int,
    global_batch: int,
    calibration: Calibration = DEFAULT_CALIBRATION,
    axes: AxisSizes = NO_FIXED_AXES,
) -> Plan:
    """Return the fastest plan whose replicas have `num_stages` stages, each of which is all devices of one host.

    Args:
        program_cost: cost of the program, for one example.
        topology: all hosts; some are spares if `num_stages` does not divide their number.
        num_stages: hosts of a replica.
        microbatch_size: examples that a replica computes at a time, under every plan.
        global_batch: examples in a step.
        calibration: constants of the cost model.
        axes: sizes that are given, of `STAGE_PLAN_AXES`.

    Raises:
        NoFeasiblePlan: no such plan fits in memory.
        PlanError: hosts have different numbers of devices, or no plan satisfies the request.
    """
    devices = {host.devices for host in topology.hosts}
    if len(devices) != 1:
        raise PlanError(
            f"topology {topology.name}: found hosts with {sorted(devices)} devices, expected as many on each: all "
            "stages have the same axes"
        )
    given = parse_axis_sizes(axes)
    if others := sorted(set(given) - set(STAGE_PLAN_AXES)):
        raise PlanError(
            f"axes: found sizes of {', '.join(others)}, expected of {', '.join(STAGE_PLAN_AXES)}: the pipeline says "
            "which hosts are a replica"
        )
    # With fewer hosts than stages all of them are one replica.
    stages = min(num_stages, len(topology.hosts))
    errors: list[PlanError] = []
    found: list[Plan] = []
    for sizes in _list_choices(min(devices), microbatch_size, given):
        fixed = {
            Axis.REPLICA: len(topology.hosts) // stages,
            Axis.PIPELINE: stages,
            Axis.SEQUENCE: 1,
            **sizes,
        }
        microbatch = MicrobatchConfig(sequences=microbatch_size // sizes[Axis.FSDP])
        try:
            found += search_plans(
                program_cost,
                topology,
                global_batch=global_batch,
                calibration=calibration,
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
        f"{program_cost.name}: found no axes for {min(devices)} devices with {dict(axes) or 'none given'}, expected "
        "given sizes that divide the devices of a host, and an fsdp that divides the microbatch size of "
        f"{microbatch_size}"
    )


def _list_choices(devices: int, microbatch_size: int, given: Mapping[Axis, int]) -> Iterator[dict[Axis, int]]:
    """Yield the sizes of the axes of a stage that use all devices of a host."""
    for tensor in find_divisors(devices):
        for expert in find_divisors(devices // tensor):
            sizes = {Axis.FSDP: devices // tensor // expert, Axis.EXPERT: expert, Axis.TENSOR: tensor}
            is_given = all(sizes[axis] == size for axis, size in given.items())
            if is_given and microbatch_size % sizes[Axis.FSDP] == 0:
                yield sizes
