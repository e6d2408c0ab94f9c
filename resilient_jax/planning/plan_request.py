"""What a plan is searched for."""

import dataclasses

from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.host_pool import HostPool
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The inputs of a search, without the constraints on the plan.

    Attributes:
        program_cost: cost of the program.
        topology: all hosts.
        pool: the hosts that the plan may use.
        global_batch: sequences in a step.
        calibration: constants of the cost model.
        number_format: number format of the matrix products.
        pipeline_repeats: chunks of layers on each pipeline stage (interleaved schedule).
    """

    program_cost: ProgramCost
    topology: Topology
    pool: HostPool
    global_batch: int
    calibration: Calibration
    number_format: str
    pipeline_repeats: int = 1
