"""A program's measured cost, split by part and by the axis that shards it, in the proportions of its forward pass."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.program_cost import (
    ActivationCollective,
    AmountByAxis,
    CollectiveKind,
    ModelPart,
    PartCost,
)
from resilient_jax.program_analysis.abstract_program import AbstractProgram, count_examples
from resilient_jax.program_analysis.measurement import MeasuredCost
from resilient_jax.program_analysis.operations import OperationTrace, trace_operations
from resilient_jax.program_analysis.program_parts import PartAssignment, assign_parts
from resilient_jax.program_analysis.residuals import (
    FUSIBLE_PRIMITIVES,
    compute_residuals,
    count_block_residual_bytes,
    count_residual_bytes,
)
from resilient_jax.program_analysis.sharding_propagation import (
    ActivationExchange,
    AnnotatedOperation,
    PropagatedSharding,
    ShardingKind,
    propagate_sharding,
)
from resilient_jax.sharding.logical_axes import LogicalAxisRules
from resilient_jax.sharding.state_tensors import ParameterInfo

CostShares = Mapping[tuple[ModelPart, ShardingKind], float]
"""An amount of one example, all layers together."""

COLLECTIVE_KINDS = {
    Axis.TENSOR: CollectiveKind.ALL_REDUCE,
    Axis.SEQUENCE: CollectiveKind.ALL_GATHER,
    Axis.EXPERT: CollectiveKind.ALL_TO_ALL,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedProgram:
    """A program's forward pass, traced, with its sharding.

    Attributes:
        num_examples: examples in the batch that the program was traced with.
        num_layers: number of equal layers; 1 if there are none.
        propagated: sharding of the pass and of its residuals.
        uses: maps the path of each parameter to the parts that use it.
        residual_bytes: bytes kept for the backward pass.
        block_residual_bytes: bytes kept where forward and backward of a block are programs of their own.
        boundary_bytes: bytes that one layer hands to the next, for one example.
        largest_activation: (part, kind, bytes for one example) of the largest activation.
        gradient_matmul_flops: FLOPs of matrix products in the gradient of one example; 0: not counted.
        temporary_bytes: memory beyond arguments that the gradient of one example needs; 0: not measured.
    """

    num_examples: int
    num_layers: int
    propagated: PropagatedSharding
    uses: Mapping[str, tuple[ModelPart, ...]]
    residual_bytes: CostShares
    block_residual_bytes: CostShares
    boundary_bytes: float
    largest_activation: tuple[ModelPart, ShardingKind, float]
    gradient_matmul_flops: float = 0.0
    temporary_bytes: float = 0.0

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in the matrix product with most FLOPs."""
        largest = max(self.propagated.operations, key=lambda found: found.matmul_flops, default=None)
        inputs = largest.operation.inputs if largest is not None else ()
        value = next((v for v in inputs if v.size), None)
        return value.bytes // value.size if value is not None else 4


def trace_program(
    program: AbstractProgram, parameters: Sequence[ParameterInfo], logical_axis_rules: LogicalAxisRules
) -> TracedProgram:
    """Trace a program's forward pass, and propagate the sharding of its parameters through it."""
    arguments = (program.params, program.others, program.batch)
    trace = trace_operations(lambda *given: compute_residuals(program.loss_fn, *given), *arguments)
    assignment, propagated = _propagate(trace, program, parameters, logical_axis_rules)
    examples = count_examples(program.batch)
    # A loop's stack is as large as the activations of all its layers together, and is no activation itself.
    values = [value for value in propagated.kinds if value.stack_of is None]
    largest = max(values, key=lambda value: value.bytes)
    # Parameters are the first inputs, hence the first values of the zip below.
    return TracedProgram(
        num_examples=examples,
        num_layers=max(info.position.copies for info in parameters),
        propagated=propagated,
        uses={
            info.path: assignment.uses.get(value, (ModelPart.EMBEDDING,))
            for info, value in zip(parameters, trace.inputs, strict=False)
        },
        residual_bytes={
            key: value / examples for key, value in count_residual_bytes(trace, propagated).items()
        },
        block_residual_bytes={
            key: value / examples for key, value in count_block_residual_bytes(trace, propagated).items()
        },
        boundary_bytes=assignment.boundary_bytes / examples,
        largest_activation=(propagated.parts[largest], propagated.kinds[largest], largest.bytes / examples),
    )


