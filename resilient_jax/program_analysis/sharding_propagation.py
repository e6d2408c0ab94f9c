"""Propagation of sharding: the axis that shards each operation of a program, from the logical names of its parameters.

Rules, as in tensor parallelism (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3):
- A matrix product with a parameter is sharded by the mesh axis of the parameter's dims.
- If that dim is contracted (the projection back from heads or feed-forward), each device has a partial sum, and an
  all-reduce completes the result. If it is not (the projection to them), the gradient of the input is a partial sum.
- A product of two sharded activations is attention.
- Any other operation takes the sharding of its inputs.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.program_cost import ModelPart
from resilient_jax.program_analysis.operations import Operation, OperationTrace, Value
from resilient_jax.sharding.dim_propagation import make_unnamed, propagate_through_equation
from resilient_jax.sharding.logical_axes import LogicalNames


class ShardingKind(enum.StrEnum):
    """What shards a value or an operation, by the field of `AmountByAxis`. Of two inputs the later kind here wins."""

    REPLICATED = "replicated"
    TENSOR = "tensor"
    EXPERT = "expert"
    VOCABULARY = "vocabulary"
    ATTENTION = "attention"


STRENGTH: Final = {kind: rank for rank, kind in enumerate(ShardingKind)}
VOCABULARY_NAME: Final = "vocab"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedOperation:
    """An operation with its part of the program and its sharding.

    Attributes:
        matmul_flops: FLOPs of a matrix product, in all iterations; 0 for any other operation.
    """

    operation: Operation
    part: ModelPart
    kind: ShardingKind
    matmul_flops: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivationExchange:
    """An array whose shards the devices along an axis must exchange, in one iteration.

    Attributes:
        axis: axis along which the devices exchange.
        logical_name: the exchange is needed only where dims of this name are sharded; None: always.
        bytes: bytes of the complete array.
        forward_count, backward_count: exchanges in the forward and in the backward pass.
        iterations: iterations of the loop that contains the operation.
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
    """The sharding of a program.

    Attributes:
        kinds: kinds of the values that depend on the batch, and of no others.
        parts: parts that made the values of `kinds`.
    """

    operations: tuple[AnnotatedOperation, ...]
    exchanges: tuple[ActivationExchange, ...]
    kinds: Mapping[Value, ShardingKind]
    parts: Mapping[Value, ModelPart]


def propagate_sharding(
    trace: OperationTrace,
    parts: Sequence[ModelPart],
    names: Mapping[Value, LogicalNames],
    batch: frozenset[Value],
    mesh_axes: Mapping[str, Axis | None],
) -> PropagatedSharding:
    """Return what shards each operation of a forward pass.

    Args:
        names: names of the dims of the trace's inputs that are parameters.
        batch: inputs of the trace that are the batch.
        mesh_axes: maps a logical name to the axis that shards its dims.
    """
    propagation = _Propagation(names, batch, mesh_axes, trace.slices)
    for operation, part in zip(trace.operations, parts, strict=True):
        propagation.add(operation, part)
    for value in trace.outputs:
        propagation.resolve_stack(value)
    propagation.parts.update(
        {value: parts[last] for value, last in trace.stacks.items() if value in propagation.kinds}
    )
    return PropagatedSharding(
        operations=tuple(propagation.operations),
        exchanges=tuple(propagation.exchanges),
        kinds=propagation.kinds,
        parts=propagation.parts,
    )


def count_matmul_flops(trace: OperationTrace) -> float:
    """Return the FLOPs of all matrix products in a program, those of backward passes included."""
    propagation = _Propagation({}, frozenset(), {}, {})
    for operation in trace.operations:
        propagation.add(operation, ModelPart.LAYER)
    return sum(operation.matmul_flops for operation in propagation.operations)


class _Sharding(NamedTuple):
    """Of an operation: what shards its work and its result, and its FLOPs as a matrix product in one iteration."""

    work: ShardingKind
    result: ShardingKind
    flops: float = 0.0


