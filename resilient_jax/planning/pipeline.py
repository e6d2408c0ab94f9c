"""How long a pipeline takes: by formula, by longest path, and with failed stages whose work peers take over
(Chameleon).

P stages, N microbatches, t = forward + backward of one microbatch on one stage (arXiv 2508.21613).
"""

import math
from collections.abc import Sequence

from resilient_jax.errors import CallerError


def estimate_pipeline_s(stages: int, microbatches: int, stage_s: float, pipeline_repeats: int = 1) -> float:
    """Gives `(N + (P - 1) / rounds) t`: all microbatches through the slowest stage, and the pipeline filled and
    drained.

    Args:
        stages: P.
        microbatches: N, of one pipeline in one step.
        stage_s: t, of the slowest stage.
        rounds: chunks of layers on each stage, one after another (interleaved schedule, Narayanan et al. 2021,
            https://arxiv.org/abs/2104.04473, section 2.2): each fills the pipeline in a part of the time.

    >>> estimate_pipeline_s(4, 8, 1.0)
    11.0
    """
    return (microbatches + (stages - 1) / pipeline_repeats) * stage_s


def simulate_pipeline_s(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int) -> float:
    """Gives the longest path through the graph of a 1F1B schedule, stage by stage in each one's own order.

    Stage i of P runs `min(P - i, N)` forward, then one backward and one forward in turn. Equal to `estimate_pipeline_s` where
    all stages are alike; the formula is never less.

    Time and memory in proportion to P N.
    """
    stages = len(forward_s)
    orders = [_order_of(stage, stages, microbatches) for stage in range(stages)]
    ends: dict[tuple[int, bool, int], float] = {}
    free = [0.0] * stages
    places = [0] * stages
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while places[stage] < len(orders[stage]):
                is_forward, microbatch = orders[stage][places[stage]]
                ready = _ready_s(ends, stage, stages, is_forward, microbatch)
                if ready is None:
                    break
                took = forward_s[stage] if is_forward else backward_s[stage]
                free[stage] = max(free[stage], ready) + took
                ends[stage, is_forward, microbatch] = free[stage]
                places[stage] += 1
                moved = True
    return max(free)


def _order_of(stage: int, stages: int, microbatches: int) -> list[tuple[bool, int]]:
    first = min(stages - stage, microbatches)
    order = [(True, i) for i in range(first)]
    for i in range(microbatches):
        order.append((False, i))
        if first + i < microbatches:
            order.append((True, first + i))
    return order


def _ready_s(
    ends: dict[tuple[int, bool, int], float], stage: int, stages: int, is_forward: bool, microbatch: int
) -> float | None:
    """When what a task needs is there; None: not known yet."""
    if is_forward:
        return 0.0 if stage == 0 else ends.get((stage - 1, True, microbatch))
    if stage == stages - 1:
        return ends.get((stage, True, microbatch))
    return ends.get((stage + 1, False, microbatch))


def estimate_rerouted_s(
    stages: int, microbatches: int, pipelines: int, failed: Sequence[int], stage_s: float
) -> float | None:
    """Gives the step's time when the peers of a stage take over the microbatches of its failed ones.

    Formula: `(P + N - 1 + sum_i N F_i / (N_dp - F_i)) t`.

    Args:
        stages: P.
        microbatches: N, of one pipeline.
        pipelines: N_dp, before the failure.
        failed: F_i, failed peers of stage i.
        stage_s: t.

    Returns:
        Seconds; None if all peers of a stage failed.

    Raises:
        CallerError: not one number for each stage.

    >>> round(estimate_rerouted_s(4, 8, 4, [1, 0, 0, 0], 1.0), 3)
    13.667
    """
    if len(failed) != stages:
        raise CallerError(f"failed: found {len(failed)} numbers, expected one for each of {stages} stages")
    if any(count >= pipelines for count in failed):
        return None
    more = math.fsum(microbatches * count / (pipelines - count) for count in failed)
    return (stages + microbatches - 1 + more) * stage_s
