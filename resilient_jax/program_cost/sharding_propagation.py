"""Which axes cut each operation of a program, followed from the names of its parameters' dims.

A matrix product with a parameter is cut by the axis of the parameter's dims. If that dim is added over (the projection
back from heads or feed-forward), the sum must be completed between devices; if it is not (the projection to them), the
gradient of the input must. A product of two activations that are cut is attention. What lies between takes after its
inputs.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.program_cost import ModelPart
from resilient_jax.program_cost.operations import Operation, OperationTrace, Value
from resilient_jax.sharding.logical_axes import LogicalNames


class ShardingKind(enum.StrEnum):
    """The fields of `Amounts`; of two inputs the later one here tells what the result is."""

    REPLICATED = "replicated"
    TENSOR = "tensor"
    EXPERT = "expert"
    VOCABULARY = "vocabulary"
    ATTENTION = "attention"


STRENGTH: Final = {kind: rank for rank, kind in enumerate(ShardingKind)}
VOCABULARY_NAME: Final = "vocab"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedOperation:
    """An operation with where it belongs.

    Attributes:
        operation: which.
        part: of the program.
        kind: what cuts it.
        matmul_flops: of a matrix product, in all turns; 0 for any other.
    """

    operation: Operation
    part: ModelPart
    kind: ShardingKind
    matmul_flops: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivationExchange:
    """An array whose parts devices along an axis must exchange, in one turn.

    Attributes:
        part: where.
        axis: whose devices.
        dim: of which name, if the exchange is needed only where that is cut.
        bytes: of the complete array.
        forward, backward: how often.
        turns: of the loop that it stands in.
    """

    part: ModelPart
    axis: Axis
    logical_name: str | None
    bytes: int
    forward_count: int
    backward_count: int
    iterations: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PropagatedSharding:
    """A program of which each operation is attributed.

    Attributes:
        steps: in order.
        messages: between devices.
        kinds: of values that depend on the batch; no others are in it.
        parts: of the same values, where they were made.
    """

    operations: tuple[AnnotatedOperation, ...]
    exchanges: tuple[ActivationExchange, ...]
    kinds: Mapping[Value, ShardingKind]
    parts: Mapping[Value, ModelPart]


def propagate_sharding(
    operations: OperationTrace,
    parts: Sequence[ModelPart],
    names: Mapping[Value, LogicalNames],
    batch: frozenset[Value],
    axes: Mapping[str, Axis | None],
) -> PropagatedSharding:
    """Gives what cuts each operation of a forward pass.

    Args:
        operations: of the pass.
        parts: of each operation.
        names: of the dims of those of its inputs that are parameters.
        batch: those of its inputs that are the batch.
        axes: which axis cuts a dim of a name.
    """
    walk = _Walk(names, batch, axes, operations.slices)
    for operation, part in zip(operations.operations, parts, strict=True):
        walk.take(operation, part)
    for value in operations.outputs:
        walk.note_stack(value)
    walk.parts.update(
        {value: parts[last] for value, last in operations.stacks.items() if value in walk.kinds}
    )
    return PropagatedSharding(
        operations=tuple(walk.steps),
        exchanges=tuple(walk.messages),
        kinds=walk.kinds,
        parts=walk.parts,
    )


class _Judgement(NamedTuple):
    """Of an operation: what cuts its work, what cuts its result, and its FLOPs as a matrix product, in one turn."""

    work: ShardingKind
    result: ShardingKind
    flops: float = 0.0


class _Walk:
    """Goes through the operations in order, and knows what each value is."""

    def __init__(
        self,
        names: Mapping[Value, LogicalNames],
        batch: frozenset[Value],
        axes: Mapping[str, Axis | None],
        slices: Mapping[Value, Value],
    ) -> None:
        self.steps: list[AnnotatedOperation] = []
        self.messages: list[ActivationExchange] = []
        self.kinds: dict[Value, ShardingKind] = dict.fromkeys(batch, ShardingKind.REPLICATED)
        self.parts: dict[Value, ModelPart] = dict.fromkeys(batch, ModelPart.EMBEDDING)
        self._names = dict(names)
        self._axes = axes
        self._slices = slices
        self._part = ModelPart.EMBEDDING
        self._completed: set[tuple[Value, Axis]] = set()

    def take(self, operation: Operation, part: ModelPart) -> None:
        """Attributes one more operation."""
        self._part = part
        inputs = [value for value in operation.inputs if value is not None]
        for value in inputs:
            self.note_stack(value)
            self._note_slice(value)
        depends = any(value in self.kinds for value in inputs)
        source = next((value for value in inputs if value in self._names), None)
        if source is not None and not depends:  # what is made from a parameter alone is that parameter
            for value in operation.outputs:
                self._names[value] = _names_after(operation, source, value, self._names[source])
        judged = self._judge(operation)
        if depends:
            for value in operation.outputs:
                self.kinds[value], self.parts[value] = judged.result, part
        flops = judged.flops * operation.iterations
        self.steps.append(
            AnnotatedOperation(operation=operation, part=part, kind=judged.work, matmul_flops=flops)
        )

    def note_stack(self, value: Value | None) -> None:
        """A loop's stack is what the loop writes into it."""
        if value is not None and value.stack_of in self.kinds and value not in self.kinds:
            self.kinds[value] = self.kinds[value.stack_of]
            self.parts[value] = self.parts[value.stack_of]

    def _note_slice(self, value: Value) -> None:
        source = self._slices.get(value)
        if source is None:
            return
        if source in self._names:
            self._names[value] = self._names[source][1:]
        self.note_stack(source)
        if source in self.kinds:
            self.kinds[value], self.parts[value] = self.kinds[source], self.parts[source]

    def _judge(self, operation: Operation) -> _Judgement:
        match operation.name:
            case "dot_general":
                return self._judge_product(operation)
            case "ragged_dot" | "ragged_dot_general":
                left, right = operation.inputs[0], operation.inputs[1]
                flops = 2.0 * operation.outputs[0].size * (left.shape[-1] if left else 1)
                return self._judge_unsummed(operation, right, flops)
            case "conv_general_dilated":
                kernel = operation.inputs[1]
                features = operation.params["dimension_numbers"].rhs_spec[0]
                window = kernel.size / kernel.shape[features] if kernel else 0.0
                return self._judge_unsummed(operation, kernel, 2.0 * operation.outputs[0].size * window)
            case "gather" if VOCABULARY_NAME in self._names_of(operation.inputs[0]):
                self._exchange(operation.outputs[0], operation, 1, 0, Axis.TENSOR, VOCABULARY_NAME)
                return _Judgement(ShardingKind.REPLICATED, ShardingKind.REPLICATED)
            case _:
                kind = self._strongest(operation)
                return _Judgement(kind, kind)

    def _judge_unsummed(self, operation: Operation, parameter: Value | None, flops: float) -> _Judgement:
        kind = self._kind_of_names(self._names_of(parameter)) or self._strongest(operation)
        return _Judgement(kind, kind, flops)

    def _names_of(self, value: Value | None) -> LogicalNames:
        return self._names.get(value, ()) if value is not None else ()

    def _judge_product(self, operation: Operation) -> _Judgement:
        (left_dims, right_dims), _ = operation.params["dimension_numbers"]
        left, right = operation.inputs
        added = math.prod(left.shape[dim] for dim in left_dims) if left is not None else 1
        flops = 2.0 * operation.outputs[0].size * added
        for parameter, dims, other in ((left, left_dims, right), (right, right_dims, left)):
            if parameter is not None and parameter in self._names:
                names = self._names_of(parameter)
                kind = self._kind_of_names(names) or ShardingKind.REPLICATED
                is_summed = any(self._axes.get(names[dim] or "") is Axis.TENSOR for dim in dims)
                self._complete(operation, kind, other, is_summed=is_summed)
                return _Judgement(
                    kind,
                    ShardingKind.REPLICATED if is_summed and kind is not ShardingKind.EXPERT else kind,
                    flops,
                )
        return self._judge_pairs(operation, flops)

    def _complete(
        self, operation: Operation, kind: ShardingKind, other: Value | None, *, is_summed: bool
    ) -> None:
        """A product of a parameter that is cut and an activation: what must be completed between devices."""
        if kind is ShardingKind.REPLICATED:
            return
        dim = VOCABULARY_NAME if kind is ShardingKind.VOCABULARY else None
        for axis in (Axis.TENSOR, Axis.EXPERT) if kind is ShardingKind.EXPERT else (Axis.TENSOR,):
            both = 1 if axis is Axis.EXPERT else 0  # tokens are sent forward, and their gradients backward
            if is_summed:
                self._exchange(operation.outputs[0], operation, 1, both, axis, dim)
            elif other is not None and (other, axis) not in self._completed:
                self._completed.add((other, axis))
                self._exchange(other, operation, both, 1, axis, dim)

    def _judge_pairs(self, operation: Operation, flops: float) -> _Judgement:
        """A product of two activations: of attention, if what it is made of is cut."""
        inputs = [value for value in operation.inputs if value in self.kinds]
        kinds = {self.kinds[value] for value in inputs if value is not None}
        if ShardingKind.EXPERT in kinds:  # what the experts gave, back in the order of tokens
            return _Judgement(ShardingKind.EXPERT, ShardingKind.REPLICATED, flops)
        if len(inputs) == 2:  # the smaller has keys or values; queries and scores are larger
            smaller = min((value for value in inputs if value is not None), key=lambda value: value.bytes)
            self._exchange(smaller, operation, 1, 1, Axis.SEQUENCE, None)
        if kinds <= {ShardingKind.REPLICATED}:
            return _Judgement(ShardingKind.REPLICATED, ShardingKind.REPLICATED, flops)
        return _Judgement(
            ShardingKind.ATTENTION,
            ShardingKind.TENSOR if ShardingKind.ATTENTION in kinds else ShardingKind.ATTENTION,
            flops,
        )

    def _exchange(
        self,
        value: Value,
        operation: Operation,
        forward: int,
        backward: int,
        axis: Axis,
        logical_name: str | None,
    ) -> None:
        self.messages.append(
            ActivationExchange(
                part=self._part,
                axis=axis,
                logical_name=logical_name,
                bytes=value.bytes,
                forward_count=forward,
                backward_count=backward,
                iterations=operation.iterations,
            )
        )

    def _kind_of_names(self, names: LogicalNames) -> ShardingKind | None:
        if VOCABULARY_NAME in names:
            return ShardingKind.VOCABULARY
        axes = {self._axes.get(name) for name in names if name is not None}
        if Axis.EXPERT in axes:
            return ShardingKind.EXPERT
        return ShardingKind.TENSOR if Axis.TENSOR in axes else None

    def _strongest(self, operation: Operation) -> ShardingKind:
        """The kind that an operation takes from its inputs: from those that are as large as its result, if any is."""
        inputs = [value for value in operation.inputs if value in self.kinds]
        size = operation.outputs[0].size if operation.outputs else 0
        alike = [value for value in inputs if value is not None and value.size == size] or inputs
        return max(
            (self.kinds[v] for v in alike if v is not None),
            key=STRENGTH.__getitem__,
            default=ShardingKind.REPLICATED,
        )


