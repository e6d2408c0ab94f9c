"""What is asked of a search where the size of a microbatch is given, as in a trainer: all its plans have the same."""

import dataclasses
import math

from resilient_jax.planning.axes import AxisSizes
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.search import DEFAULT_CALIBRATION
from resilient_jax.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchRequest:
    """The inputs of a search.

    Attributes:
        program_cost: cost of the program, for one example.
        microbatch_size: examples that a replica computes at a time, under every plan.
        axes: sizes that are given; the search chooses all others.
        evaluation_size: examples of an evaluation's microbatch, which FSDP shards, too; None: as in training.
    """

    program_cost: ProgramCost
    topology: Topology
    microbatch_size: int
    num_microbatches: int
    calibration: Calibration = DEFAULT_CALIBRATION
    axes: AxisSizes = dataclasses.field(default_factory=dict)
    evaluation_size: int | None = None

    @property
    def global_batch(self) -> int:
        """The examples of a step."""
        return self.microbatch_size * self.num_microbatches

    @property
    def sharded_examples(self) -> int:
        """The number that the size of FSDP must divide: it shards the examples of training and of an evaluation."""
        return math.gcd(self.microbatch_size, self.evaluation_size or self.microbatch_size)
