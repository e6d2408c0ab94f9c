"""The options of planning, given to `Trainer`."""

import dataclasses
from pathlib import Path
from typing import Final

from resilient_jax.argument_checks import check_fields, refuse_unknown_options
from resilient_jax.planning.axes import AxisSizes
from resilient_jax.planning.calibration import DEFAULT_CALIBRATION, Calibration
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.sharding.logical_axes import LogicalAxisRules
from resilient_jax.topology import Topology

TESTED_PLATFORM: Final = "cpu"
"""Where updates were seen to have the same bits for other axes."""


@refuse_unknown_options
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Searches the fastest plan for the live hosts in every generation of a `Trainer`.

    Replicas stay inside hosts, so that the loss of one host leaves the replicas of the others intact; with
    `spans_hosts` they are whole hosts. Inside a host,
    devices are sharded along fsdp, tensor and expert, and a host may have several replicas. Hosts may have different
    numbers of devices, and fewer than in the topology: then a host has as many replicas as its devices allow, all with
    the same axes, or each number of devices has axes of its own where `axes_by_host` allows it and that is faster.
    Parameters, optimizer state and gradients are sharded over a replica's devices as the plan says.
    Where the plan's axes change, the weights equal those of another plan within rounding, not bit for bit; where only
    the number of replicas changes they have the same bits.

    With `Parallelism(pipeline=)` it chooses the axes of the devices of each host, once, for all hosts of the topology:
    they stay when hosts are lost, and so do the bits.

    Attributes:
        topology: the topology of all hosts that may take part, or its file; the hosts of a job are found in the
            topology by their names.
        logical_axis_rules: the logical names of the parameters' dims, where the model's Flax metadata does not name
            the dims.
        program_cost: the cost of the model's program; None: analyzed when the job begins, which compiles the model's
            gradient twice.
        calibration: constants of the cost model.
        calibrate: fit the constants to the steps of this job, which counts from its next change of hosts on (event
            `plan.calibrated`). Then the plan that is chosen also depends on how fast this machine is. Not for
            pipelines, whose axes are chosen once.
        axis_sizes: sizes that are given, such as {"tensor": 2}; the search chooses all others.
        compile_ahead: compile the programs of likely next plans (one host fewer, one back, two fewer) in the
            background. Reductions over one and two hosts fewer are always compiled ahead.
        axes_by_host: whether hosts with unequal numbers of devices may have replicas with other axes. Then the update
            has the same bits for all axes: its sums are exact, which takes longer to compile and to run, and memory, on
            all hosts and in every step. An optimizer of which equal bits cannot be had, such as Muon, keeps the axes
            equal. None: yes where hosts of the topology have unequal numbers of devices, on CPU; on other platforms
            equal bits were not tested.
        spans_hosts: whether a replica is whole hosts, one or several, over which its copy of the state is in shards, as
            with `Parallelism(axes=)`; the search chooses how many hosts, and the axes over their devices. None: where
            no plan inside of hosts fits the memory of devices.

    Raises:
        CallerError: a value is of another type.
    """

    topology: Topology | Path | str
    logical_axis_rules: LogicalAxisRules | None = None
    program_cost: ProgramCost | None = None
    calibration: Calibration = DEFAULT_CALIBRATION
    axis_sizes: AxisSizes = dataclasses.field(default_factory=dict)
    calibrate: bool = True
    compile_ahead: bool = True
    axes_by_host: bool | None = None
    spans_hosts: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def allows_axes_by_host(planner: Planner, topology: Topology, platform: str) -> bool:
    """Return whether hosts may have replicas with other axes, as `Planner.axes_by_host` says.

    It depends on nothing but the configuration and the platform, so all hosts run the same update in every generation.

    Args:
        topology: topology of all hosts that may take part.
        platform: platform of the devices, such as "cpu".
    """
    if planner.axes_by_host is not None:
        return planner.axes_by_host
    return platform == TESTED_PLATFORM and len({host.devices for host in topology.hosts}) > 1
