"""Every plan that a search looks at, in the order of what it could be at best; those that cannot win are left out.

Exact over its space: sizes of tensor, sequence, expert that the program allows; any number of stages up to the layers,
and any split of them; any FSDP and any microbatch that divide the batch; any number of replicas; layouts as
`enumerate_layouts` gives them. A group of axes is skipped when its lower bound is not below the best found, or the least
memory of it does not fit.
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
from resilient_jax.planning.stage_balancing import relax_layer_limits, tighten_layer_limits
from resilient_jax.planning.tensor_partition import find_axis_sizes

BLOCK_SIZES = tuple(sorted({factor << power for power in range(16) for factor in (1, 3)}))
"""Sizes of blocks of replicas: fixed, so that more hosts never take a choice away."""


class PlanCandidate(NamedTuple):
    """A plan in few words, with its price."""

    step_s: float
    layout: DeviceLayout
    microbatch: MicrobatchConfig
    blocks: int


class PlanConstraints(NamedTuple):
    """What is not searched for. Axes by name; a microbatch, or None; and how many replicas there are at least."""

    axes: Mapping[Axis, int]
    microbatch: MicrobatchConfig | None = None
    min_replicas: int = 1


NO_FIXED_AXES: Mapping[Axis, int] = {}
NO_CONSTRAINTS = PlanConstraints(NO_FIXED_AXES)


def find_useful_levels(cost_model: CostModel, stages: int) -> tuple[int, ...]:
    """Gives the levels in one domain of which it is worth to place a replica of so many stages; the last has all hosts.

    Left out is only what never changes the best step, so that a link that becomes as fast as another takes no plan
    away: a level with the same links as the next one outward, if that is not the last, where hosts are alike. Then
    nothing depends on which of the two a replica is inside, and the larger domains have no fewer replicas. Hosts that
    are not alike make other pipelines in smaller domains; and what lies inside the last level is in no block, so more
    messages may follow one another there.
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
    """Yields the sizes of the axes that cut a layer and of the pipeline, FSDP left at 1."""
    program_cost, devices = cost_model.request.program_cost, cost_model.devices

    def sizes(axis: Axis) -> tuple[int, ...]:
        allowed = find_axis_sizes(program_cost, axis, devices)
        return tuple(size for size in allowed if size == constraints.axes.get(axis, size))

    stages = sizes(Axis.PIPELINE)
    for tensor, sequence, expert in itertools.product(
        sizes(Axis.TENSOR), sizes(Axis.SEQUENCE), sizes(Axis.EXPERT)
    ):
        for stage_count in stages:
            if tensor * sequence * expert * stage_count > devices:
                break
            yield ReplicaAxes(tensor=tensor, sequence=sequence, expert=expert, pipeline=stage_count)


def visit_candidates(
    cost_model: CostModel,
    constraints: PlanConstraints,
    limit_s: Callable[[ReplicaAxes], float],
    keep: Callable[[PlanCandidate], None],
) -> None:
    """Gives `keep` every candidate that could be below its limit.

    Args:
        pricing: of the question.
        fixed: what is given.
        limit_s: for a group of axes the step time from which on it is of no use; may only fall.
        keep: takes the candidate.
    """
    _Visit(cost_model, constraints, limit_s, keep).run()


class _Known(enum.IntEnum):
    """What a node of the tree has: each step of the way its bound is no less, and takes longer to find."""

    BARE = 0
    """Axes that cut a layer, and the stages; the bound leaves out what is exchanged."""
    NARROW = 1
    """The same axes with what is exchanged. Most nodes never get here, so it is found only when they are next."""
    FSDP = 2
    """FSDP too, by its quick bound."""
    SHARP = 3
    """The same axes by their sharp bound."""
    BATCH = 4
    """The microbatch too."""


class _Node(NamedTuple):
    least_s: float
    axes: ReplicaAxes
    known: _Known
    replicas: int = 0
    microbatch: MicrobatchConfig | None = None


