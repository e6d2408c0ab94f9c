"""The candidates of a search: every row of the table, with its layouts, splits of the layers, and numbers of blocks.

Exact over its space: sizes of tensor, sequence, expert that the program allows; any number of stages up to the layers,
and any split of them; any FSDP and any microbatch that divide the batch; any number of replicas; layouts as
`enumerate_layouts` returns them. Rows are priced in the order of `CandidateTable.least_s`, which is at most the step
time of each of their plans, so the search ends at the first row that cannot be below the best plan found.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from resilient_jax.planning.candidate_table import tabulate_candidates
from resilient_jax.planning.cost_model import BlockClass, CostModel, PlanCost
from resilient_jax.planning.device_layout import (
    DeviceLayout,
    MicrobatchConfig,
    ReplicaAxes,
    enumerate_layouts,
)
from resilient_jax.planning.search_space import SearchSpace
from resilient_jax.planning.stage_balancing import bound_block_classes, tighten_layer_limits

BLOCK_SIZES = tuple(sorted({factor << power for power in range(16) for factor in (1, 3)}))
"""Sizes of blocks of replicas: a fixed set, so that more hosts never remove a choice."""
ANY_AXES = ReplicaAxes(0, 0, 0, 0, 0)
"""Its limit is the limit of any axes without a candidate so far."""


class PlanCandidate(NamedTuple):
    """A plan in short, with its step time."""

    step_s: float
    layout: DeviceLayout
    microbatch: MicrobatchConfig
    blocks: int


def find_useful_levels(cost_model: CostModel, stages: int) -> tuple[int, ...]:
    """Return the levels whose domains are worth placing a replica in; the last level connects all hosts.

    Only levels that never change the best step are left out, so that a link that becomes as fast as another removes no
    plan: a level with the same links as the next one outward, if that is not the last, where hosts are equal. Then
    nothing depends on which of the two contains a replica, and the larger domains have no fewer replicas. Unequal hosts
    form other pipelines in smaller domains; and a replica of the last level is in no block, so more messages may follow
    one another there.
    """
    last = len(cost_model.links) - 1
    kinds = cost_model.request.pool.kinds
    is_alike = len({kind.accelerator for kind in kinds} if stages == 1 else kinds) == 1
    return tuple(
        level
        for level in range(min(1, last), last + 1)
        if level >= last - 1 or not is_alike or cost_model.links[level] != cost_model.links[level + 1]
    )


def visit_candidates(
    space: SearchSpace,
    limit_s: Callable[[ReplicaAxes], float],
    keep: Callable[[PlanCandidate], None],
) -> None:
    """Call `keep` with every candidate whose step time could be below its limit.

    Args:
        limit_s: the step time from which on a replica's axes are of no use; may only fall between calls.
    """
    cost_model = space.cost_model
    levels = tuple(find_useful_levels(cost_model, stages) for stages in (1, 2))
    devices = cost_model.request.pool.devices_per_host
    layouts: dict[ReplicaAxes, tuple[DeviceLayout, ...]] = {}
    pricing = _Pricing(space, limit_s, keep)
    for least_s, axes, microbatch in tabulate_candidates(space, levels[1]).ascending():
        if least_s >= limit_s(ANY_AXES):
            return
        if least_s < limit_s(axes):
            if axes not in layouts:
                found = enumerate_layouts(axes, devices, levels[axes.pipeline > 1])
                layouts[axes] = tuple(layout for layout in found if space.allows_layout(layout))
            for layout in layouts[axes]:
                pricing.visit_layout(layout, microbatch)


class _Pricing:
    """The exact prices of one request's candidates."""

    def __init__(
        self,
        space: SearchSpace,
        limit_s: Callable[[ReplicaAxes], float],
        keep: Callable[[PlanCandidate], None],
    ) -> None:
        self._cost_model, self._space = space.cost_model, space
        self._limit_s = limit_s
        self._keep = keep

    def visit_layout(self, layout: DeviceLayout, microbatch: MicrobatchConfig) -> None:
        """Visit replicas one by one, then in blocks, which shorten only the all-reduce over replicas."""
        cost_model = self._cost_model
        classes = cost_model.find_block_classes(layout, microbatch, self._limit_s(layout.axes))
        if not classes:
            return
        self._keep_all(layout, microbatch, classes)
        # Blocks are inside a domain. Each replica needs a microbatch: blocks <= microbatches / replicas per slot.
        if layout.level == layout.outermost_level:
            return
        most_blocks = min(
            sum(block_class.blocks for block_class in classes),
            cost_model.memory.count_microbatches(layout.axes, microbatch) // layout.replicas_per_slot,
        )
        if most_blocks < 2:
            return
        # Lower bound for all block sizes, in s: makespan on all blocks + overhead of a step, without the all-reduce.
        done_s = cost_model.assign_microbatches(layout, microbatch, classes, most_blocks).makespan_s
        done_s += cost_model.request.calibration.step_overhead_s
        for block in BLOCK_SIZES[1:]:
            if block > most_blocks or done_s >= self._limit_s(layout.axes):
                return
            blocked = layout._replace(block_size=block)
            self._keep_all(blocked, microbatch, cost_model.find_block_classes(blocked, microbatch))

    def _keep_all(
        self, layout: DeviceLayout, microbatch: MicrobatchConfig, classes: tuple[BlockClass, ...]
    ) -> None:
        """Visit the fastest split of the layers, then, while of possible use, splits with less on the fullest stage."""
        cost_model, axes = self._cost_model, layout.axes
        open_layouts, seen = [(layout, classes)], {layout}
        while open_layouts:
            layout, classes = open_layouts.pop()
            # least_s = makespan of this split + all-reduce and update of the least bytes that any split has: a lower
            # bound of all slower splits. Splits with less on the fullest stage are visited while it is below the limit.
            relaxed = bound_block_classes(cost_model, layout, microbatch, classes)
            least_s = math.inf
            for blocks, cost in enumerate_block_counts(
                self._space, layout, microbatch, classes, self._limit_s(axes)
            ):
                self._keep(PlanCandidate(cost.step_s, layout, microbatch, blocks))
                least_s = min(
                    least_s,
                    cost.assignment.makespan_s
                    + sum(cost_model.estimate_reduction_and_update_s(layout, relaxed, blocks)),
                )
            if axes.pipeline == 1 or least_s >= self._limit_s(axes):
                continue
            for other in tighten_layer_limits(cost_model, layout, classes):
                if other not in seen:
                    seen.add(other)
                    open_layouts.append((other, cost_model.find_block_classes(other, microbatch)))


