"""The options of a model that is split over several hosts."""

import dataclasses
from collections.abc import Mapping
from typing import Final

from resilient_jax.argument_checks import check_fields, refuse_unknown_options
from resilient_jax.errors import CallerError
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule
from resilient_jax.sharding.logical_axes import LogicalAxisRules
from resilient_jax.sharding.stage_sharding import STAGE_AXES

PRIOR_BYTES_PER_S: Final = 1e9
"""A network of 10 Gb/s; on one machine our sockets gave 3 GB/s (docs/benchmarks.md)."""


@refuse_unknown_options
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A replica spans several hosts, each of which has some of the model's layers, and their optimizer state.

    The model is cut at its layers: a list of equal layers (NNX, Linen), or a scan over stacked parameters. Each host
    computes with all of its devices, as far as they can share the examples of a microbatch. Weights have the same bits
    for any number of stages and hosts whose devices have the same axes; a host with fewer devices has axes of its own,
    and its microbatches are equal within rounding.

    Attributes:
        num_stages: number of hosts of a replica. Hosts that are left over make some replicas longer; with fewer hosts
            than stages there is one replica of all of them, and nothing checks that it fits their memory.
        schedule: "zero_bubble" computes weight gradients while a host would wait for others; "gradient_first" and
            "whole_backward" (1F1B) keep fewer arrays. The choice changes no bit.
        log_bytes: host memory, in bytes, for values sent between stages: values are kept until a step is committed, to
            be sent again after a failure. What has no room is computed again.
        state_bytes_per_s: speed at which a host gets blocks that others have, in bytes per second, until the job has
            measured the speed. It decides whether blocks move at once when a host is lost, or its stage is kept.
        gather_result: bring the trained model together in the memory of each host when training ends, as
            `FitResult.variables`; the model must fit there. Else the model is in the last checkpoint, and on no host as
            a whole.
        axis_sizes: sizes of the axes of a host's devices, such as {"tensor": 2}: "data" (examples are shared, weights
            replicated), "fsdp" (examples are shared, weights sharded, and gathered block by block before use), "tensor"
            and "expert" (weights are sharded along dims with such logical names). Sizes multiply to the devices of a
            host; fsdp takes what the others leave, if fsdp is not given.
        logical_axis_rules: the logical names of the parameters' dims, where the model's Flax metadata does not name
            the dims.
        axes_by_host: whether hosts may have other axes than the job's, because hosts have fewer devices or have lost
            some. All hosts still have the same weights, bit for bit: products and sums of an update are computed so
            that they have the same bits on any number of devices, which takes longer to compile, on all hosts. Without
            it, and with an optimizer of which equal bits cannot be had, such as Muon, a host takes no part while one of
            its devices is out. None: yes on CPU; on other platforms equal bits were not tested.

    Raises:
        CallerError: a value is of another type, or impossible.
    """

    num_stages: int
    schedule: PipelineSchedule | str = PipelineSchedule.ZERO_BUBBLE
    log_bytes: int = 2**30
    state_bytes_per_s: float = PRIOR_BYTES_PER_S
    gather_result: bool = False
    axis_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    logical_axis_rules: LogicalAxisRules | None = None
    axes_by_host: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_stages < 1 or self.log_bytes < 0 or not self.state_bytes_per_s > 0:
            raise CallerError(
                f"pipeline: found num_stages={self.num_stages}, log_bytes={self.log_bytes}, "
                f"state_bytes_per_s={self.state_bytes_per_s}, expected at least 1, at least 0, and more than 0"
            )
        for axis, size in self.axis_sizes.items():
            if axis not in STAGE_AXES or size < 1:
                raise CallerError(
                    f"pipeline: found axis_sizes={dict(self.axis_sizes)}, expected positive sizes of "
                    f"{', '.join(STAGE_AXES)}, the axes of the devices of a host"
                )
        if self.schedule not in list(PipelineSchedule):
            raise CallerError(
                f"pipeline: found schedule={self.schedule!r}, expected one of {', '.join(PipelineSchedule)}"
            )