def _propagate(
    trace: OperationTrace,
    program: AbstractProgram,
    parameters: Sequence[ParameterInfo],
    logical_axis_rules: LogicalAxisRules,
) -> tuple[PartAssignment, PropagatedSharding]:
    # Parameters are the first inputs, the leaves of the batch the last.
    infos = list(zip(trace.inputs, parameters, strict=False))
    batch = frozenset(trace.inputs[-len(jax.tree.leaves(program.batch)) :])
    assignment = assign_parts(trace, {value: info.position for value, info in infos}, batch)
    names = {value: info.names for value, info in infos}
    parts = [position.part for position in assignment.positions]
    return assignment, propagate_sharding(trace, parts, names, batch, logical_axis_rules.mesh_axes)


def split_cost(
    traced: TracedProgram, remat: TracedProgram | None, measured: MeasuredCost
) -> tuple[PartCost, ...]:
    """Return the cost of each part that the program has.

    Args:
        remat: the same program, rematerialized; None: plans cannot use rematerialization.
    """
    # With P_f, P_g the FLOPs of matrix products in the forward pass and in the gradient, T_f, T_g all FLOPs:
    # backward products P_g - P_f, other FLOPs forward T_f - P_f, backward T_g - P_g - (T_f - P_f).
    products = _sum(traced, lambda operation: operation.matmul_flops)
    others = _sum(traced, lambda operation: 0.0 if operation.matmul_flops else _count_elements(operation))
    moved = _sum_bytes_moved(traced)
    forward_products = sum(products.values())
    backward_products = max(0.0, measured.gradient_matmul_flops - forward_products)
    other_forward = max(0.0, measured.forward_flops - forward_products)
    other_backward = max(0.0, measured.gradient_flops - measured.gradient_matmul_flops - other_forward)
    recomputed = max(0.0, remat.gradient_matmul_flops - measured.gradient_matmul_flops) if remat else 0.0
    working = min(traced.largest_activation[2], measured.temporary_bytes)
    in_layers = {key: value for key, value in products.items() if key[0] is ModelPart.LAYER}

    parts: list[PartCost] = []
    for part in ModelPart:
        copies = traced.num_layers if part is ModelPart.LAYER else 1
        if not any(key[0] is part for key in (*products, *others, *traced.residual_bytes)):
            continue

        def share(
            shares: CostShares, total: float | None, part: ModelPart = part, copies: int = copies
        ) -> AmountByAxis:
            return _split_amount(shares, total, part, copies)

        kept = share(traced.residual_bytes, measured.temporary_bytes - working)
        parts.append(
            PartCost(
                part=part,
                copies=copies,
                forward_flops=share(products, None),
                backward_flops=share(products, backward_products),
                remat_flops=share(in_layers, recomputed),
                forward_other_flops=share(others, other_forward).total,
                backward_other_flops=share(others, other_backward).total,
                # Backward moves twice the bytes of forward, as in `transformer_parts`.
                forward_bytes=share(moved, measured.bytes_moved / 3),
                backward_bytes=share(moved, measured.bytes_moved * 2 / 3),
                input_bytes=0.0 if part is ModelPart.EMBEDDING else traced.boundary_bytes,
                residual_bytes=kept,
                block_residual_bytes=share(traced.block_residual_bytes, None),
                remat_residual_bytes=share(remat.residual_bytes, None)
                if remat and part is ModelPart.LAYER
                else kept,
                working_bytes=AmountByAxis(**{traced.largest_activation[1]: working})
                if part is traced.largest_activation[0]
                else AmountByAxis(),
                collectives=_make_collectives(traced, part, copies),
            )
        )
    return _fit_remat(parts, remat.temporary_bytes) if remat and remat.temporary_bytes else tuple(parts)


def _fit_remat(parts: Sequence[PartCost], temporary_bytes: float) -> tuple[PartCost, ...]:
    """Split the measured memory of the rematerialized program into what layers keep and what recomputing one needs.

    Layers keep what the trace shows. The rest belongs to the one layer that is recomputed, up to what a layer needs
    without rematerialization; what remains then, XLA keeps nevertheless. XLA on CPU undoes most of rematerialization
    for unrolled layers: it finds that both computations are equal and runs one of them (`nnx.remat`: 5 % less memory
    for a decoder of four layers). In a loop it cannot.
    """
    kept = sum(part.copies * part.remat_residual_bytes.total for part in parts)
    rest = max(0.0, temporary_bytes - kept)
    return tuple(_fit_remat_layer(part, rest) if part.part is ModelPart.LAYER else part for part in parts)


