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


def find_useful_levels(pricing: CostModel, stages: int) -> tuple[int, ...]:
    """Gives the levels in one domain of which it is worth to place a replica of so many stages; the last has all hosts.

    Left out is only what never changes the best step, so that a link that becomes as fast as another takes no plan
    away: a level with the same links as the next one outward, if that is not the last, where hosts are alike. Then
    nothing depends on which of the two a replica is inside, and the larger domains have no fewer replicas. Hosts that
    are not alike make other pipelines in smaller domains; and what lies inside the last level is in no block, so more
    messages may follow one another there.
    """
    last = len(pricing.links) - 1
    kinds = pricing.request.pool.kinds
    is_alike = len({kind.accelerator for kind in kinds} if stages == 1 else kinds) == 1
    return tuple(
        level
        for level in range(min(1, last), last + 1)
        if level >= last - 1 or not is_alike or pricing.links[level] != pricing.links[level + 1]
    )


def enumerate_axes(pricing: CostModel, fixed: PlanConstraints) -> Iterator[ReplicaAxes]:
    """Yields the sizes of the axes that cut a layer and of the pipeline, FSDP left at 1."""
    profile, devices = pricing.request.program_cost, pricing.devices

    def sizes(axis: Axis) -> tuple[int, ...]:
        allowed = find_axis_sizes(profile, axis, devices)
        return tuple(size for size in allowed if size == fixed.axes.get(axis, size))

    stages = sizes(Axis.PIPELINE)
    for tensor, sequence, expert in itertools.product(
        sizes(Axis.TENSOR), sizes(Axis.SEQUENCE), sizes(Axis.EXPERT)
    ):
        for stage_count in stages:
            if tensor * sequence * expert * stage_count > devices:
                break
            yield ReplicaAxes(tensor=tensor, sequence=sequence, expert=expert, pipeline=stage_count)


