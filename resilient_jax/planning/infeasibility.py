"""When no plan fits: how much memory, or how many devices, would do."""

import dataclasses
import math

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.branch_and_bound import (
    PlanCandidate,
    PlanConstraints,
    enumerate_axes,
    find_useful_levels,
    visit_candidates,
)
from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes, enumerate_layouts
from resilient_jax.planning.errors import NoFeasiblePlan
from resilient_jax.planning.host_pool import HostPool
from resilient_jax.planning.lower_bounds import find_divisors

MAX_HOSTS_TRIED = 1 << 14
"""More are not tried: whoever asks has the wrong model or the wrong cluster."""


class _Found(Exception):
    """One plan is enough."""


def explain_infeasibility(pricing: CostModel, fixed: PlanConstraints) -> NoFeasiblePlan:
    """Gives the error that says what would do."""
    question = pricing.request
    memory = find_min_memory_bytes(pricing, fixed)
    devices = find_min_devices(pricing, fixed)
    replicas = find_max_replicas(pricing, fixed)
    ways = []
    if replicas is not None:
        ways.append(f"asking for {replicas} replica{'s'[: replicas != 1]} or fewer")
    if memory is not None:
        ways.append(f"devices of {_bytes(memory)} each")
    if devices is not None:
        ways.append(f"{devices} devices such as its fastest")
    return NoFeasiblePlan(
        f"{question.program_cost.name}: found no plan for the {question.topology.device_count} devices of topology "
        f"{question.topology.name!r} ({_bytes(question.pool.memory_bytes)} each, "
        f"of which {question.calibration.usable_memory:.0%} can be used) and a global batch of {question.global_batch}"
        + (f" with {', '.join(named)}" if (named := _named(fixed)) else "")
        + f". What would do: {' or '.join(ways) if ways else 'nothing that was tried'}",
        min_memory_bytes=memory,
        min_devices=devices,
        max_replicas=replicas,
    )


def _bytes(number: int) -> str:
    """Rounded up: what is said to do must do."""
    return f"{-(-number // 10**8) / 10} GB" if number >= 10**9 else f"{-(-number // 10**5) / 10} MB"


def _named(fixed: PlanConstraints) -> list[str]:
    named = [f"{axis} {size}" for axis, size in fixed.axes.items()]
    return [*named, f"at least {fixed.min_replicas} replicas"] if fixed.min_replicas > 1 else named


def find_min_memory_bytes(pricing: CostModel, fixed: PlanConstraints) -> int | None:
    """Gives the least memory of a device with which these devices have a plan; None: no axes can be placed."""
    question = pricing.request
    batch = fixed.microbatch or MicrobatchConfig(1, question.program_cost.can_remat)
    replicas = _least_replicas(fixed)
    needs = [
        pricing.find_min_memory(group, batch)
        for group in _all_groups(pricing, fixed)
        if pricing.count_microbatches(group, batch) >= replicas and _count_most(pricing, group) >= replicas
    ]
    if not needs:
        return None
    return int(min(needs) / question.calibration.usable_memory) + 1


def _least_replicas(fixed: PlanConstraints) -> int:
    return max(fixed.axes.get(Axis.REPLICA, 1), fixed.min_replicas)


def _count_most(pricing: CostModel, group: ReplicaAxes) -> int:
    """How many replicas of these axes the hosts can make."""
    pool, levels = pricing.request.pool, find_useful_levels(pricing, group.pipeline)
    return max(map(pricing.count_replicas, enumerate_layouts(group, pool.devices_per_host, levels[-1:])))


def _all_groups(pricing: CostModel, fixed: PlanConstraints) -> list[ReplicaAxes]:
    parts = find_divisors(pricing.request.global_batch)
    devices = pricing.devices
    return [
        narrow._replace(fsdp=fsdp)
        for narrow in enumerate_axes(pricing, fixed)
        for fsdp in parts
        if fsdp == fixed.axes.get(Axis.FSDP, fsdp)
        and narrow.devices * fsdp * _least_replicas(fixed) <= devices
    ]


def find_max_replicas(pricing: CostModel, fixed: PlanConstraints) -> int | None:
    """Gives how many replicas could be asked for; None: it is not their number that is too large."""
    low, high = 0, fixed.min_replicas
    while high - low > 1:
        middle = (low + high) // 2
        fits = _has_plan(pricing, fixed._replace(min_replicas=middle))
        low, high = (middle, high) if fits else (low, middle)
    return low or None


def _has_plan(pricing: CostModel, fixed: PlanConstraints) -> bool:
    try:
        visit_candidates(pricing, fixed, lambda _: math.inf, _stop)
    except _Found:
        return True
    return False


def find_min_devices(pricing: CostModel, fixed: PlanConstraints) -> int | None:
    """Gives the least number of devices that have a plan, on hosts such as the fastest; None: no number that was
    tried."""
    each = pricing.request.pool.kinds[0].devices

    def fits(hosts: int) -> bool:
        question = pricing.request
        alone = dataclasses.replace(question.pool.kinds[0])
        pool = HostPool(
            kinds=(alone,),
            domains=tuple(((((0, hosts),), 1),) for _ in question.pool.domains),
            memory_bytes=alone.accelerator.memory_bytes,
        )
        return _has_plan(CostModel(dataclasses.replace(question, pool=pool)), fixed)

    high = 1
    while not fits(high):
        high *= 2
        if high > MAX_HOSTS_TRIED:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * each


def _stop(_: PlanCandidate) -> None:
    raise _Found