def _fit_remat_layer(layer: PartCost, rest: float) -> PartCost:
    # Bytes per example: working = min(rest, residuals + working of a layer); (rest - working) / L more is kept by
    # each layer.
    needed = layer.residual_bytes + layer.working_bytes
    limit = max(needed.total, 1.0)
    working = min(rest, limit)
    kept = layer.residual_bytes.scaled((rest - working) / layer.copies / max(layer.residual_bytes.total, 1.0))
    return dataclasses.replace(
        layer,
        remat_residual_bytes=layer.remat_residual_bytes + kept,
        remat_working_bytes=needed.scaled(working / limit),
    )


def _sum(traced: TracedProgram, amount: Callable[[AnnotatedOperation], float]) -> CostShares:
    """Return the sum of an amount over all operations, for one example."""
    total: collections.Counter[tuple[ModelPart, ShardingKind]] = collections.Counter()
    for operation in traced.propagated.operations:
        if found := amount(operation):
            total[operation.part, operation.kind] += found / traced.num_examples  # pyright: ignore[reportArgumentType] - floats add too
    return total


def _count_elements(annotated: AnnotatedOperation) -> float:
    return sum(value.size for value in annotated.operation.outputs) * annotated.operation.iterations


def _sum_bytes_moved(traced: TracedProgram) -> CostShares:
    """Return the bytes of activations that operations read and write, for one example.

    Each value is divided as it is itself: every device of a tensor group reads all of the input of a product whose
    parameter is sharded, and writes all of its partial sum. Operations that are fused with others move nothing.
    """
    total: collections.Counter[tuple[ModelPart, ShardingKind]] = collections.Counter()
    kinds = traced.propagated.kinds
    for annotated in traced.propagated.operations:
        operation = annotated.operation
        if operation.name in FUSIBLE_PRIMITIVES:
            continue
        for value in (*operation.inputs, *operation.outputs):
            if value in kinds:
                moved = value.bytes * operation.iterations / traced.num_examples
                total[annotated.part, kinds[value]] += moved  # pyright: ignore[reportArgumentType] - floats add too
    return total


def _split_amount(shares: CostShares, total: float | None, part: ModelPart, copies: int) -> AmountByAxis:
    """Return the amount of one copy of a part, of `total` split in the proportions of `shares`; None: of their sum."""
    shares_total = sum(shares.values())
    if total is not None and not shares_total:
        shares, shares_total = {(ModelPart.LAYER, ShardingKind.REPLICATED): 1.0}, 1.0
    # amount_kind = total share_kind / (sum of all shares) / copies, or share_kind / copies without a total.
    scale = (1.0 if total is None else total / shares_total) / copies
    return AmountByAxis(**{kind: value * scale for (owner, kind), value in shares.items() if owner is part})


def _make_collectives(
    traced: TracedProgram, part: ModelPart, copies: int
) -> tuple[ActivationCollective, ...]:
    # One collective per axis and name, of the mean size: M = sum_e bytes_e count_e / (examples sum_e count_e), with
    # count_e the exchanges of all layers in both directions.
    groups: dict[tuple[Axis, str | None], list[ActivationExchange]] = collections.defaultdict(list)
    for exchange in traced.propagated.exchanges:
        if exchange.part is part:
            groups[exchange.axis, exchange.logical_name].append(exchange)
    collectives: list[ActivationCollective] = []
    for (axis, logical_name), exchanges in groups.items():
        forward = sum(e.forward_count * e.iterations for e in exchanges)
        backward = sum(e.backward_count * e.iterations for e in exchanges)
        moved = sum(e.bytes * (e.forward_count + e.backward_count) * e.iterations for e in exchanges)
        collective = ActivationCollective(
            axis=axis,
            kind=COLLECTIVE_KINDS[axis],
            message_bytes=moved / traced.num_examples / (forward + backward),
            forward_count=round(forward / copies),
            backward_count=round(backward / copies),
            logical_name=logical_name,
        )
        collectives.append(collective)
        # The gradients of keys and values are reduced to the devices that have their shards.
        if axis is Axis.SEQUENCE:
            collectives.append(
                dataclasses.replace(collective, kind=CollectiveKind.REDUCE_SCATTER, forward_count=0)
            )
    return tuple(collectives)
