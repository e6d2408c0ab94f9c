"""The time of a pipeline as hosts run it: by a formula that the simulated schedule confirms, transfers included.

P stages, N microbatches, t the time of one microbatch on the slowest stage, of which weight gradients take W, and x the
time from the end of a task until the next stage has its result:

    weights apart   N p + (P - 1) (t - W + 2 x),   p = max(t, t - W + W / P + 2 x (P - 1) / P)
    interleaved     (N + (P - 1) / r) (t + 2 x)         r > 1 chunks of layers on a stage; Narayanan et al. 2021, 2.2

The first is `pipeline_schedule.tasks.DEFAULT_SCHEDULE` (ZB-H1, https://arxiv.org/abs/2401.10241): weight gradients fill
the gaps, so that only F and B of P - 1 stages are waited for. At most P microbatches are in flight, so one cannot
follow another sooner than in a P-th of its way there and back. Without any transfer the schedule is up to W (P - 1)
faster.
"""

from typing import NamedTuple

from resilient_jax.pipeline_schedule.makespan import MachineClass
from resilient_jax.planning.columns import maximum


def find_weight_share(*, is_remat: bool) -> float:
    """Return the part of weight gradients in a microbatch's time."""
    # Forward pass, input gradient and weight gradient have equal FLOPs; with remat the forward pass is computed twice.
    return 1 / (3 + is_remat)


class PipelineTime(NamedTuple):
    """Seconds of a pipeline: `N microbatch_s + bubble_s + sending_s` for N microbatches."""

    microbatch_s: float
    """From one microbatch to the next."""
    bubble_s: float
    """Computing that fills and drains the pipeline."""
    sending_s: float
    """Transfers while it fills and drains."""

    @property
    def fill_s(self) -> float:
        """What a step takes besides its microbatches."""
        return self.bubble_s + self.sending_s

    def as_machines(self, count: int) -> MachineClass:
        """Return so many such pipelines as machines, to assign microbatches to."""
        # n microbatches take n p + fill: a machine that starts at `fill` with tasks of p.
        return MachineClass(count=count, start_s=self.fill_s, task_s=self.microbatch_s)


def time_pipeline(
    stages: int,
    stage_s: float,
    transfer_s: float = 0.0,
    *,
    weight_share: float = find_weight_share(is_remat=False),
    repeats: int = 1,
) -> PipelineTime:
    """Return the times of a pipeline.

    Args:
        stages: P.
        stage_s: t, of the slowest stage, without transfers.
        transfer_s: x, to one neighbor.
        weight_share: W / t.
        repeats: r, chunks of layers on each stage; more than one: interleaved 1F1B.

    >>> time_pipeline(4, 1.0, 0.0, repeats=3).fill_s
    1.0
    """
    if repeats > 1:
        each = stage_s + 2 * transfer_s * (stages > 1)
        return PipelineTime(each, (stages - 1) / repeats * each, 0.0 * each)
    weights = weight_share * stage_s
    round_trip = stage_s - weights + weights / stages + 2 * transfer_s * (stages - 1) / stages
    return PipelineTime(
        maximum(stage_s, round_trip),
        (stages - 1) * (stage_s - weights),
        (stages - 1) * 2 * transfer_s,
    )
