"""The part of the training state that each host of a plan holds.

A part is a region: a range of layers, and a fraction of each tensor along tensor, expert and FSDP. A tensor whose
size an axis does not divide is counted as if it were sharded. Replicas hold equal regions.
"""

from typing import NamedTuple

from resilient_jax.ids import HostName
from resilient_jax.planning.device_layout import DeviceLayout
from resilient_jax.planning.placement import place_replicas
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.program_cost import ModelPart, ProgramCost

Interval = tuple[float, float]


class StateRegion(NamedTuple):
    """A part of the state.

    `layers` counts the embedding as 0, layers from 1, and the head as the last; the other ranges are in [0, 1].
    """

    layers: tuple[int, int]
    tensor: Interval
    expert: Interval
    fsdp: Interval


def intersect_regions(one: StateRegion, other: StateRegion) -> StateRegion | None:
    """Return the intersection of two regions, or None if it is empty."""
    # [max(low), min(high)) in each dim; empty if it is in any.
    found = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True)]
    return StateRegion(*found) if all(low < high for low, high in found) else None  # type: ignore[arg-type]


def count_layer_bytes(program_cost: ProgramCost) -> tuple[float, ...]:
    """Return the bytes of parameters and optimizer of the embedding, each layer, and the head.

    Tied parameters count for the embedding.
    """
    layers = program_cost.layers
    weights = [0.0] * (layers + 2)
    for tensor in program_cost.tensors:
        if tensor.parts == (ModelPart.LAYER,):
            for layer in range(1, layers + 1):
                weights[layer] += tensor.bytes / layers
        else:
            weights[0 if ModelPart.EMBEDDING in tensor.parts else layers + 1] += tensor.bytes
    return tuple(weights)


def count_region_bytes(region: StateRegion, weights: tuple[float, ...]) -> float:
    """Return the bytes of a region."""
    # bytes = (sum of the bytes of its layers) (fraction along tensor) (along expert) (along FSDP).
    size = sum(weights[region.layers[0] : region.layers[1]])
    for low, high in region[1:]:
        size *= high - low
    return size


def find_replica_regions(layout: DeviceLayout, split: tuple[int, ...]) -> tuple[StateRegion, ...]:
    """Return the region of each host slot of a replica, in the order of slots."""
    axes, inside = layout.axes, layout.axes_in_host
    # Stage i has layers ends[i] to ends[i + 1]: the embedding is layer 0 of stage 0, the head the last of the last
    # stage.
    ends = [0, *(1 + sum(split[: stage + 1]) for stage in range(len(split)))]
    ends[-1] += 1
    regions = []
    for cell in range(layout.host_slots):
        places = []
        left = cell
        for size, part in zip(axes, inside, strict=True):
            # The slot is a mixed-radix number, the innermost axis first: digit `place` of base size / part along each
            # axis, which covers positions place part to (place + 1) part.
            left, place = divmod(left, size // part)
            places.append((place * part, (place + 1) * part))
        tensor, _, expert, fsdp, stages = places
        regions.append(
            StateRegion(
                layers=(ends[stages[0]], ends[stages[1]]),
                tensor=(tensor[0] / axes.tensor, tensor[1] / axes.tensor),
                expert=(expert[0] / axes.expert, expert[1] / axes.expert),
                fsdp=(fsdp[0] / axes.fsdp, fsdp[1] / axes.fsdp),
            )
        )
    return tuple(regions)


HostState = frozenset[StateRegion]


def find_host_states(plan: Plan) -> dict[HostName, HostState]:
    """Return the regions that each host holds; unused hosts are missing."""
    request, layout = plan.request, plan.layout
    placed = place_replicas(request.topology, request.pool, layout, plan.compositions, plan.blocks)
    per_cell = layout.replicas_per_slot
    regions = [
        regions
        for team in plan.replica_classes
        for regions in [find_replica_regions(layout, team.layers)]
        for _ in range(team.replicas // per_cell)
    ]
    hosts = request.topology.hosts
    found: dict[HostName, set[StateRegion]] = {}
    for cells, held in zip(placed, regions, strict=True):
        for place, region in zip(cells, held, strict=True):
            found.setdefault(hosts[place].name, set()).add(region)
    return {name: frozenset(held) for name, held in found.items()}
