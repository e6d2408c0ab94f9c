"""Branch and bound over all plans, in the order of their lower bounds.

Exact over its space: sizes of tensor, sequence, expert that the program allows; any number of stages up to the layers,
and any split of them; any FSDP and any microbatch that divide the batch; any number of replicas; layouts as
`enumerate_layouts` returns them. A branch is pruned when its lower bound is not below the best plan found, or when its
least memory does not fit (Land and Doig 1960, https://doi.org/10.2307/1910129).
"""

import enum
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, assert_never

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.cost_model import BlockClass, CostModel, PlanCost
from resilient_jax.planning.device_layout import (
    DeviceLayout,
    MicrobatchConfig,
    ReplicaAxes,
    enumerate_layouts,
)
from resilient_jax.planning.lower_bounds import LowerBounds, find_divisors
from resilient_jax.planning.stage_balancing import bound_block_classes, tighten_layer_limits
from resilient_jax.planning.tensor_partition import find_axis_sizes

BLOCK_SIZES = tuple(sorted({factor << power for power in range(16) for factor in (1, 3)}))
"""Sizes of blocks of replicas: a fixed set, so that more hosts never remove a choice."""


class PlanCandidate(NamedTuple):
    """A plan in short, with its step time."""

    step_s: float
    layout: DeviceLayout
    microbatch: MicrobatchConfig
    blocks: int


class PlanConstraints(NamedTuple):
    """What is given and not searched for: sizes of axes, a microbatch or None, and the least number of replicas."""

    axes: Mapping[Axis, int]
    microbatch: MicrobatchConfig | None = None
    min_replicas: int = 1


NO_FIXED_AXES: Mapping[Axis, int] = {}
NO_CONSTRAINTS = PlanConstraints(NO_FIXED_AXES)


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


def enumerate_axes(cost_model: CostModel, constraints: PlanConstraints) -> Iterator[ReplicaAxes]:
    """Yield the sizes of the axes that shard a layer and of the pipeline, with FSDP left at 1."""
    program_cost, devices = cost_model.request.program_cost, cost_model.devices

    def sizes(axis: Axis) -> tuple[int, ...]:
        allowed = find_axis_sizes(program_cost, axis, devices)
        return tuple(size for size in allowed if size == constraints.axes.get(axis, size))

    stages = sizes(Axis.PIPELINE)
    for tensor, sequence, expert in itertools.product(
        sizes(Axis.TENSOR), sizes(Axis.SEQUENCE), sizes(Axis.EXPERT)
    ):
        for stage_count in stages:
            # Sizes are ascending, so all further pipelines need too many devices, too.
            if tensor * sequence * expert * stage_count > devices:
                break
            yield ReplicaAxes(tensor=tensor, sequence=sequence, expert=expert, pipeline=stage_count)


def visit_candidates(
    cost_model: CostModel,
    constraints: PlanConstraints,
    limit_s: Callable[[ReplicaAxes], float],
    keep: Callable[[PlanCandidate], None],
) -> None:
    """Call `keep` with every candidate whose step time could be below its limit.

    Args:
        cost_model: of the request.
        constraints: what is given.
        limit_s: the step time from which on a replica's axes are of no use; may only fall between calls.
        keep: called with each candidate.
    """
    _Visit(cost_model, constraints, limit_s, keep).run()


class _Known(enum.IntEnum):
    """How far a node of the tree is refined: each refinement takes longer, and its bound is larger or equal."""

    BARE = 0
    """Axes that shard a layer, and the stages; the bound omits collectives."""
    NARROW = 1
    """The same axes with collectives. Most nodes never get here, so this bound is computed only for the next node."""
    FSDP = 2
    """With FSDP, by a quick bound."""
    SHARP = 3
    """The same axes by a sharp bound."""
    BATCH = 4
    """With the microbatch."""


class _Node(NamedTuple):
    least_s: float
    axes: ReplicaAxes
    known: _Known
    replicas: int = 0
    microbatch: MicrobatchConfig | None = None


ANY_AXES = ReplicaAxes(0, 0, 0, 0, 0)
"""Its limit is the limit of any axes without a candidate so far."""