def _names_after(operation: Operation, source: Value, result: Value, names: LogicalNames) -> LogicalNames:
    """Where the names of a parameter's dims are, after an operation on it alone; None where that is not known."""
    unknown = (None,) * len(result.shape)
    match operation.name:
        case "transpose":
            return tuple(names[dim] for dim in operation.params["permutation"])
        case "broadcast_in_dim":
            placed = dict(zip(operation.params["broadcast_dimensions"], names, strict=True))
            return tuple(placed.get(dim) for dim in range(len(result.shape)))
        case "reshape" | "squeeze" | "expand_dims":
            return _names_after_reshape(source.shape, result.shape, names)
        case _ if source.shape == result.shape:
            return names
        case _:
            return unknown


def _names_after_reshape(
    before: tuple[int, ...], after: tuple[int, ...], names: LogicalNames
) -> LogicalNames:
    """Dims merged take the first name among them, the first of several split from one takes its name."""
    found: list[str | None] = [None] * len(after)
    source = target = 0
    while source < len(before) and target < len(after):
        sources, targets, left, right = [source], [target], before[source], after[target]
        while left != right:
            if left < right:
                source += 1
                if source == len(before):
                    return tuple(found)
                left *= before[source]
                sources.append(source)
            else:
                target += 1
                if target == len(after):
                    return tuple(found)
                right *= after[target]
                targets.append(target)
        found[targets[0]] = next((names[dim] for dim in sources if names[dim] is not None), None)
        source, target = source + 1, target + 1
    return tuple(found)


def count_matmul_flops(operations: OperationTrace) -> float:
    """Gives the FLOPs of all matrix products in a program, backward passes too."""
    walk = _Walk({}, frozenset(), {}, {})
    for operation in operations.operations:
        walk.take(operation, ModelPart.LAYER)
    return sum(step.matmul_flops for step in walk.steps)