def visit_candidates(
    pricing: CostModel,
    fixed: PlanConstraints,
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
    _Visit(pricing, fixed, limit_s, keep).run()


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
    group: ReplicaAxes
    known: _Known
    replicas: int = 0
    batch: MicrobatchConfig | None = None


NO_GROUP = ReplicaAxes(0, 0, 0, 0, 0)
"""Its limit is that of any that was not found yet."""


class _Visit:
    """One walk through the tree of plans, the least bound first."""

    def __init__(
        self,
        pricing: CostModel,
        fixed: PlanConstraints,
        limit_s: Callable[[ReplicaAxes], float],
        keep: Callable[[PlanCandidate], None],
    ) -> None:
        self._pricing = pricing
        self._fixed = fixed
        self._limit_s = limit_s
        self._keep = keep
        self._levels = tuple(find_useful_levels(pricing, stages) for stages in (1, 2))
        self._bounds = LowerBounds(pricing, self._levels[0])
        wanted = fixed.axes.get(Axis.FSDP)
        parts = find_divisors(pricing.request.global_batch)
        self._fsdps = [size for size in parts if wanted in (None, size)]
        self._layouts: dict[ReplicaAxes, tuple[tuple[DeviceLayout, int], ...]] = {}

    def run(self) -> None:
        """Until nothing is left that could be of use."""
        groups = enumerate_axes(self._pricing, self._fixed)
        queue = [_Node(self._bounds.bound_step_compute_s(group), group, _Known.BARE) for group in groups]
        heapq.heapify(queue)
        while queue:
            node = heapq.heappop(queue)
            if node.least_s >= self._limit_s(NO_GROUP):
                return
            for child in self._expand(node):
                if child.least_s < self._limit_s(child.group):
                    heapq.heappush(queue, child)

    def _expand(self, node: _Node) -> Iterator[_Node]:
        match node.known:
            case _Known.BARE:
                yield _Node(self._bounds.bound_step_s(node.group), node.group, _Known.NARROW)
            case _Known.NARROW:
                yield from self._with_fsdp(node.group)
            case _Known.FSDP:
                sharp = self._bounds.bound_feasible_step_s(node.group, node.replicas)
                yield node._replace(least_s=sharp, known=_Known.SHARP)
            case _Known.SHARP:
                yield from self._with_batch(node)
            case _Known.BATCH:
                assert node.batch is not None
                self._visit_batch(node.group, node.batch)
            case _:
                assert_never(node.known)

    def _with_fsdp(self, narrow: ReplicaAxes) -> Iterator[_Node]:
        tensor, sequence, expert, _, stages = narrow
        each, devices = narrow.devices, self._pricing.devices
        most = self._fixed.axes.get(Axis.REPLICA, devices)
        least = self._fixed.min_replicas
        for fsdp in self._fsdps:
            replicas = min(devices // (each * fsdp), most)
            if replicas < least:
                return
            group = ReplicaAxes(tensor, sequence, expert, fsdp, stages)
            yield _Node(self._bounds.bound_fsdp_step_s(group, replicas), group, _Known.FSDP, replicas)

    def _with_batch(self, node: _Node) -> Iterator[_Node]:
        question, group = self._pricing.request, node.group
        share = question.global_batch // group.fsdp
        for again in (False, True) if question.program_cost.can_remat else (False,):
            for size in find_divisors(share):
                batch = MicrobatchConfig(size, again)
                if share // size < self._fixed.min_replicas or not self._bounds.fitting.may_fit(group, batch):
                    break  # a larger microbatch needs more still, and there are fewer of them
                if self._fixed.microbatch in (None, batch):
                    bound = self._bounds.bound_microbatch_step_s(group, batch, node.replicas)
                    yield _Node(bound, group, _Known.BATCH, node.replicas, batch)

    def _layouts_of(self, group: ReplicaAxes) -> tuple[tuple[DeviceLayout, int], ...]:
        """With how many replicas the hosts can make of each."""
        if group not in self._layouts:
            layouts = enumerate_layouts(
                group,
                self._pricing.request.pool.devices_per_host,
                self._levels[group.pipeline > 1],
            )
            self._layouts[group] = tuple((one, self._pricing.count_replicas(one)) for one in layouts)
        return self._layouts[group]

    def _visit_batch(self, group: ReplicaAxes, batch: MicrobatchConfig) -> None:
        for layout, replicas in self._layouts_of(group):
            if self._bounds.bound_microbatch_step_s(group, batch, replicas) < self._limit_s(group):
                self._visit_layout(layout, batch)

    def _visit_layout(self, layout: DeviceLayout, batch: MicrobatchConfig) -> None:
        """Replicas one by one, then in blocks, which shorten nothing but the sum over replicas."""
        pricing = self._pricing
        teams = pricing.find_block_classes(layout, batch, self._limit_s(layout.axes))
        if not teams:
            return
        self._keep_all(layout, batch, teams)
        if layout.level == layout.outermost_level:
            return
        most = min(
            sum(team.blocks for team in teams),
            pricing.count_microbatches(layout.axes, batch) // layout.replicas_per_slot,
        )
        if most < 2:
            return
        done_s = pricing.assign_microbatches(layout, batch, teams, most).makespan_s
        done_s += pricing.request.calibration.step_overhead_s
        for block in BLOCK_SIZES[1:]:
            if block > most or done_s >= self._limit_s(layout.axes):
                return
            blocked = layout._replace(block_size=block)
            self._keep_all(blocked, batch, pricing.find_block_classes(blocked, batch))

    def _keep_all(self, layout: DeviceLayout, batch: MicrobatchConfig, teams: tuple[BlockClass, ...]) -> None:
        """Layers split for the fastest microbatch; then, while that may be of use, with less on the fullest stage."""
        pricing, group = self._pricing, layout.axes
        waiting, seen = [(layout, teams)], {layout}
        while waiting:
            layout, teams = waiting.pop()
            evened = relax_layer_limits(pricing, layout, batch, teams)
            least_s = math.inf
            for blocks, price in enumerate_block_counts(
                pricing, self._fixed, layout, batch, teams, self._limit_s(group)
            ):
                self._keep(PlanCandidate(price.step_s, layout, batch, blocks))
                least_s = min(
                    least_s,
                    price.assignment.makespan_s
                    + sum(pricing.estimate_reduction_and_update_s(layout, evened, blocks)),
                )
            if group.pipeline == 1 or least_s >= self._limit_s(group):
                continue
            for other in tighten_layer_limits(pricing, layout, teams):
                if other not in seen:
                    seen.add(other)
                    waiting.append((other, pricing.find_block_classes(other, batch)))


def enumerate_block_counts(
    pricing: CostModel,
    fixed: PlanConstraints,
    layout: DeviceLayout,
    batch: MicrobatchConfig,
    teams: tuple[BlockClass, ...],
    limit_s: float,
) -> Iterator[tuple[int, PlanCost]]:
    """Yields the numbers of blocks that may be best, the largest first.

    Of all numbers for which the last replica is done at the same time the fewest are best: the sum over them is
    quicker. Fewer are done later, so it ends where that alone is as late as the limit.
    """
    each = layout.replicas_per_block
    fewest = -(-fixed.min_replicas // each)
    most = min(sum(team.blocks for team in teams), pricing.count_microbatches(layout.axes, batch) // each)
    if (wanted := fixed.axes.get(Axis.REPLICA)) is not None:
        if wanted % each == 0 and fewest <= wanted // each <= most:
            yield wanted // each, pricing.estimate_plan(layout, batch, teams, wanted // each)
        return
    while most >= fewest:
        finish = pricing.assign_microbatches(layout, batch, teams, most).makespan_s
        if finish >= limit_s:
            return
        low, high = fewest, most
        while low < high:
            middle = (low + high) // 2
            if pricing.assign_microbatches(layout, batch, teams, middle).makespan_s <= finish:
                high = middle
            else:
                low = middle + 1
        price = pricing.estimate_plan(layout, batch, teams, low)
        limit_s = min(limit_s, price.step_s)
        yield low, price
        most = low - 1
