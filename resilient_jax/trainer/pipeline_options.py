"""The options of a model that is split over several hosts."""

import dataclasses

from resilient_jax.argument_checks import check_fields, refuse_unknown_options
from resilient_jax.errors import CallerError
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule


@refuse_unknown_options
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A replica spans several hosts, each of which has some of the model's layers, and their optimizer state.

    The model is cut at its layers: a list of equal layers (NNX, Linen), or a scan over stacked parameters. Weights have
    the same bits for any number of stages and hosts.

    Attributes:
        num_stages: number of hosts of a replica. Hosts that are left over make some replicas longer; with fewer hosts
            than stages there is one replica of all of them, and nothing checks that it fits their memory.
        schedule: "zero_bubble" computes weight gradients while a host would wait for others; "gradient_first" and
            "whole_backward" (1F1B) keep fewer arrays. It changes no bit.
        log_bytes: host memory, in bytes, for values sent between stages: they are kept until a step is committed, to be
            sent again after a failure. What has no room is computed again.
        gather_result: bring the trained model together in the memory of each host when training ends, as
            `FitResult.variables`; it must fit there. Else it is in the last checkpoint, and on no host as a whole.

    Raises:
        CallerError: a value is of another type, or impossible.
    """

    num_stages: int
    schedule: PipelineSchedule | str = PipelineSchedule.ZERO_BUBBLE
    log_bytes: int = 2**30
    gather_result: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_stages < 1 or self.log_bytes < 0:
            raise CallerError(
                f"pipeline: found num_stages={self.num_stages}, log_bytes={self.log_bytes}, expected at least 1 and 0"
            )
        if self.schedule not in list(PipelineSchedule):
            raise CallerError(
                f"pipeline: found schedule={self.schedule!r}, expected one of {', '.join(PipelineSchedule)}"
            )
