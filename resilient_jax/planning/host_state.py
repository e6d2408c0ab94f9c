"""Which part of the training state each host of a plan holds.

A part is a box: some of the layers, and a fraction of each tensor along tensor, expert and FSDP. That is what the
axes cut; a tensor that an axis does not divide is counted as if it were cut. Replicas hold the same boxes.
"""

from typing import NamedTuple

from resilient_jax.ids import HostName
from resilient_jax.planning.device_layout import DeviceLayout
from resilient_jax.planning.placement import place_replicas
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.program_cost import ModelPart, ProgramCost

Interval = tuple[float, float]


class StateRegion(NamedTuple):
    """A part of the state. `layers` counts the embedding as 0, layers from 1, and the head as the last; the rest are
    in [0, 1]."""

    layers: tuple[int, int]
    tensor: Interval
    expert: Interval
    fsdp: Interval


def intersect_regions(one: StateRegion, other: StateRegion) -> StateRegion | None:
    """Gives what both have."""
    found = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True)]
    return StateRegion(*found) if all(low < high for low, high in found) else None  # type: ignore[arg-type]


def count_layer_bytes(program_cost: ProgramCost) -> tuple[float, ...]:
    """Gives the bytes of parameters and optimizer of the embedding, each layer, and the head; tied ones count at the
    first."""
    layers = program_cost.layers
    weights = [0.0] * (layers + 2)
    for tensor in program_cost.tensors:
        if tensor.parts == (ModelPart.LAYER,):
            for layer in range(1, layers + 1):
                weights[layer] += tensor.bytes / layers
        else:
            weights[0 if ModelPart.EMBEDDING in tensor.parts else layers + 1] += tensor.bytes
    return tuple(weights)


def count_region_bytes(box: StateRegion, weights: tuple[float, ...]) -> float:
    """Gives its bytes."""
    size = sum(weights[box.layers[0] : box.layers[1]])
    for low, high in box[1:]:
        size *= high - low
    return size


def find_replica_regions(layout: DeviceLayout, split: tuple[int, ...]) -> tuple[StateRegion, ...]:
    """Gives the box of each cell of a replica, in the order of cells."""
    axes, inside = layout.axes, layout.axes_in_host
    ends = [0, *(1 + sum(split[: stage + 1]) for stage in range(len(split)))]
    ends[-1] += 1
    boxes = []
    for cell in range(layout.host_slots):
        places = []
        left = cell
        for size, part in zip(axes, inside, strict=True):
            left, place = divmod(left, size // part)
            places.append((place * part, (place + 1) * part))
        tensor, _, expert, fsdp, stages = places
        boxes.append(
            StateRegion(
                layers=(ends[stages[0]], ends[stages[1]]),
                tensor=(tensor[0] / axes.tensor, tensor[1] / axes.tensor),
                expert=(expert[0] / axes.expert, expert[1] / axes.expert),
                fsdp=(fsdp[0] / axes.fsdp, fsdp[1] / axes.fsdp),
            )
        )
    return tuple(boxes)


HostState = frozenset[StateRegion]


def find_host_states(plan: Plan) -> dict[HostName, HostState]:
    """Gives what each host holds; hosts that are not used are missing."""
    request, layout = plan.request, plan.layout
    placed = place_replicas(request.topology, request.pool, layout, plan.compositions, plan.blocks)
    per_cell = layout.replicas_per_slot
    boxes = [
        boxes
        for team in plan.replica_classes
        for boxes in [find_replica_regions(layout, team.layers)]
        for _ in range(team.replicas // per_cell)
    ]
    hosts = request.topology.hosts
    found: dict[HostName, set[StateRegion]] = {}
    for cells, held in zip(placed, boxes, strict=True):
        for place, box in zip(cells, held, strict=True):
            found.setdefault(hosts[place].name, set()).add(box)
    return {name: frozenset(held) for name, held in found.items()}
