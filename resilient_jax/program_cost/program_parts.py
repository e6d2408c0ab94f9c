"""Which part of a program each operation belongs to: before the layers, in which layer, after them.

An operation that uses a parameter belongs where the parameter does. Between two such of different parts the program is
cut where the fewest bytes are alive: between two layers that is what one hands to the other.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from resilient_jax.planning.program_cost import ModelPart
from resilient_jax.program_cost.operations import Operation, OperationTrace, Value
from resilient_jax.sharding.layer_stacks import LayerPosition


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartPosition:
    """A part of a program.

    Attributes:
        part: which.
        layer: its number; None: not in one layer alone.
    """

    part: ModelPart
    layer: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartAssignment:
    """Where everything in a program belongs.

    Attributes:
        steps: of each operation, in order.
        uses: of each parameter, by its value among the inputs, where it is used.
        boundary_bytes: alive where the first layer ends and the second begins; 0: there are no two.
    """

    positions: tuple[PartPosition, ...]
    uses: Mapping[Value, tuple[ModelPart, ...]]
    boundary_bytes: int


def assign_parts(
    operations: OperationTrace, parameters: Mapping[Value, LayerPosition], batch: frozenset[Value]
) -> PartAssignment:
    """Gives where the operations of a forward pass belong.

    Args:
        operations: of the pass.
        parameters: those of its inputs that are parameters, with their places.
        batch: those of its inputs that are the batch.
    """
    flow = _Flow(operations, parameters, batch)
    layers = max((place.copies for place in parameters.values()), default=1)
    if any(place.stack_dim is not None for place in parameters.values()):
        steps, boundary = _locate_loop(operations, flow, layers)
    elif any(place.is_in_layer for place in parameters.values()):
        steps, boundary = _locate_marks(operations, flow, parameters)
    else:
        steps, boundary = [PartPosition(part=ModelPart.LAYER)] * len(operations.operations), 0
    uses: dict[Value, dict[ModelPart, None]] = {}
    for index, sources in flow.marks.items():
        for source in sources:
            uses.setdefault(source, {})[steps[index].part] = None
    return PartAssignment(
        positions=tuple(steps),
        uses={value: tuple(parts) for value, parts in uses.items()},
        boundary_bytes=boundary,
    )


class _Flow:
    """What follows from the batch, and which operations bring it together with which parameters.

    Attributes:
        dependent: values that depend on the batch.
        marks: of each operation on such values that uses parameters, these.
    """

    def __init__(
        self, operations: OperationTrace, parameters: Mapping[Value, LayerPosition], batch: frozenset[Value]
    ) -> None:
        self.dependent: set[Value] = set(batch)
        self.marks: dict[int, list[Value]] = {}
        sources: dict[Value, list[Value]] = {value: [value] for value in parameters}
        for index, step in enumerate(operations.operations):
            inputs = [operations.slices.get(value, value) for value in step.inputs if value is not None]
            used = [source for value in inputs for source in sources.get(value, ())]
            if any(self.depends(value) for value in inputs):
                self.dependent.update(step.outputs)
                if used:
                    self.marks[index] = used
            elif used:
                sources.update(dict.fromkeys(step.outputs, used))

    def depends(self, value: Value) -> bool:
        """Whether a value, or what a loop stacks in it, depends on the batch."""
        return value in self.dependent or (value.stack_of is not None and value.stack_of in self.dependent)


def _locate_loop(operations: OperationTrace, flow: _Flow, layers: int) -> tuple[list[PartPosition], int]:
    """Layers that are turns of one loop: what is done as often as there are layers is in them."""
    found, seen = [], False
    for step in operations.operations:
        inside = step.iterations >= layers > 1
        seen = seen or inside
        found.append(
            PartPosition(part=ModelPart.LAYER if inside else ModelPart.HEAD if seen else ModelPart.EMBEDDING)
        )
    carried = [
        value.bytes for value, turns in operations.carries.items() if turns == layers and flow.depends(value)
    ]
    return found, sum(carried)


def _locate_marks(
    operations: OperationTrace, flow: _Flow, parameters: Mapping[Value, LayerPosition]
) -> tuple[list[PartPosition], int]:
    """Layers one after another, each with parameters of its own."""
    alive = _count_alive(operations.operations, flow)
    found: list[PartPosition] = []
    boundary, last, seen, here = 0, 0, False, PartPosition(part=ModelPart.EMBEDDING)
    for index, sources in flow.marks.items():
        place = next((parameters[s] for s in sources if parameters[s].is_in_layer), parameters[sources[0]])
        seen = seen or place.is_in_layer
        there = PartPosition(part=ModelPart.HEAD if seen else ModelPart.EMBEDDING)
        if place.is_in_layer:
            there = PartPosition(part=ModelPart.LAYER, layer=place.layer)
        if there != here:
            end = min(range(last, index), key=alive.__getitem__, default=-1)
            found += [here] * (end + 1 - len(found))
            if here.layer is not None and there.layer is not None and not boundary:
                boundary = alive[end]
        here, last = there, index
    return found + [here] * (len(operations.operations) - len(found)), boundary


def _count_alive(steps: Sequence[Operation], flow: _Flow) -> list[int]:
    """Bytes that depend on the batch and are used later, after each operation."""
    last_use = {
        value: index for index, step in enumerate(steps) for value in step.inputs if value is not None
    }
    ending: collections.Counter[int] = collections.Counter()
    alive, found = 0, []
    for index, step in enumerate(steps):
        for value in step.outputs:
            if value in flow.dependent and last_use.get(value, -1) > index:
                alive += value.bytes
                ending[last_use[value]] += value.bytes
        alive -= ending[index]
        found.append(alive)
    return found
