"""Splits of a pipeline's layers with less on the fullest stage than the split of the fastest microbatch.

What follows the last microbatch, the sum over replicas and the update, waits for the stage that has most. A slower
microbatch and less of that is the better plan where the links are slow or the microbatches few.
"""

import math
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from resilient_jax.planning.cost_model import Pricing, Team
from resilient_jax.planning.device_layout import Layout, Microbatch, Most
from resilient_jax.planning.makespan import ANY_NUMBER
from resilient_jax.planning.state_bytes import PartBytes, StateBytes

ROUNDED = 1e-9
"""Part of a layer that is none."""
NOTHING = PartBytes()
_GRADIENTS, _UPDATED = attrgetter("gradients"), attrgetter("updated")


def even_out(pricing: Pricing, layout: Layout, batch: Microbatch, teams: Sequence[Team]) -> list[Team]:
    """Gives the same teams with no more on the fullest stage than any split has: no split that is slower is done
    sooner than they would be."""
    if layout.group.pipeline == 1:
        return list(teams)
    state, longest = pricing.state(layout.group), pricing.longest(layout.group, batch)
    kept = [state.stage(longest, is_first=False, is_last=False), *_ends(state, 1)]
    least = {"synced_bytes": max(map(_GRADIENTS, kept)), "updated_bytes": max(map(_UPDATED, kept))}
    return [msgspec.structs.replace(team, time=msgspec.structs.replace(team.time, **least)) for team in teams]


def with_fewer(pricing: Pricing, layout: Layout, teams: Sequence[Team]) -> list[Layout]:
    """Gives the layout with fewer layers where most are summed up, and with fewer where most are updated.

    Every split that has less of one of the two is one that the former or the latter allows: who goes on with what this
    gives until it gives nothing has seen, for each split, one that is no slower and has no more on its fullest stage.

    Args:
        pricing: of the question.
        layout: of a pipeline.
        teams: all that the layout has, one at least.
    """
    state, found = pricing.state(layout.group), []
    first, last = _ends(state, 0)
    times = [team.time for team in teams]
    for measure, limit in (
        (_GRADIENTS, max(time.synced_bytes for time in times)),
        (_UPDATED, max(time.updated_bytes for time in times)),
    ):
        below = (_count_below(limit, measure(end), measure(state.layer)) for end in (first, NOTHING, last))
        most = Most(*map(min, layout.most, below))
        held = most.of_stages(layout.group.pipeline)
        if min(held) >= 1 and sum(held) >= pricing.layers:
            found.append(layout._replace(most=most))
    return found


def _ends(state: StateBytes, layers: int) -> tuple[PartBytes, PartBytes]:
    """What the first and the last stage of two or more hold with so many layers."""
    return (
        state.stage(layers, is_first=True, is_last=False),
        state.stage(layers, is_first=False, is_last=True),
    )


def _count_below(limit: float, extra: float, layer: float) -> int:
    """With how many layers at most a stage has less than the limit."""
    if layer <= 0:
        return ANY_NUMBER if extra < limit else 0
    return max(0, math.ceil((limit - extra) / layer - ROUNDED) - 1)
