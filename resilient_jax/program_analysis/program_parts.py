"""The part of a program that each operation belongs to: before the layers, in which layer, or after them.

An operation that uses a parameter belongs to the parameter's part. Between two such operations of different parts the
boundary is where the fewest bytes are live: between two layers that is what one hands to the next.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from resilient_jax.planning.program_cost import ModelPart
from resilient_jax.program_analysis.operations import Operation, OperationTrace, Value
from resilient_jax.sharding.layer_stacks import LayerPosition


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartPosition:
    """The part of a program that an operation belongs to.

    Attributes:
        layer: number of the layer; None: the operation is not in one layer alone.
    """

    part: ModelPart
    layer: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartAssignment:
    """The parts of a program's operations.

    Attributes:
        positions: position of each operation, in the order of operations.
        uses: maps the value of each parameter among the inputs to the parts that use it.
        boundary_bytes: bytes that are live where the first layer ends and the second begins; 0: there are no two
            layers.
    """

    positions: tuple[PartPosition, ...]
    uses: Mapping[Value, tuple[ModelPart, ...]]
    boundary_bytes: int


def assign_parts(
    trace: OperationTrace, parameters: Mapping[Value, LayerPosition], batch: frozenset[Value]
) -> PartAssignment:
    """Return the parts of the operations of a forward pass.

    Args:
        parameters: parameters among the trace's inputs, with their positions among the layers.
        batch: inputs of the trace that are the batch.
    """
    flow = _DataFlow(trace, parameters, batch)
    num_layers = max((position.copies for position in parameters.values()), default=1)
    if any(position.stack_dim is not None for position in parameters.values()):
        positions, boundary = _assign_scanned_layers(trace, flow, num_layers)
    elif any(position.is_in_layer for position in parameters.values()):
        positions, boundary = _assign_unrolled_layers(trace, flow, parameters)
    else:
        positions, boundary = [PartPosition(part=ModelPart.LAYER)] * len(trace.operations), 0
    uses: dict[Value, dict[ModelPart, None]] = {}
    for index, used in flow.parameter_uses.items():
        for parameter in used:
            uses.setdefault(parameter, {})[positions[index].part] = None
    return PartAssignment(
        positions=tuple(positions),
        uses={value: tuple(parts) for value, parts in uses.items()},
        boundary_bytes=boundary,
    )


class _DataFlow:
    """The values that depend on the batch, and the operations that combine them with parameters.

    Attributes:
        parameter_uses: maps the index of each operation on such values to the parameters that the operation uses, if
            any.
    """

    def __init__(
        self, trace: OperationTrace, parameters: Mapping[Value, LayerPosition], batch: frozenset[Value]
    ) -> None:
        self.dependent: set[Value] = set(batch)
        self.parameter_uses: dict[int, list[Value]] = {}
        sources: dict[Value, list[Value]] = {value: [value] for value in parameters}
        for index, operation in enumerate(trace.operations):
            inputs = [trace.slices.get(value, value) for value in operation.inputs]
            used = [source for value in inputs for source in sources.get(value, ())]
            if any(self.depends(value) for value in inputs):
                self.dependent.update(operation.outputs)
                if used:
                    self.parameter_uses[index] = used
            elif used:
                sources.update(dict.fromkeys(operation.outputs, used))

    def depends(self, value: Value) -> bool:
        """Return whether a value, or what a loop stacks in it, depends on the batch."""
        return value in self.dependent or (value.stack_of is not None and value.stack_of in self.dependent)


def _assign_scanned_layers(
    trace: OperationTrace, flow: _DataFlow, num_layers: int
) -> tuple[list[PartPosition], int]:
    """Assign layers that are iterations of one loop: an operation that runs once per layer belongs to them."""
    positions, after_layers = [], False
    for operation in trace.operations:
        in_layer = operation.iterations >= num_layers > 1
        after_layers = after_layers or in_layer
        outside = ModelPart.HEAD if after_layers else ModelPart.EMBEDDING
        positions.append(PartPosition(part=ModelPart.LAYER if in_layer else outside))
    carried = [
        value.bytes
        for value, iterations in trace.carries.items()
        if iterations == num_layers and flow.depends(value)
    ]
    return positions, sum(carried)


def _assign_unrolled_layers(
    trace: OperationTrace, flow: _DataFlow, parameters: Mapping[Value, LayerPosition]
) -> tuple[list[PartPosition], int]:
    """Assign layers that follow one another, each with parameters of its own."""
    live_bytes = _count_live_bytes(trace.operations, flow)
    positions: list[PartPosition] = []
    boundary, last_index, after_layers = 0, 0, False
    current = PartPosition(part=ModelPart.EMBEDDING)
    for index, used in flow.parameter_uses.items():
        layer = next((parameters[p] for p in used if parameters[p].is_in_layer), parameters[used[0]])
        after_layers = after_layers or layer.is_in_layer
        following = PartPosition(part=ModelPart.HEAD if after_layers else ModelPart.EMBEDDING)
        if layer.is_in_layer:
            following = PartPosition(part=ModelPart.LAYER, layer=layer.layer)
        if following != current:
            # The boundary is where the fewest bytes are live between the last use of one part's parameters and the
            # first of the next part's.
            end = min(range(last_index, index), key=live_bytes.__getitem__, default=-1)
            positions += [current] * (end + 1 - len(positions))
            if current.layer is not None and following.layer is not None and not boundary:
                boundary = live_bytes[end]
        current, last_index = following, index
    return positions + [current] * (len(trace.operations) - len(positions)), boundary


def _count_live_bytes(operations: Sequence[Operation], flow: _DataFlow) -> list[int]:
    """Return the bytes that depend on the batch and are used later, after each operation."""
    last_use = {value: index for index, operation in enumerate(operations) for value in operation.inputs}
    # live(i) = live(i - 1) + bytes made by operation i and used later - bytes last used by operation i.
    freed: collections.Counter[int] = collections.Counter()
    live, live_after = 0, []
    for index, operation in enumerate(operations):
        for value in operation.outputs:
            if value in flow.dependent and last_use.get(value, -1) > index:
                live += value.bytes
                freed[last_use[value]] += value.bytes
        live -= freed[index]
        live_after.append(live)
    return live_after
