"""A program's measured cost, divided by part and by what cuts it, as the operations of its forward pass say."""

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
from resilient_jax.program_cost.abstract_program import AbstractProgram, count_examples
from resilient_jax.program_cost.measurement import MeasuredCost
from resilient_jax.program_cost.operations import OperationTrace, trace_operations
from resilient_jax.program_cost.program_parts import PartAssignment, assign_parts
from resilient_jax.program_cost.residuals import FUSIBLE_PRIMITIVES, compute_residuals, count_residual_bytes
from resilient_jax.program_cost.sharding_propagation import (
    ActivationExchange,
    AnnotatedOperation,
    PropagatedSharding,
    ShardingKind,
    propagate_sharding,
)
from resilient_jax.sharding.logical_axes import LogicalAxisRules
from resilient_jax.sharding.state_tensors import ParameterInfo

CostShares = Mapping[tuple[ModelPart, ShardingKind], float]
"""Any amount of one example, all layers together."""

COLLECTIVE_KINDS = {
    Axis.TENSOR: CollectiveKind.ALL_REDUCE,
    Axis.SEQUENCE: CollectiveKind.ALL_GATHER,
    Axis.EXPERT: CollectiveKind.ALL_TO_ALL,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedProgram:
    """A program's forward pass, followed.

    Attributes:
        examples: in the batch that it was traced with.
        layers: equal ones; 1 if there are none.
        attribution: of the pass and of what it keeps.
        uses: of each parameter's path, where it is used.
        kept: bytes kept for backward.
        boundary_bytes: what one layer hands to the next, of one example.
        largest: the activation with most bytes: its part, its kind, its bytes for one example.
        gradient_matmul_flops: FLOPs of matrix products in its gradient, one example; 0: not counted.
        temporary_bytes: memory beyond arguments that its gradient needs for an example; 0: not measured.
    """

    num_examples: int
    num_layers: int
    propagated: PropagatedSharding
    uses: Mapping[str, tuple[ModelPart, ...]]
    residual_bytes: CostShares
    boundary_bytes: float
    largest_activation: tuple[ModelPart, ShardingKind, float]
    gradient_matmul_flops: float = 0.0
    temporary_bytes: float = 0.0

    @property
    def compute_bytes(self) -> int:
        """Of one number in the matrix product with most FLOPs."""
        step = max(self.propagated.operations, key=lambda step: step.matmul_flops, default=None)
        value = next((v for v in step.operation.inputs if v is not None and v.size), None) if step else None
        return value.bytes // value.size if value is not None else 4


def trace_program(
    program: AbstractProgram, parameters: Sequence[ParameterInfo], logical_axis_rules: LogicalAxisRules
) -> TracedProgram:
    """Follows a program's forward pass from its parameters' names."""
    arguments = (program.params, program.others, program.batch)
    keeping = trace_operations(lambda *given: compute_residuals(program.loss_fn, *given), *arguments)
    where, followed = _follow(keeping, program, parameters, logical_axis_rules)
    examples = count_examples(program.batch)
    # A loop's stack is as large as all its layers' activations, and none of them.
    values = [value for value in followed.kinds if value.stack_of is None]
    largest = max(values, key=lambda value: value.bytes)
    return TracedProgram(
        num_examples=examples,
        num_layers=max(info.position.copies for info in parameters),
        propagated=followed,
        uses={
            info.path: where.uses.get(value, (ModelPart.EMBEDDING,))
            for info, value in zip(parameters, keeping.inputs, strict=False)  # parameters come first
        },
        residual_bytes={
            key: value / examples for key, value in count_residual_bytes(keeping, followed).items()
        },
        boundary_bytes=where.boundary_bytes / examples,
        largest_activation=(followed.parts[largest], followed.kinds[largest], largest.bytes / examples),
    )


def _follow(
    operations: OperationTrace,
    program: AbstractProgram,
    parameters: Sequence[ParameterInfo],
    naming: LogicalAxisRules,
) -> tuple[PartAssignment, PropagatedSharding]:
    infos = list(zip(operations.inputs, parameters, strict=False))  # parameters come first
    batch = frozenset(operations.inputs[-len(jax.tree.leaves(program.batch)) :])
    where = assign_parts(operations, {value: info.position for value, info in infos}, batch)
    names = {value: info.names for value, info in infos}
    return where, propagate_sharding(
        operations, [step.part for step in where.positions], names, batch, naming.mesh_axes
    )


def split_cost(
    traced: TracedProgram, remat: TracedProgram | None, measured: MeasuredCost
) -> tuple[PartCost, ...]:
    """Gives the work of each part that the program has.

    Args:
        traced: the program.
        again: the same, rematerialised; None: there is no such.
        measured: XLA's count.
    """
    products = _sum(traced, lambda step: step.matmul_flops)
    others = _sum(traced, lambda step: 0.0 if step.matmul_flops else _size(step))
    moved = _sum(traced, _bytes_moved(traced))
    forward_products = sum(products.values())
    backward_products = max(0.0, measured.gradient_matmul_flops - forward_products)
    other_forward = max(0.0, measured.forward_flops - forward_products)
    other_backward = max(0.0, measured.gradient_flops - measured.gradient_matmul_flops - other_forward)
    recomputed = max(0.0, remat.gradient_matmul_flops - measured.gradient_matmul_flops) if remat else 0.0
    working = min(traced.largest_activation[2], measured.temporary_bytes)
    in_layers = {key: value for key, value in products.items() if key[0] is ModelPart.LAYER}

    works = []
    for part in ModelPart:
        copies = traced.num_layers if part is ModelPart.LAYER else 1
        if not any(key[0] is part for key in (*products, *others, *traced.residual_bytes)):
            continue

        def share(
            shares: CostShares, total: float | None, part: ModelPart = part, copies: int = copies
        ) -> AmountByAxis:
            return _amounts(shares, total, part, copies)

        kept = share(traced.residual_bytes, measured.temporary_bytes - working)
        works.append(
            PartCost(
                part=part,
                copies=copies,
                forward_flops=share(products, None),
                backward_flops=share(products, backward_products),
                remat_flops=share(in_layers, recomputed),
                forward_other_flops=share(others, other_forward).total,
                backward_other_flops=share(others, other_backward).total,
                forward_bytes=share(moved, measured.bytes_moved / 3),
                backward_bytes=share(moved, measured.bytes_moved * 2 / 3),
                input_bytes=0.0 if part is ModelPart.EMBEDDING else traced.boundary_bytes,
                residual_bytes=kept,
                remat_residual_bytes=share(remat.residual_bytes, None)
                if remat and part is ModelPart.LAYER
                else kept,
                working_bytes=AmountByAxis(**{traced.largest_activation[1]: working})
                if part is traced.largest_activation[0]
                else AmountByAxis(),
                collectives=_make_collectives(traced, part, copies),
            )
        )
    return _fit_again(works, remat.temporary_bytes) if remat and remat.temporary_bytes else tuple(works)


def _fit_again(works: Sequence[PartCost], temporary_bytes: float) -> tuple[PartCost, ...]:
    """What the rematerialised program was seen to need, as what its layers keep and what computing one again takes.

    What the trace says that layers keep is kept. The rest is of the one layer that is computed again, as far as a layer
    ever needs so much; what is left over XLA keeps all the same. XLA on CPU undoes most of it for layers one by one: it
    sees that both computations are the same and does one of them (`nnx.remat`: 5 % less memory for a decoder of four
    layers), and in a loop it cannot.
    """
    kept = sum(w.copies * w.remat_residual_bytes.total for w in works)
    rest = max(0.0, temporary_bytes - kept)
    return tuple(_fit_layer(work, rest) if work.part is ModelPart.LAYER else work for work in works)


def _fit_layer(work: PartCost, rest: float) -> PartCost:
    all_of_it = work.residual_bytes + work.working_bytes
    most = max(all_of_it.total, 1.0)
    taken = min(rest, most)
    more = work.residual_bytes.scaled((rest - taken) / work.copies / max(work.residual_bytes.total, 1.0))
    return dataclasses.replace(
        work,
        remat_residual_bytes=work.remat_residual_bytes + more,
        remat_working_bytes=all_of_it.scaled(taken / most),
    )


def _sum(traced: TracedProgram, amount: Callable[[AnnotatedOperation], float]) -> CostShares:
    """An amount of each operation, added up for one example."""
    total: collections.Counter[tuple[ModelPart, ShardingKind]] = collections.Counter()
    for step in traced.propagated.operations:
        if found := amount(step):
            total[step.part, step.kind] += found / traced.num_examples  # pyright: ignore[reportArgumentType] - floats add too
    return total


def _size(step: AnnotatedOperation) -> float:
    return sum(value.size for value in step.operation.outputs) * step.operation.iterations


def _bytes_moved(traced: TracedProgram) -> Callable[[AnnotatedOperation], float]:
    """Bytes of activations that an operation reads and writes, unless it is fused with others."""

    def count(step: AnnotatedOperation) -> float:
        if step.operation.name in FUSIBLE_PRIMITIVES:
            return 0.0
        values = (*step.operation.inputs, *step.operation.outputs)
        moved = sum(v.bytes for v in values if v is not None and v in traced.propagated.kinds)
        return moved * step.operation.iterations

    return count


def _amounts(shares: CostShares, total: float | None, part: ModelPart, copies: int) -> AmountByAxis:
    """What one copy of a part has of a total that is divided as the shares say; None: of the shares themselves."""
    whole = sum(shares.values())
    if total is not None and not whole:
        shares, whole = {(ModelPart.LAYER, ShardingKind.REPLICATED): 1.0}, 1.0
    scale = (1.0 if total is None else total / whole) / copies
    return AmountByAxis(**{kind: value * scale for (where, kind), value in shares.items() if where is part})


def _make_collectives(
    traced: TracedProgram, part: ModelPart, copies: int
) -> tuple[ActivationCollective, ...]:
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
        if axis is Axis.SEQUENCE:  # the gradients of keys and values go back to the devices that hold these
            collectives.append(
                dataclasses.replace(collective, kind=CollectiveKind.REDUCE_SCATTER, forward_count=0)
            )
    return tuple(collectives)
