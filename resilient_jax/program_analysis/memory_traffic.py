"""Memory traffic: the activations that a program reads and writes, by part and by the axis that divides each of them.

XLA fuses cheap operations into those that read their results, so not every result is in memory. Here a result is
written if a matrix product reads it, if a loop hands it to its next iteration, or if several operations read it and
more than one large value is needed to compute it again. Any other cheap operation reads and writes nothing by itself:
what reads its result reads what it is computed from.

Each value is divided as it is itself. Every device of a tensor group reads all of the input of a product whose
parameter is sharded, and writes all of its partial sum.
"""

import collections
from collections.abc import Mapping
from typing import Final

from resilient_jax.planning.program_cost import ModelPart
from resilient_jax.program_analysis.operations import OperationTrace, Value
from resilient_jax.program_analysis.residuals import FUSIBLE_PRIMITIVES, UNFUSED_PRIMITIVES
from resilient_jax.program_analysis.sharding_propagation import PropagatedSharding, ShardingKind

VIEWS: Final = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient"})
"""Primitives whose result is their input in memory, under another shape."""


def count_bytes_moved(
    trace: OperationTrace, propagated: PropagatedSharding
) -> Mapping[tuple[ModelPart, ShardingKind], int]:
    """Return the bytes of activations that a pass reads and writes for a batch, all layers together.

    Args:
        trace: of the pass.
        propagated: of the same trace.
    """
    kinds = propagated.kinds
    operands, uses = _list_operands(trace), _count_uses(trace)
    total: collections.Counter[tuple[ModelPart, ShardingKind]] = collections.Counter()
    sources: dict[Value, frozenset[Value]] = {}
    """Of what is not in memory by itself: from what in memory it is computed."""
    for annotated in propagated.operations:
        operation = annotated.operation
        inputs = [value for value in operation.inputs if value in kinds and value is not None]
        reads = frozenset[Value]().union(*(sources.get(value, (value,)) for value in inputs))
        if operation.name in FUSIBLE_PRIMITIVES:
            (result,) = operation.outputs
            is_view = operation.name in VIEWS and not any(value in sources for value in inputs)
            large = [value for value in reads if value.size >= result.size]
            is_shared = uses[result] > 1 and len(large) > 1
            if is_view or not (result in operands or result in trace.carries or is_shared):
                sources[result] = reads
                continue
        for value in (*reads, *(value for value in operation.outputs if value in kinds)):
            total[annotated.part, kinds[value]] += value.bytes * operation.iterations
    return total


def _list_operands(trace: OperationTrace) -> set[Value | None]:
    """Return what products read: they are fused with nothing."""
    return {
        value
        for operation in trace.operations
        if operation.name in UNFUSED_PRIMITIVES
        for value in operation.inputs
    }


def _count_uses(trace: OperationTrace) -> collections.Counter[Value | None]:
    """Return how many operations read each value."""
    return collections.Counter(value for operation in trace.operations for value in set(operation.inputs))
