"""What a plan is searched for, and what is given."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from resilient_jax.planning.axes import Axis, AxisSizes, parse_axis_sizes
from resilient_jax.planning.calibration import DEFAULT_CALIBRATION, Calibration
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.host_pool import HostPool, build_host_pool
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.topology import Host, NumberFormat, Topology

BFLOAT16_BYTES: Final = 2
STAGE_PLAN_AXES: Final = (Axis.FSDP, Axis.EXPERT, Axis.TENSOR)
"""Axes inside of a stage that is a whole host."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The inputs of a search, without the constraints on the plan.

    Attributes:
        topology: all hosts, also those that the plan may not use.
        global_batch: sequences in a step.
        pool: the hosts that the plan may use, by kind and domain.
        pipeline_repeats: chunks of layers on each pipeline stage (interleaved schedule).
    """

    program_cost: ProgramCost
    topology: Topology
    pool: HostPool
    global_batch: int
    calibration: Calibration
    number_format: str
    pipeline_repeats: int = 1

    def on_topology(self, topology: Topology) -> "PlanRequest":
        """Return the request for a plan on any hosts of another topology."""
        pool = build_host_pool(topology, self.number_format)
        return dataclasses.replace(self, topology=topology, pool=pool)

    def on_hosts(self, hosts: Iterable[Host], global_batch: int) -> "PlanRequest":
        """Return the request for a part of the hosts, and of the batch."""
        part = self.on_topology(dataclasses.replace(self.topology, hosts=tuple(hosts)))
        return dataclasses.replace(part, global_batch=global_batch)

    def with_memory(self, memory_bytes: int) -> "PlanRequest":
        """Return the request for the hosts whose devices have at least so much memory."""
        pool = build_host_pool(self.topology, self.number_format, memory_bytes)
        return dataclasses.replace(self, pool=pool)


def make_request(
    program_cost: ProgramCost,
    topology: Topology,
    *,
    global_batch: int,
    calibration: Calibration = DEFAULT_CALIBRATION,
    number_format: str | None = None,
    pipeline_repeats: int = 1,
) -> PlanRequest:
    """Return the request for a plan on any hosts of a topology.

    Args:
        number_format: the format of matrix products; None: bf16 for a program that computes in two bytes, else fp32.

    Raises:
        TopologyError: an accelerator has no peak for the number format.
    """
    is_short = program_cost.compute_bytes == BFLOAT16_BYTES
    wanted = number_format or (NumberFormat.BF16 if is_short else NumberFormat.FP32)
    return PlanRequest(
        program_cost=program_cost,
        topology=topology,
        pool=build_host_pool(topology, wanted),
        global_batch=global_batch,
        calibration=calibration,
        number_format=wanted,
        pipeline_repeats=pipeline_repeats,
    )


class HostUse(enum.Enum):
    """Where the devices of a pipeline stage may be; a replica without a pipeline is one stage.

    In all but `ANY` and `SPANNING` each stage is inside one host, and each host has as many stages as its devices
    allow. Losing a host then leaves the replicas of the others complete.
    """

    ANY = "any"
    INSIDE = "inside"
    """A host leaves out the devices that are too few for one more stage."""
    FILLED = "filled"
    """As `INSIDE`, but hosts that have as many devices as each other leave none out."""
    WHOLE = "whole"
    """A stage is all devices of a host."""
    SPANNING = "spanning"
    """A replica is all devices of one host or several, and there are as many as the hosts allow. Hosts with fewer
    devices than others are left out."""


class PlanConstraints(NamedTuple):
    """What is given and not searched for.

    Attributes:
        axes: sizes of axes.
        microbatch: the microbatch of each device; None: it is searched for.
        min_replicas: the least number of replicas.
        microbatch_size: examples of a replica's microbatch, in which layers are not recomputed; None: as `microbatch`.
        shared_examples: the number that FSDP divides, a divisor of `microbatch_size`, such as allows evaluations of
            other microbatches; None: any.
    """

    axes: Mapping[Axis, int]
    microbatch: MicrobatchConfig | None = None
    min_replicas: int = 1
    microbatch_size: int | None = None
    shared_examples: int | None = None
    host_use: HostUse = HostUse.ANY


NO_FIXED_AXES: Mapping[Axis, int] = {}
NO_CONSTRAINTS = PlanConstraints(NO_FIXED_AXES)


def constrain_to_hosts(
    axes: AxisSizes,
    microbatch_size: int,
    shared_examples: int | None = None,
    host_use: HostUse = HostUse.FILLED,
) -> PlanConstraints:
    """Return the constraints of plans whose replicas are inside hosts, or whole hosts, and no pipelines.

    The arguments are as of `PlanConstraints`.

    Raises:
        PlanError: a pipeline is given.
    """
    given = parse_axis_sizes(axes)
    if given.get(Axis.PIPELINE, 1) != 1:
        raise PlanError(
            f"axis pipeline: found {given[Axis.PIPELINE]}, expected none: replicas have other axes. "
            "Parallelism(pipeline=) makes pipelines of hosts"
        )
    # Whole hosts are divided by the axes of a trainer's replica alone.
    none = {Axis.SEQUENCE: 1} if host_use is HostUse.SPANNING else {}
    return PlanConstraints(
        {**given, **none, Axis.PIPELINE: 1},
        microbatch_size=microbatch_size,
        shared_examples=shared_examples,
        host_use=host_use,
    )


def constrain_to_stages(
    topology: Topology,
    num_stages: int,
    axes: AxisSizes,
    microbatch_size: int,
    shared_examples: int | None = None,
) -> PlanConstraints:
    """Return the constraints of plans whose replicas are pipelines of hosts, each stage all devices of one host.

    Args:
        topology: all hosts; some are spares if `num_stages` does not divide their number.
        num_stages: hosts of a replica; with fewer hosts all of them are one replica.
        axes: sizes that are given, of `STAGE_PLAN_AXES`.
        microbatch_size: examples of a replica's microbatch.
        shared_examples: as of `PlanConstraints`.

    Raises:
        PlanError: hosts have different numbers of devices, or another axis is given.
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
    stages = {Axis.PIPELINE: min(num_stages, len(topology.hosts)), Axis.SEQUENCE: 1}
    return PlanConstraints(
        {**given, **stages},
        microbatch_size=microbatch_size,
        shared_examples=shared_examples,
        host_use=HostUse.WHOLE,
    )
