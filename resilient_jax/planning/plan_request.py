"""What a plan is searched for."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.device_layout import MicrobatchConfig
from resilient_jax.planning.host_pool import HostPool
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The inputs of a search, without the constraints on the plan.

    Attributes:
        topology: all hosts, also those that the plan may not use.
        global_batch: sequences in a step.
        pipeline_repeats: chunks of layers on each pipeline stage (interleaved schedule).
    """

    program_cost: ProgramCost
    topology: Topology
    pool: HostPool
    global_batch: int
    calibration: Calibration
    number_format: str
    pipeline_repeats: int = 1


class PlanConstraints(NamedTuple):
    """What is given and not searched for: sizes of axes, a microbatch or None, and the least number of replicas."""

    axes: Mapping[Axis, int]
    microbatch: MicrobatchConfig | None = None
    min_replicas: int = 1


NO_FIXED_AXES: Mapping[Axis, int] = {}
NO_CONSTRAINTS = PlanConstraints(NO_FIXED_AXES)
