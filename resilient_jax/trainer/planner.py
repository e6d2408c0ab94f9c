"""What the user says to have plans searched for."""

import dataclasses
from pathlib import Path

from resilient_jax.planning.axes import AxisSizes
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search import DEFAULT_CALIBRATION
from resilient_jax.sharding.logical_axes import LogicalAxisRules
from resilient_jax.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Has the trainer search the fastest plan for the hosts at hand, in every generation.

    Replicas stay inside hosts, so that the loss of one leaves the others whole; inside, devices are cut along fsdp,
    tensor and expert, and a host may have several replicas. Parameters, optimizer state and gradients are cut over a
    replica's devices as the plan says. Where the plan's axes change, the weights are equal to those of another plan
    within rounding, not bit for bit; where only the number of replicas changes they are the same bits.

    Attributes:
        topology: of all hosts that may take part, or its file; those of a job are found in it by their names.
        naming: of parameters' dims, where the model's Flax metadata does not name them.
        profile: of the model; None: taken from the model itself when the job begins, which compiles its gradient twice.
        calibration: constants of the estimate.
        axes: sizes that are given, such as {"tensor": 2}.
        compile_ahead: compile the programs of likely next plans (one host fewer, one back, two fewer) in the
            background. The sums over one and two hosts fewer always are.
    """

    topology: Topology | Path | str
    logical_axis_rules: LogicalAxisRules | None = None
    program_cost: ProgramCost | None = None
    calibration: Calibration = DEFAULT_CALIBRATION
    axis_sizes: AxisSizes = dataclasses.field(default_factory=dict)
    compile_ahead: bool = True
