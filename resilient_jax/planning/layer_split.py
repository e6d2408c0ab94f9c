"""Layers over pipeline stages, and the members of a tensor group to keep, when some are slow.

The rules of ResiHP (arXiv 2605.06374). A slow stage gets fewer layers: with v_s the speed of stage s, the split
minimizes `max_s L_s / v_s`. Of a tensor group with slow members the power of two is kept that is fastest together.
"""

from collections.abc import Sequence
from typing import NamedTuple

from resilient_jax.errors import CallerError
from resilient_jax.pipeline_schedule.makespan import UNLIMITED, MachineClass, assign_tasks


def split_layers(layers: int, layer_s: Sequence[float], extra_s: Sequence[float] = ()) -> tuple[int, ...]:
    """Return the layers of each stage, at least one, that minimize the time of the slowest stage.

    Formula: minimize `max_s (extra_s + L_s layer_s)`; with `layer_s = 1 / v_s` and no extras `max_s L_s / v_s`.

    Args:
        layers: layers of all stages together.
        layer_s: time of one layer on each stage, in any unit.
        extra_s: time of what else a stage does: the embedding, the head.

    Raises:
        CallerError: there are fewer layers than stages.

    >>> split_layers(12, [1, 1 / 0.4, 1])
    (5, 2, 5)
    >>> split_layers(80, [1.0] * 7)
    (12, 12, 12, 11, 11, 11, 11)
    """
    stages = len(layer_s)
    if layers < stages:
        raise CallerError(f"layers: found {layers} for {stages} stages, expected at least one for each")
    # Stage s is a machine whose first task includes the extra: s_s = extra_s + layer_s releases it, since every stage
    # has one layer at least, and the remaining L - P layers are tasks of layer_s each.
    extras = extra_s or [0.0] * stages
    machines = [
        MachineClass(count=1, start_s=extra + one, task_s=one)
        for one, extra in zip(layer_s, extras, strict=True)
    ]
    assignment = assign_tasks(layers - stages, machines) if stages > 1 else None
    if assignment is None:
        return (layers,)
    return tuple(1 + counts[0][1] for counts in assignment.task_counts)


class StageRun(NamedTuple):
    """Consecutive equal stages: how many, the time of a layer on each, and the most layers of each."""

    stages: int
    layer_s: float
    max_layers: int = UNLIMITED


def split_layers_by_run(
    layers: int, runs: Sequence[StageRun], first_s: float, last_s: float
) -> tuple[tuple[int, int, int], ...]:
    """Return the split of `split_layers` for runs of equal stages, under a limit for the layers of each stage.

    Args:
        layers: layers in all, at least one per stage and no more than the limits allow.
        runs: runs of stages, two or more stages in all.
        first_s: time of what the first stage does besides its layers.
        last_s: time of what the last stage does besides its layers.

    Returns:
        (index of the run, consecutive stages, layers of each), of a run those with fewer layers first: they come
        earlier, where more microbatches are in flight.
    """
    # The same machines by class: first and last stage are classes of their own, since they have the embedding and
    # the head besides layers.
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


def select_tensor_group(speeds: Sequence[float], at_least: int = 1) -> tuple[int, ...]:
    """Return the indexes of the members of a tensor group to keep; the others become spares.

    Formula (ResiHP): the fastest k, `argmax_{k = 2^q >= k_min} k min_{i in top-k} p_i`; of equal products the larger k.

    Args:
        speeds: speed of each member; 0 if it is dead.
        at_least: k_min; fewer members would not have the memory.

    Raises:
        CallerError: there is no power of two from `at_least` to the number of live members.

    >>> select_tensor_group([1, 1, 1, 0.4])
    (0, 1)
    """
    order = sorted((i for i, speed in enumerate(speeds) if speed > 0), key=lambda i: (-speeds[i], i))
    sizes = [1 << q for q in range(len(order).bit_length()) if at_least <= 1 << q <= len(order)]
    if not sizes:
        raise CallerError(
            f"tensor group: found {len(order)} of {len(speeds)} members alive, expected a power of two of them that "
            f"is {at_least} or more"
        )
    best = max(sizes, key=lambda size: (size * speeds[order[size - 1]], size))
    return tuple(sorted(order[:best]))