class _Visit:
    """One walk through the tree of plans, the least bound first."""

    def __init__(
        self,
        cost_model: CostModel,
        constraints: PlanConstraints,
        limit_s: Callable[[ReplicaAxes], float],
        keep: Callable[[PlanCandidate], None],
    ) -> None:
        self._cost_model = cost_model
        self._constraints = constraints
        self._limit_s = limit_s
        self._keep = keep
        self._levels = tuple(find_useful_levels(cost_model, stages) for stages in (1, 2))
        self._bounds = LowerBounds(cost_model, self._levels[0])
        wanted = constraints.axes.get(Axis.FSDP)
        parts = find_divisors(cost_model.request.global_batch)
        self._fsdps = [size for size in parts if wanted in (None, size)]
        self._layouts: dict[ReplicaAxes, tuple[tuple[DeviceLayout, int], ...]] = {}

    def run(self) -> None:
        """Expand nodes until none can be below its limit."""
        all_axes = enumerate_axes(self._cost_model, self._constraints)
        queue = [_Node(self._bounds.bound_step_compute_s(axes), axes, _Known.BARE) for axes in all_axes]
        heapq.heapify(queue)
        # Best first: a bound is at most the step time of every plan below its node, and the queue returns the least
        # bound, so the search may end at the first bound that reaches the limit.
        while queue:
            node = heapq.heappop(queue)
            if node.least_s >= self._limit_s(ANY_AXES):
                return
            for child in self._expand(node):
                if child.least_s < self._limit_s(child.axes):
                    heapq.heappush(queue, child)

    def _expand(self, node: _Node) -> Iterator[_Node]:
        match node.known:
            case _Known.BARE:
                yield _Node(self._bounds.bound_step_s(node.axes), node.axes, _Known.NARROW)
            case _Known.NARROW:
                yield from self._with_fsdp(node.axes)
            case _Known.FSDP:
                sharp = self._bounds.bound_feasible_step_s(node.axes, node.replicas)
                yield node._replace(least_s=sharp, known=_Known.SHARP)
            case _Known.SHARP:
                yield from self._with_batch(node)
            case _Known.BATCH:
                assert node.microbatch is not None
                self._visit_batch(node.axes, node.microbatch)
            case _:
                assert_never(node.known)

    def _with_fsdp(self, narrow: ReplicaAxes) -> Iterator[_Node]:
        tensor, sequence, expert, _, stages = narrow
        # m p devices of a replica before FSDP, N devices in all.
        each, devices = narrow.devices, self._cost_model.devices
        most_blocks = self._constraints.axes.get(Axis.REPLICA, devices)
        least = self._constraints.min_replicas
        for fsdp in self._fsdps:
            # R <= floor(N / (m p f)) for FSDP of size f; it falls with f, and sizes are ascending.
            replicas = min(devices // (each * fsdp), most_blocks)
            if replicas < least:
                return
            axes = ReplicaAxes(tensor, sequence, expert, fsdp, stages)
            yield _Node(self._bounds.bound_fsdp_step_s(axes, replicas), axes, _Known.FSDP, replicas)

    def _with_batch(self, node: _Node) -> Iterator[_Node]:
        request, axes = self._cost_model.request, node.axes
        # share = B / f sequences of a step are computed at each position along FSDP, in B / (f b) microbatches of b;
        # each replica needs one. A larger b needs more memory still, and gives fewer microbatches.
        share = request.global_batch // axes.fsdp
        for is_remat in (False, True) if request.program_cost.can_remat else (False,):
            for size in find_divisors(share):
                microbatch = MicrobatchConfig(size, is_remat)
                if share // size < self._constraints.min_replicas or not self._bounds.memory_filter.may_fit(
                    axes, microbatch
                ):
                    break
                if self._constraints.microbatch in (None, microbatch):
                    bound = self._bounds.bound_microbatch_step_s(axes, microbatch, node.replicas)
                    yield _Node(bound, axes, _Known.BATCH, node.replicas, microbatch)

    def _layouts_of(self, axes: ReplicaAxes) -> tuple[tuple[DeviceLayout, int], ...]:
        """Return the layouts of these axes, each with the number of replicas that the hosts can form."""
        if axes not in self._layouts:
            layouts = enumerate_layouts(
                axes,
                self._cost_model.request.pool.devices_per_host,
                self._levels[axes.pipeline > 1],
            )
            self._layouts[axes] = tuple((one, self._cost_model.count_replicas(one)) for one in layouts)
        return self._layouts[axes]

    def _visit_batch(self, axes: ReplicaAxes, microbatch: MicrobatchConfig) -> None:
        for layout, replicas in self._layouts_of(axes):
            if self._bounds.bound_microbatch_step_s(axes, microbatch, replicas) < self._limit_s(axes):
                self._visit_layout(layout, microbatch)

    def _visit_layout(self, layout: DeviceLayout, microbatch: MicrobatchConfig) -> None:
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
                cost_model, self._constraints, layout, microbatch, classes, self._limit_s(axes)
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
    cost_model: CostModel,
    constraints: PlanConstraints,
    layout: DeviceLayout,
    microbatch: MicrobatchConfig,
    classes: tuple[BlockClass, ...],
    limit_s: float,
) -> Iterator[tuple[int, PlanCost]]:
    """Yield the numbers of blocks that may be best, the largest first, each with its plan cost.

    Of all numbers with the same makespan the smallest is best: its all-reduce over replicas is faster. Smaller numbers
    have a larger makespan, so the search ends when the makespan alone reaches the limit.
    """
    each = layout.replicas_per_block
    fewest = -(-constraints.min_replicas // each)
    most_blocks = min(
        sum(block_class.blocks for block_class in classes),
        cost_model.memory.count_microbatches(layout.axes, microbatch) // each,
    )
    if (wanted := constraints.axes.get(Axis.REPLICA)) is not None:
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
