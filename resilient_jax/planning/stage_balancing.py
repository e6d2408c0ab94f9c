"""Splits of a pipeline's layers with less on the fullest stage than the fastest split has.

What follows the last microbatch, the all-reduce over replicas and the update, waits for the stage that has most. Where
links are slow or microbatches few, a slower microbatch with less on that stage is the better plan.
"""

import math
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from resilient_jax.pipeline_schedule.makespan import UNLIMITED
from resilient_jax.planning.cost_model import BlockClass, CostModel
from resilient_jax.planning.device_layout import DeviceLayout, MicrobatchConfig, StageLayerLimits
from resilient_jax.planning.state_bytes import PartBytes, StateBytes

ROUNDED = 1e-9
"""Fraction of a layer that counts as none."""
NOTHING = PartBytes()
_GRADIENTS, _UPDATED = attrgetter("gradients"), attrgetter("updated")


def bound_block_classes(
    cost_model: CostModel, layout: DeviceLayout, microbatch: MicrobatchConfig, classes: Sequence[BlockClass]
) -> list[BlockClass]:
    """Return the classes with the least bytes on the fullest stage that any split has.

    A split that is slower than theirs cannot end a step sooner than these classes would.
    """
    if layout.axes.pipeline == 1:
        return list(classes)
    state, longest = (
        cost_model.memory.count_state(layout.axes),
        cost_model.memory.find_longest_stage(layout.axes, microbatch),
    )
    # least = max(longest stage without ends, each end with one layer) in bytes: some stage has `longest` layers or
    # more, and each end has at least one.
    kept = [state.count_stage(longest, is_first=False, is_last=False), *_ends(state, 1)]
    least = {"synced_bytes": max(map(_GRADIENTS, kept)), "updated_bytes": max(map(_UPDATED, kept))}
    return [
        msgspec.structs.replace(block_class, time=msgspec.structs.replace(block_class.time, **least))
        for block_class in classes
    ]


def tighten_layer_limits(
    cost_model: CostModel, layout: DeviceLayout, classes: Sequence[BlockClass]
) -> list[DeviceLayout]:
    """Return the layout with fewer layers where most is all-reduced, and with fewer where most is updated.

    Every split with less of one of the two is allowed by the former or the latter layout. Repeating this until
    nothing is returned therefore visits, for each split, one that is no slower and has no more on its fullest stage.

    Args:
        classes: all block classes of the layout, at least one.
    """
    state, found = cost_model.memory.count_state(layout.axes), []
    first, last = _ends(state, 0)
    times = [block_class.time for block_class in classes]
    for measure, limit in (
        (_GRADIENTS, max(time.synced_bytes for time in times)),
        (_UPDATED, max(time.updated_bytes for time in times)),
    ):
        # For each of the two measures, n_max per position: extra + n layer < limit, the bytes of the fullest stage now.
        below = (_count_below(limit, measure(end), measure(state.layer)) for end in (first, NOTHING, last))
        tighter = StageLayerLimits(*map(min, layout.layer_limits, below))
        allowed = tighter.per_stage(layout.axes.pipeline)
        if min(allowed) >= 1 and sum(allowed) >= cost_model.layers:
            found.append(layout._replace(layer_limits=tighter))
    return found


def _ends(state: StateBytes, layers: int) -> tuple[PartBytes, PartBytes]:
    """Return what the first and the last of two or more stages hold with so many layers."""
    return (
        state.count_stage(layers, is_first=True, is_last=False),
        state.count_stage(layers, is_first=False, is_last=True),
    )


def _count_below(limit: float, extra: float, layer: float) -> int:
    """Return with how many layers at most a stage has less than the limit."""
    # extra + n layer < limit, so n = ceil((limit - extra) / layer) - 1; the slack keeps an equal stage from counting.
    if layer <= 0:
        return UNLIMITED if extra < limit else 0
    return max(0, math.ceil((limit - extra) / layer - ROUNDED) - 1)