def enumerate_block_counts(
    space: SearchSpace,
    layout: DeviceLayout,
    microbatch: MicrobatchConfig,
    classes: tuple[BlockClass, ...],
    limit_s: float,
) -> Iterator[tuple[int, PlanCost]]:
    """Yield the numbers of blocks that may be best, the largest first, each with its plan cost.

    Of all numbers with the same makespan the smallest is best: its all-reduce over replicas is faster. Smaller numbers
    have a larger makespan, so the search ends when the makespan alone reaches the limit.
    """
    cost_model, each = space.cost_model, layout.replicas_per_block
    fewest = -(-space.constraints.min_replicas // each)
    most_blocks = min(
        sum(block_class.blocks for block_class in classes),
        cost_model.memory.count_microbatches(layout.axes, microbatch) // each,
    )
    stages = layout.axes.pipeline
    if (wanted := space.count_replicas(layout.axes.devices // stages, stages)) is not None:
        if wanted % each == 0 and fewest <= wanted // each <= most_blocks:
            yield wanted // each, cost_model.estimate_plan(layout, microbatch, classes, wanted // each)
        return
    while most_blocks >= fewest:
        makespan_s = cost_model.assign_microbatches(layout, microbatch, classes, most_blocks).makespan_s
        if makespan_s >= limit_s:
            return
        # The makespan does not grow with the number of blocks: bisect for the least number with the same makespan.
        low, high = fewest, most_blocks
        while low < high:
            middle = (low + high) // 2
            if cost_model.assign_microbatches(layout, microbatch, classes, middle).makespan_s <= makespan_s:
                high = middle
            else:
                low = middle + 1
        cost = cost_model.estimate_plan(layout, microbatch, classes, low)
        limit_s = min(limit_s, cost.step_s)
        yield low, cost
        most_blocks = low - 1
