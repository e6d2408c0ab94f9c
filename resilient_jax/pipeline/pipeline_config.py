"""What stays the same for the stages of a pipeline during a job."""

import dataclasses
from typing import Any

from resilient_jax.host_exchange.step_mail import StepMail
from resilient_jax.pipeline.block_state import ReduceVariable
from resilient_jax.pipeline_schedule.tasks import DEFAULT_SCHEDULE, PipelineSchedule
from resilient_jax.step.assignment import Reduction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """What stays the same during a job.

    Attributes:
        num_microbatches: microbatches of one step, over all replicas.
        schedule: which tasks a hop has, and when weight gradients are computed; it changes no bit.
        reduction: how gradients are added up over microbatches.
        max_norm: norm to which gradients are scaled down; None: gradients are used as they are.
        log_bytes: memory for boundary values that a host keeps until the step is committed.
        wait_timeout_s: the longest wait for one value.
        params: tree like the trained variables, whose leaves are the first of the model's; None: all are trained.
        reduce_variable: rule for variables that the loss changes; None: the loss changes none.
        step_mail: the mail of a step, of the kind of the host's service.
        donate_state: whether an update takes the memory of the state before.
    """

    num_microbatches: int
    schedule: PipelineSchedule = DEFAULT_SCHEDULE
    reduction: Reduction = "exact"
    max_norm: float | None = None
    log_bytes: int = 2**30
    wait_timeout_s: float = 300.0
    params: Any = None
    reduce_variable: ReduceVariable | None = None
    step_mail: type[StepMail] = StepMail
    donate_state: bool = True
