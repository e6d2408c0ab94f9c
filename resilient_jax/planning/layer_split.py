"""Layers over pipeline stages, when some are slow: ResiHP's rule (arXiv 2605.06374).

A slow stage gets fewer layers. With v_s the speed of stage s, the split minimizes `max_s L_s / v_s`; with l_s the time
of a layer on it and e_s that of what else it does (embedding, head), `max_s (e_s + L_s l_s)`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from resilient_jax.pipeline_schedule.makespan import UNLIMITED, MachineClass, assign_tasks


class StageRun(NamedTuple):
    """Consecutive equal stages: how many, the time of a layer on each, and the most layers of each."""

    stages: int
    layer_s: float
    max_layers: int = UNLIMITED


def split_layers_by_run(
    layers: int, runs: Sequence[StageRun], first_s: float, last_s: float
) -> tuple[tuple[int, int, int], ...]:
    """Return the layers of each stage, at least one, that minimize the time of the slowest stage, under its limit.

    Args:
        layers: layers in all, at least one per stage and no more than the limits allow.
        runs: runs of stages, two or more stages in all.
        first_s: time of what the first stage does besides its layers.
        last_s: time of what the last stage does besides its layers.

    Returns:
        (index of the run, consecutive stages, layers of each), of a run those with fewer layers first: they come
        earlier, where more microbatches are in flight.
    """
    # A stage is a machine whose first task includes the extra: s_s = extra_s + layer_s releases it, since every stage
    # has one layer at least, and the remaining L - P layers are tasks of layer_s each. Machines are given by class;
    # first and last stage are classes of their own, since they have the embedding and the head besides layers.
    counts = [run.stages for run in runs]
    counts[0] -= 1
    counts[-1] -= 1
    end = len(runs) - 1
    places = [(0, 1, first_s), *((i, n, 0.0) for i, n in enumerate(counts) if n), (end, 1, last_s)]
    machines = [
        MachineClass(
            count=count,
            start_s=extra + runs[i].layer_s,
            task_s=runs[i].layer_s,
            max_tasks=runs[i].max_layers - 1,
        )
        for i, count, extra in places
    ]
    assignment = assign_tasks(layers - sum(run.stages for run in runs), machines)
    return tuple(
        (i, count, 1 + more)
        for (i, _, _), counts in zip(places, assignment.task_counts, strict=True)
        for count, more in reversed(counts)
    )
