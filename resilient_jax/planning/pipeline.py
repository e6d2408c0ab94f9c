"""The time of a pipeline: by formula, by longest path, and with failed stages whose work their peers take over.

P stages, N microbatches, t = forward + backward of one microbatch on one stage, r repeats (chunks of layers per stage):

    1F1B          (N + P - 1) t                          Chameleon, arXiv 2508.21613
    interleaved   (N + (P - 1) / r) t                    Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, 2.2
    rerouted      (P + N - 1 + sum_i N F_i / (D - F_i)) t    Chameleon; F_i of D peers of stage i have failed
"""

import math
from collections.abc import Sequence

from resilient_jax.errors import CallerError


def estimate_pipeline_s(stages: int, microbatches: int, stage_s: float, pipeline_repeats: int = 1) -> float:
    """Return `(N + (P - 1) / r) t`: all microbatches through the slowest stage, and filling and draining the pipeline.

    Args:
        stages: P.
        microbatches: N, of one pipeline in one step.
        stage_s: t, of the slowest stage.
        pipeline_repeats: r: each chunk of layers fills the pipeline in a part of the time.

    >>> estimate_pipeline_s(4, 8, 1.0)
    11.0
    """
    return (microbatches + (stages - 1) / pipeline_repeats) * stage_s


def simulate_pipeline_s(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int) -> float:
    """Return the longest path through the graph of a 1F1B schedule, each stage in its own order.

    Stage i of P runs `min(P - i, N)` forward, then one backward and one forward in turn. The result equals
    `estimate_pipeline_s` where all stages are equal; the formula is never less. Takes time and memory O(P N).
    """
    # end(task) = max(end of the stage's task before, end of its input) + time: each stage runs as far as its inputs
    # are known, until no stage can run further. 1F1B has no cyclic wait, so then all are done.
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
    # Warm-up of min(P - i, N) forward passes, then one backward and one forward in turn, then the remaining backwards.
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
    """Return when the input of a task is ready; None if the input is not computed yet."""
    if is_forward:
        return 0.0 if stage == 0 else ends.get((stage - 1, True, microbatch))
    if stage == stages - 1:
        return ends.get((stage, True, microbatch))
    return ends.get((stage + 1, False, microbatch))


def estimate_rerouted_s(
    stages: int, microbatches: int, pipelines: int, failed: Sequence[int], stage_s: float
) -> float | None:
    """Return the step time when the peers of a stage take over the microbatches of its failed replicas.

    Args:
        stages: P.
        microbatches: N, of one pipeline.
        pipelines: D, before the failure.
        failed: F_i, failed peers of stage i.
        stage_s: t.

    Returns:
        Seconds; None if all peers of a stage failed.

    Raises:
        CallerError: `failed` has another length than the number of stages.

    >>> round(estimate_rerouted_s(4, 8, 4, [1, 0, 0, 0], 1.0), 3)
    13.667
    """
    if len(failed) != stages:
        raise CallerError(f"failed: found {len(failed)} numbers, expected one for each of {stages} stages")
    if any(count >= pipelines for count in failed):
        return None
    # Each of the D - F_i live peers of stage i takes N F_i / (D - F_i) of the N F_i microbatches of the failed ones.
    more = math.fsum(microbatches * count / (pipelines - count) for count in failed)
    return (stages + microbatches - 1 + more) * stage_s
