"""Splits of a pipeline's layers with less on the fullest stage than the split of the fastest microbatch.

What follows the last microbatch, the sum over replicas and the update, waits for the stage that has most. A slower
microbatch and less of that is the better plan where the links are slow or the microbatches few.
"""

import math
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from resilient_jax.planning.cost_model import BlockClass, CostModel
from resilient_jax.planning.device_layout import DeviceLayout, MicrobatchConfig, StageLayerLimits
from resilient_jax.planning.makespan import UNLIMITED
from resilient_jax.planning.state_bytes import PartBytes, StateBytes

ROUNDED = 1e-9
"""Part of a layer that is none."""
NOTHING = PartBytes()
_GRADIENTS, _UPDATED = attrgetter("gradients"), attrgetter("updated")


def relax_layer_limits(
    cost_model: CostModel, layout: DeviceLayout, microbatch: MicrobatchConfig, classes: Sequence[BlockClass]
) -> list[BlockClass]:
    """Gives the same teams with no more on the fullest stage than any split has: no split that is slower is done
    sooner than they would be."""
    if layout.axes.pipeline == 1:
        return list(classes)
    state, longest = (
        cost_model.memory.count_state(layout.axes),
        cost_model.memory.find_longest_stage(layout.axes, microbatch),
    )
    kept = [state.count_stage(longest, is_first=False, is_last=False), *_ends(state, 1)]
    least = {"synced_bytes": max(map(_GRADIENTS, kept)), "updated_bytes": max(map(_UPDATED, kept))}
    return [
        msgspec.structs.replace(team, time=msgspec.structs.replace(team.time, **least)) for team in classes
    ]


def tighten_layer_limits(
    cost_model: CostModel, layout: DeviceLayout, classes: Sequence[BlockClass]
) -> list[DeviceLayout]:
    """Gives the layout with fewer layers where most are summed up, and with fewer where most are updated.

    Every split that has less of one of the two is one that the former or the latter allows: who goes on with what this
    gives until it gives nothing has seen, for each split, one that is no slower and has no more on its fullest stage.

    Args:
        pricing: of the question.
        layout: of a pipeline.
        teams: all that the layout has, one at least.
    """
    state, found = cost_model.memory.count_state(layout.axes), []
    first, last = _ends(state, 0)
    times = [team.time for team in classes]
    for measure, limit in (
        (_GRADIENTS, max(time.synced_bytes for time in times)),
        (_UPDATED, max(time.updated_bytes for time in times)),
    ):
        below = (_count_below(limit, measure(end), measure(state.layer)) for end in (first, NOTHING, last))
        most = StageLayerLimits(*map(min, layout.layer_limits, below))
        held = most.per_stage(layout.axes.pipeline)
        if min(held) >= 1 and sum(held) >= cost_model.layers:
            found.append(layout._replace(layer_limits=most))
    return found


def _ends(state: StateBytes, layers: int) -> tuple[PartBytes, PartBytes]:
    """What the first and the last stage of two or more hold with so many layers."""
    return (
        state.count_stage(layers, is_first=True, is_last=False),
        state.count_stage(layers, is_first=False, is_last=True),
    )


def _count_below(limit: float, extra: float, layer: float) -> int:
    """With how many layers at most a stage has less than the limit."""
    if layer <= 0:
        return UNLIMITED if extra < limit else 0
    return max(0, math.ceil((limit - extra) / layer - ROUNDED) - 1)
