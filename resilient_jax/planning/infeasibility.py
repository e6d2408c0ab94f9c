"""Why no plan is feasible, and how much memory or how many devices would suffice."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.candidates import PlanCandidate, find_useful_levels, visit_candidates
from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.device_layout import ReplicaAxes, enumerate_layouts
from resilient_jax.planning.errors import NoFeasiblePlan, PlanError
from resilient_jax.planning.host_pool import HostPool
from resilient_jax.planning.plan_request import HostUse, PlanConstraints
from resilient_jax.planning.search_space import SearchSpace

MAX_HOSTS_TRIED = 1 << 14
"""No more hosts are tried: a request that needs more has the wrong model or the wrong cluster."""


class _Found(Exception):
    """Ends the search at the first plan."""


def explain_infeasibility(space: SearchSpace) -> PlanError:
    """Return the error that names what would suffice, or what the constraints leave no plan of."""
    request, constraints = space.cost_model.request, space.constraints
    memory = find_min_memory_bytes(space)
    if memory is None and constraints.host_use is not HostUse.ANY:
        return _explain_no_axes(space)
    devices = find_min_devices(space)
    replicas = find_max_replicas(space)
    ways = []
    if replicas is not None:
        ways.append(f"requesting {replicas} replica{'s'[: replicas != 1]} or fewer")
    if memory is not None:
        ways.append(f"devices of {_bytes(memory)} each")
    if devices is not None:
        ways.append(f"{devices} devices such as its fastest")
    return NoFeasiblePlan(
        f"{request.program_cost.name}: found no plan for the {request.topology.device_count} devices of topology "
        f"{request.topology.name!r} ({_bytes(request.pool.memory_bytes)} each, "
        f"of which {request.calibration.usable_memory:.0%} can be used) and a global batch of {request.global_batch}"
        + (f" with {', '.join(named)}" if (named := _named(constraints)) else "")
        + f". What would suffice: {' or '.join(ways) if ways else 'nothing that was tried'}",
        min_memory_bytes=memory,
        min_devices=devices,
        max_replicas=replicas,
    )


def _explain_no_axes(space: SearchSpace) -> PlanError:
    request = space.cost_model.request
    spans = space.constraints.host_use is HostUse.SPANNING
    fitting = "multiply to the devices of one host or several" if spans else "divide the devices of a host"
    counts = " or ".join(map(str, sorted({host.devices for host in request.topology.hosts})))
    return PlanError(
        f"{request.program_cost.name}: found no axes for the {counts} devices of a host of {request.topology.name}, "
        f"with {', '.join(_named(space.constraints)) or 'none given'} and a global batch of {request.global_batch}. "
        f"Expected given sizes that {fitting}, an fsdp that divides {space.shared_examples}, as "
        "microbatches of training and evaluation allow, and a microbatch for each replica. Change the microbatches or "
        "the given axes"
    )


def _bytes(number: int) -> str:
    """Return the size in words, rounded up, since the size in the message must suffice."""
    return f"{-(-number // 10**8) / 10} GB" if number >= 10**9 else f"{-(-number // 10**5) / 10} MB"


def _named(constraints: PlanConstraints) -> list[str]:
    named = [f"{axis} {size}" for axis, size in constraints.axes.items()]
    return (
        [*named, f"at least {constraints.min_replicas} replicas"] if constraints.min_replicas > 1 else named
    )


def find_min_memory_bytes(space: SearchSpace) -> int | None:
    """Return the least memory per device with which these devices have a plan; None if no axes can be placed."""
    memory = space.cost_model.memory
    needs = [
        memory.find_min_memory(axes, microbatch)
        for axes, replicas in _list_axes(space)
        if (microbatch := space.find_smallest_microbatch(axes.fsdp)) is not None
        and memory.count_microbatches(axes, microbatch) >= replicas
        and _count_most(space.cost_model, axes) >= replicas
    ]
    if not needs:
        return None
    # memory >= needed / usable fraction, in bytes, rounded up.
    return int(min(needs) / space.cost_model.request.calibration.usable_memory) + 1


def _count_most(cost_model: CostModel, axes: ReplicaAxes) -> int:
    """Return how many replicas of these axes the hosts can form."""
    pool, levels = cost_model.request.pool, find_useful_levels(cost_model, axes.pipeline)
    return max(map(cost_model.count_replicas, enumerate_layouts(axes, pool.devices_per_host, levels[-1:])))


def _list_axes(space: SearchSpace) -> Iterator[tuple[ReplicaAxes, int]]:
    """Yield all axes for which there are enough devices, and the least number of replicas."""
    sizes = [space.list_axis_sizes(Axis(name)) for name in ReplicaAxes._fields]
    for axes in itertools.starmap(ReplicaAxes, itertools.product(*sizes)):
        wanted = space.count_replicas(axes.devices // axes.pipeline, axes.pipeline)
        least = max(wanted or 1, space.constraints.min_replicas)
        if wanted != 0 and axes.devices * least <= space.cost_model.devices:
            yield axes, least


def find_max_replicas(space: SearchSpace) -> int | None:
    """Return the largest feasible number of replicas; None if their number is not what is infeasible."""
    # Bisection: with more replicas required no plan becomes feasible. `low` fits, or is 0; `high` does not.
    low, high = 0, space.constraints.min_replicas
    while high - low > 1:
        middle = (low + high) // 2
        fits = _has_plan(SearchSpace(space.cost_model, space.constraints._replace(min_replicas=middle)))
        low, high = (middle, high) if fits else (low, middle)
    return low or None


def _has_plan(space: SearchSpace) -> bool:
    try:
        visit_candidates(space, lambda _: math.inf, _stop)
    except _Found:
        return True
    return False


def find_min_devices(space: SearchSpace) -> int | None:
    """Return the least number of devices with a plan, on hosts like the fastest; None if none tried has one."""
    request = space.cost_model.request
    each = request.pool.kinds[0].devices

    def fits(hosts: int) -> bool:
        alone = dataclasses.replace(request.pool.kinds[0])
        pool = HostPool(
            kinds=(alone,),
            domains=tuple(((((0, hosts),), 1),) for _ in request.pool.domains),
            memory_bytes=alone.accelerator.memory_bytes,
        )
        cost_model = CostModel(dataclasses.replace(request, pool=pool))
        return _has_plan(SearchSpace(cost_model, space.constraints))

    # Double until a plan fits, then bisect: `low` hosts do not fit, `high` do.
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
