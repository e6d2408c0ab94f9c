"""Every plan that a search looks at, in the order of what it could be at best; those that cannot win are left out.

Exact over its space: sizes of tensor, sequence, expert that the program allows; any number of stages up to the layers;
any FSDP and any microbatch that divide the batch; any number of replicas; layouts as `layouts_of` gives them. A group
of axes is skipped when its lower bound is not below the best found, or the least memory of it does not fit.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.bounds import Bounds, divides_batch, state_bytes
from resilient_jax.planning.cutting import find_sizes
from resilient_jax.planning.pricing import Price, Pricing, Team
from resilient_jax.planning.shape import Group, Layout, Microbatch, layouts_of

BLOCKS = tuple(sorted({factor << power for power in range(16) for factor in (1, 3)}))
"""Sizes of blocks of replicas: fixed, so that more hosts never take a choice away."""


class Candidate(NamedTuple):
    """A plan in few words, with its price."""

    step_s: float
    layout: Layout
    batch: Microbatch
    blocks: int


class Fixed(NamedTuple):
    """What is not searched for. Axes by name; a microbatch, or None."""

    axes: Mapping[Axis, int]
    batch: Microbatch | None = None


FREE = Fixed({})


def useful_levels(pricing: Pricing) -> tuple[int, ...]:
    """Gives the levels that it is worth to stay inside: the last, and those with other links than the next one
    outward."""
    last = max(len(pricing.links) - 1, 0)
    other = [level for level in range(1, last) if pricing.links[level] != pricing.links[level + 1]]
    return (*other, last)


def groups_of(pricing: Pricing, fixed: Fixed) -> Iterator[Group]:
    """Yields the sizes of the axes that cut a layer and of the pipeline, FSDP left at 1."""
    profile, devices = pricing.question.profile, pricing.devices

    def sizes(axis: Axis) -> tuple[int, ...]:
        allowed = find_sizes(profile, axis, devices)
        return tuple(size for size in allowed if size == fixed.axes.get(axis, size))

    stages = sizes(Axis.PIPELINE)
    for tensor, sequence, expert in itertools.product(
        sizes(Axis.TENSOR), sizes(Axis.SEQUENCE), sizes(Axis.EXPERT)
    ):
        for stage_count in stages:
            if tensor * sequence * expert * stage_count > devices:
                break
            yield Group(tensor=tensor, sequence=sequence, expert=expert, pipeline=stage_count)


def visit(
    pricing: Pricing, fixed: Fixed, limit_s: Callable[[Group], float], keep: Callable[[Candidate], None]
) -> None:
    """Gives `keep` every candidate that could be below its limit.

    Args:
        pricing: of the question.
        fixed: what is given.
        limit_s: for a group of axes the step time from which on it is of no use; may only fall.
        keep: takes the candidate.
    """
    levels = useful_levels(pricing)
    bounds = Bounds(pricing, levels)
    question = pricing.question
    fsdps = [size for size in divides_batch(question.global_batch) if size == fixed.axes.get(Axis.FSDP, size)]
    # Nodes of a tree: axes that cut a layer, then FSDP too, then the microbatch too. A child's bound is no less.
    queue: list[_Node] = [
        _Node(bounds.narrow_step_s(group), group, None, 0) for group in groups_of(pricing, fixed)
    ]
    heapq.heapify(queue)
    while queue:
        node = heapq.heappop(queue)
        if node.least_s >= limit_s(FREE_GROUP):
            return
        if node.replicas == 0:
            children = _with_fsdp(pricing, bounds, fixed, node.group, fsdps)
        elif node.batch is None:
            children = _with_batch(pricing, bounds, fixed, node)
        else:
            for layout in layouts_of(node.group, question.pool.devices_per_host, levels):
                if bounds.step_s(node.group, node.batch, pricing.count_replicas(layout)) < limit_s(
                    node.group
                ):
                    _visit_layout(pricing, fixed, layout, node.batch, limit_s, keep)
            continue
        for child in children:
            if child.least_s < limit_s(child.group):
                heapq.heappush(queue, child)


class _Node(NamedTuple):
    least_s: float
    group: Group
    batch: Microbatch | None
    replicas: int


FREE_GROUP = Group(0, 0, 0, 0, 0)
"""No group: the limit of any that was not found yet."""


def _with_fsdp(
    pricing: Pricing, bounds: Bounds, fixed: Fixed, narrow: Group, fsdps: Sequence[int]
) -> Iterator[_Node]:
    devices = pricing.devices
    for fsdp in fsdps:
        group = narrow._replace(fsdp=fsdp)
        if group.devices > devices:
            return
        if state_bytes(pricing, group) <= pricing.usable_bytes:
            replicas = min(devices // group.devices, fixed.axes.get(Axis.REPLICA, devices))
            yield _Node(bounds.group_step_s(group, replicas), group, None, replicas)


def _with_batch(pricing: Pricing, bounds: Bounds, fixed: Fixed, node: _Node) -> Iterator[_Node]:
    question, group = pricing.question, node.group
    for again in (False, True) if question.profile.can_rematerialise else (False,):
        for size in divides_batch(question.global_batch // group.fsdp):
            batch = Microbatch(size, again)
            if not bounds.may_fit(group, batch):
                break  # a larger microbatch needs more still
            if fixed.batch in (None, batch):
                yield _Node(bounds.step_s(group, batch, node.replicas), group, batch, node.replicas)


def _visit_layout(
    pricing: Pricing,
    fixed: Fixed,
    layout: Layout,
    batch: Microbatch,
    limit_s: Callable[[Group], float],
    keep: Callable[[Candidate], None],
) -> None:
    """Replicas one by one, then in blocks, which shorten nothing but the sum over replicas."""
    teams = pricing.teams(layout, batch, limit_s(layout.group))
    if not teams:
        return
    _keep_all(pricing, fixed, layout, batch, teams, limit_s, keep)
    if layout.level == layout.outermost:
        return
    most = min(
        sum(team.blocks for team in teams),
        pricing.microbatches(layout.group, batch) // layout.replicas_inside,
    )
    if most < 2:
        return
    done_s = pricing.deal(layout, batch, teams, most).finish_s + pricing.question.calibration.step_overhead_s
    for block in BLOCKS:
        if block == 1:
            continue
        if block > most or done_s >= limit_s(layout.group):
            return
        blocked = layout._replace(block=block)
        _keep_all(pricing, fixed, blocked, batch, pricing.teams(blocked, batch), limit_s, keep)


def _keep_all(
    pricing: Pricing,
    fixed: Fixed,
    layout: Layout,
    batch: Microbatch,
    teams: tuple[Team, ...],
    limit_s: Callable[[Group], float],
    keep: Callable[[Candidate], None],
) -> None:
    for blocks, price in count_blocks(pricing, fixed, layout, batch, teams, limit_s(layout.group)):
        keep(Candidate(price.step_s, layout, batch, blocks))


def count_blocks(
    pricing: Pricing, fixed: Fixed, layout: Layout, batch: Microbatch, teams: tuple[Team, ...], limit_s: float
) -> Iterator[tuple[int, Price]]:
    """Yields the numbers of blocks that may be best, the largest first.

    Of all numbers for which the last replica is done at the same time the fewest are best: the sum over them is
    quicker. Fewer are done later, so it ends where that alone is as late as the limit.
    """
    each = layout.replicas_per_block
    most = min(sum(team.blocks for team in teams), pricing.microbatches(layout.group, batch) // each)
    if (wanted := fixed.axes.get(Axis.REPLICA)) is not None:
        if wanted % each == 0 and wanted // each <= most:
            yield wanted // each, pricing.price(layout, batch, teams, wanted // each)
        return
    while most >= 1:
        finish = pricing.deal(layout, batch, teams, most).finish_s
        if finish >= limit_s:
            return
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if pricing.deal(layout, batch, teams, middle).finish_s <= finish:
                high = middle
            else:
                low = middle + 1
        price = pricing.price(layout, batch, teams, low)
        limit_s = min(limit_s, price.step_s)
        yield low, price
        most = low - 1