NO_GROUP = ReplicaAxes(0, 0, 0, 0, 0)
"""Its limit is that of any that was not found yet."""


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
        """Until nothing is left that could be of use."""
        all_axes = enumerate_axes(self._cost_model, self._constraints)
        queue = [_Node(self._bounds.bound_step_compute_s(axes), axes, _Known.BARE) for axes in all_axes]
        heapq.heapify(queue)
        while queue:
            node = heapq.heappop(queue)
            if node.least_s >= self._limit_s(NO_GROUP):
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
        each, devices = narrow.devices, self._cost_model.devices
        most = self._constraints.axes.get(Axis.REPLICA, devices)
        least = self._constraints.min_replicas
        for fsdp in self._fsdps:
            replicas = min(devices // (each * fsdp), most)
            if replicas < least:
                return
            axes = ReplicaAxes(tensor, sequence, expert, fsdp, stages)
            yield _Node(self._bounds.bound_fsdp_step_s(axes, replicas), axes, _Known.FSDP, replicas)

    def _with_batch(self, node: _Node) -> Iterator[_Node]:
        request, axes = self._cost_model.request, node.axes
        share = request.global_batch // axes.fsdp
        for again in (False, True) if request.program_cost.can_remat else (False,):
            for size in find_divisors(share):
                microbatch = MicrobatchConfig(size, again)
                if share // size < self._constraints.min_replicas or not self._bounds.fitting.may_fit(
                    axes, microbatch
                ):
                    break  # a larger microbatch needs more still, and there are fewer of them
                if self._constraints.microbatch in (None, microbatch):
                    bound = self._bounds.bound_microbatch_step_s(axes, microbatch, node.replicas)
                    yield _Node(bound, axes, _Known.BATCH, node.replicas, microbatch)

    def _layouts_of(self, axes: ReplicaAxes) -> tuple[tuple[DeviceLayout, int], ...]:
        """With how many replicas the hosts can make of each."""
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
        """Replicas one by one, then in blocks, which shorten nothing but the sum over replicas."""
        cost_model = self._cost_model
        classes = cost_model.find_block_classes(layout, microbatch, self._limit_s(layout.axes))
        if not classes:
            return
        self._keep_all(layout, microbatch, classes)
        if layout.level == layout.outermost_level:
            return
        most = min(
            sum(team.blocks for team in classes),
            cost_model.memory.count_microbatches(layout.axes, microbatch) // layout.replicas_per_slot,
        )
        if most < 2:
            return
        done_s = cost_model.assign_microbatches(layout, microbatch, classes, most).makespan_s
        done_s += cost_model.request.calibration.step_overhead_s
        for block in BLOCK_SIZES[1:]:
            if block > most or done_s >= self._limit_s(layout.axes):
                return
            blocked = layout._replace(block_size=block)
            self._keep_all(blocked, microbatch, cost_model.find_block_classes(blocked, microbatch))

    def _keep_all(
        self, layout: DeviceLayout, microbatch: MicrobatchConfig, classes: tuple[BlockClass, ...]
    ) -> None:
        """Layers split for the fastest microbatch; then, while that may be of use, with less on the fullest stage."""
        cost_model, axes = self._cost_model, layout.axes
        waiting, seen = [(layout, classes)], {layout}
        while waiting:
            layout, classes = waiting.pop()
            evened = relax_layer_limits(cost_model, layout, microbatch, classes)
            least_s = math.inf
            for blocks, price in enumerate_block_counts(
                cost_model, self._constraints, layout, microbatch, classes, self._limit_s(axes)
            ):
                self._keep(PlanCandidate(price.step_s, layout, microbatch, blocks))
                least_s = min(
                    least_s,
                    price.assignment.makespan_s
                    + sum(cost_model.estimate_reduction_and_update_s(layout, evened, blocks)),
                )
            if axes.pipeline == 1 or least_s >= self._limit_s(axes):
                continue
            for other in tighten_layer_limits(cost_model, layout, classes):
                if other not in seen:
                    seen.add(other)
                    waiting.append((other, cost_model.find_block_classes(other, microbatch)))


def enumerate_block_counts(
    cost_model: CostModel,
    constraints: PlanConstraints,
    layout: DeviceLayout,
    microbatch: MicrobatchConfig,
    classes: tuple[BlockClass, ...],
    limit_s: float,
) -> Iterator[tuple[int, PlanCost]]:
    """Yields the numbers of blocks that may be best, the largest first.

    Of all numbers for which the last replica is done at the same time the fewest are best: the sum over them is
    quicker. Fewer are done later, so it ends where that alone is as late as the limit.
    """
    each = layout.replicas_per_block
    fewest = -(-constraints.min_replicas // each)
    most = min(
        sum(team.blocks for team in classes),
        cost_model.memory.count_microbatches(layout.axes, microbatch) // each,
    )
    if (wanted := constraints.axes.get(Axis.REPLICA)) is not None:
        if wanted % each == 0 and fewest <= wanted // each <= most:
            yield wanted // each, cost_model.estimate_plan(layout, microbatch, classes, wanted // each)
        return
    while most >= fewest:
        finish = cost_model.assign_microbatches(layout, microbatch, classes, most).makespan_s
        if finish >= limit_s:
            return
        low, high = fewest, most
        while low < high:
            middle = (low + high) // 2
            if cost_model.assign_microbatches(layout, microbatch, classes, middle).makespan_s <= finish:
                high = middle
            else:
                low = middle + 1
        price = cost_model.estimate_plan(layout, microbatch, classes, low)
        limit_s = min(limit_s, price.step_s)
        yield low, price
        most = low - 1