class _Propagation:
    """The pass through the operations in order, with the sharding of each value so far."""

    def __init__(
        self,
        names: Mapping[Value, LogicalNames],
        batch: frozenset[Value],
        mesh_axes: Mapping[str, Axis | None],
        slices: Mapping[Value, Value],
    ) -> None:
        self.operations: list[AnnotatedOperation] = []
        self.exchanges: list[ActivationExchange] = []
        self.kinds: dict[Value, ShardingKind] = dict.fromkeys(batch, ShardingKind.REPLICATED)
        self.parts: dict[Value, ModelPart] = dict.fromkeys(batch, ModelPart.EMBEDDING)
        self._names = dict(names)
        self._mesh_axes = mesh_axes
        self._slices = slices
        self._part = ModelPart.EMBEDDING
        self._exchanged_inputs: set[tuple[Value, Axis]] = set()

    def add(self, operation: Operation, part: ModelPart) -> None:
        """Propagate through one more operation."""
        self._part = part
        inputs = operation.inputs
        for value in inputs:
            self.resolve_stack(value)
            self._resolve_slice(value)
        depends = any(value in self.kinds for value in inputs)
        # A value computed from parameters alone has names, too.
        if not depends and any(value in self._names for value in inputs):
            names = [self._names.get(value, make_unnamed(value)) for value in inputs]
            found = propagate_through_equation(operation.equation, names)
            self._names.update(zip(operation.outputs, found, strict=True))
        sharding = self._shard(operation)
        if depends:
            for value in operation.outputs:
                self.kinds[value], self.parts[value] = sharding.result, part
        flops = sharding.flops * operation.iterations
        self.operations.append(
            AnnotatedOperation(operation=operation, part=part, kind=sharding.work, matmul_flops=flops)
        )

    def resolve_stack(self, value: Value) -> None:
        """Give a loop's stack the sharding of what the loop writes into it."""
        if value.stack_of in self.kinds and value not in self.kinds:
            self.kinds[value] = self.kinds[value.stack_of]
            self.parts[value] = self.parts[value.stack_of]

    def _resolve_slice(self, value: Value) -> None:
        """Give what a loop reads in an iteration the names and the sharding of the array that it scans over."""
        source = self._slices.get(value)
        if source is None:
            return
        if source in self._names:
            self._names[value] = self._names[source][1:]
        self.resolve_stack(source)
        if source in self.kinds:
            self.kinds[value], self.parts[value] = self.kinds[source], self.parts[source]

    def _shard(self, operation: Operation) -> _Sharding:
        match operation.name:
            case "dot_general":
                return self._shard_product(operation)
            case "ragged_dot" | "ragged_dot_general":
                left, right = operation.inputs[0], operation.inputs[1]
                # 2 n k for n elements of the result and k contracted: each row meets one expert's matrix.
                flops = 2.0 * operation.outputs[0].size * left.shape[-1]
                return self._shard_by_parameter(operation, right, flops)
            case "conv_general_dilated":
                kernel = operation.inputs[1]
                features = operation.equation.params["dimension_numbers"].rhs_spec[0]
                # 2 n k with k = elements of the kernel per output feature.
                window = kernel.size / kernel.shape[features]
                return self._shard_by_parameter(operation, kernel, 2.0 * operation.outputs[0].size * window)
            case "gather" if VOCABULARY_NAME in self._names.get(operation.inputs[0], ()):
                self._exchange(operation.outputs[0], operation, (1, 0), Axis.TENSOR, VOCABULARY_NAME)
                return _Sharding(ShardingKind.REPLICATED, ShardingKind.REPLICATED)
            case _:
                kind = self._strongest_kind(operation)
                return _Sharding(kind, kind)

    def _shard_by_parameter(self, operation: Operation, parameter: Value, flops: float) -> _Sharding:
        """Return the sharding of a product whose contracted dims no axis shards."""
        kind = self._kind_of_names(self._names.get(parameter, ())) or self._strongest_kind(operation)
        return _Sharding(kind, kind, flops)

    def _shard_product(self, operation: Operation) -> _Sharding:
        # FLOPs: a multiplication and an addition for each element of the result and each contracted index.
        (left_dims, right_dims), _ = operation.equation.params["dimension_numbers"]
        left, right = operation.inputs
        flops = 2.0 * operation.outputs[0].size * math.prod(left.shape[dim] for dim in left_dims)
        for parameter, dims, other in ((left, left_dims, right), (right, right_dims, left)):
            if (names := self._names.get(parameter)) is not None:
                kind = self._kind_of_names(names) or ShardingKind.REPLICATED
                is_partial = any(self._mesh_axes.get(names[dim] or "") is Axis.TENSOR for dim in dims)
                self._complete_partial_sums(operation, kind, other, is_partial=is_partial)
                is_completed = is_partial and kind is not ShardingKind.EXPERT
                return _Sharding(kind, ShardingKind.REPLICATED if is_completed else kind, flops)
        return self._shard_product_of_activations(operation, flops)

    def _complete_partial_sums(
        self, operation: Operation, kind: ShardingKind, other: Value, *, is_partial: bool
    ) -> None:
        """Add the exchanges of a product of a sharded parameter and the activation `other`.

        Forward, if the result is a partial sum; else backward, of the gradient of `other`, once for all products of it.
        """
        if kind is ShardingKind.REPLICATED:
            return
        name = VOCABULARY_NAME if kind is ShardingKind.VOCABULARY else None
        for axis in (Axis.TENSOR, Axis.EXPERT) if kind is ShardingKind.EXPERT else (Axis.TENSOR,):
            # Tokens are sent to experts forward, and their gradients backward.
            both = 1 if axis is Axis.EXPERT else 0
            if is_partial:
                self._exchange(operation.outputs[0], operation, (1, both), axis, name)
            elif (other, axis) not in self._exchanged_inputs:
                self._exchanged_inputs.add((other, axis))
                self._exchange(other, operation, (both, 1), axis, name)

    def _shard_product_of_activations(self, operation: Operation, flops: float) -> _Sharding:
        """Return the sharding of a product of two activations: attention, if they are sharded."""
        inputs = [value for value in operation.inputs if value in self.kinds]
        kinds = {self.kinds[value] for value in inputs}
        # The experts' results, combined in the order of tokens.
        if ShardingKind.EXPERT in kinds:
            return _Sharding(ShardingKind.EXPERT, ShardingKind.REPLICATED, flops)
        # The smaller operand has keys or values; queries and scores are larger.
        if len(inputs) == 2:
            smaller = min(inputs, key=lambda value: value.bytes)
            self._exchange(smaller, operation, (1, 1), Axis.SEQUENCE, None)
        if kinds <= {ShardingKind.REPLICATED}:
            return _Sharding(ShardingKind.REPLICATED, ShardingKind.REPLICATED, flops)
        has_scores = ShardingKind.ATTENTION in kinds
        result = ShardingKind.TENSOR if has_scores else ShardingKind.ATTENTION
        return _Sharding(ShardingKind.ATTENTION, result, flops)

    def _exchange(
        self,
        value: Value,
        operation: Operation,
        counts: tuple[int, int],
        axis: Axis,
        logical_name: str | None,
    ) -> None:
        forward_count, backward_count = counts
        self.exchanges.append(
            ActivationExchange(
                part=self._part,
                axis=axis,
                logical_name=logical_name,
                bytes=value.bytes,
                forward_count=forward_count,
                backward_count=backward_count,
                iterations=operation.iterations,
            )
        )

    def _kind_of_names(self, names: LogicalNames) -> ShardingKind | None:
        if VOCABULARY_NAME in names:
            return ShardingKind.VOCABULARY
        axes = {self._mesh_axes.get(name) for name in names if name is not None}
        if Axis.EXPERT in axes:
            return ShardingKind.EXPERT
        return ShardingKind.TENSOR if Axis.TENSOR in axes else None

    def _strongest_kind(self, operation: Operation) -> ShardingKind:
        """Return the strongest kind of an operation's inputs: of those as large as its result, if there are any."""
        inputs = [value for value in operation.inputs if value in self.kinds]
        size = operation.outputs[0].size if operation.outputs else 0
        same_size = [value for value in inputs if value.size == size] or inputs
        kinds = (self.kinds[value] for value in same_size)
        return max(kinds, key=STRENGTH.__getitem__, default=ShardingKind.REPLICATED)
