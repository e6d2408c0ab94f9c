"""Residuals: what a program keeps from its forward pass for the backward pass, by part and by the axis that shards it.

The function that `jax.vjp` returns is a pytree of what JAX keeps. XLA keeps less: a value that is cheap to compute from
one other value is fused into its uses, and the other value is kept. The operands of a matrix product are the exception:
they are in memory already.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import Any, Final

import jax

from resilient_jax.planning.program_cost import ModelPart
from resilient_jax.program_analysis.operations import Operation, OperationTrace, Value
from resilient_jax.program_analysis.sharding_propagation import PropagatedSharding, ShardingKind
from resilient_jax.sharding.logical_axes import Tree

_NAMES: Final = """abs add add_any and broadcast_in_dim clamp convert_element_type copy eq expand_dims ge gt
    integer_pow le lt max min mul ne neg not one_minus_square or reshape select_n sign slice square squeeze
    stop_gradient sub transpose"""
FUSIBLE_PRIMITIVES: Final = frozenset(_NAMES.split())
"""Primitives that XLA recomputes in every fusion instead of writing their results to memory."""

UNFUSED_PRIMITIVES: Final = frozenset(
    {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"}
)
"""Primitives that read their operands from memory and are fused with no other."""


def compute_residuals(loss_fn: Any, params: Tree, others: Tree, batch: Tree) -> list[jax.Array]:  # noqa: ANN401 - a function
    """Return what the backward pass of a loss needs, as arrays; a function to be traced."""
    _, backward = jax.vjp(lambda tree: loss_fn(tree, others, batch), params)
    return jax.tree.leaves(backward)


def count_residual_bytes(
    trace: OperationTrace, propagated: PropagatedSharding
) -> Mapping[tuple[ModelPart, ShardingKind], int]:
    """Return the bytes kept for a batch, all layers together.

    Args:
        trace: trace of `compute_residuals`.
    """
    # The operands of matrix products are written to memory in any case, so no fusion recomputes them.
    in_memory = {
        value
        for operation in trace.operations
        if operation.name in UNFUSED_PRIMITIVES
        for value in operation.inputs
    }
    fusible = {
        operation.outputs[0]: operation
        for operation in trace.operations
        if operation.name in FUSIBLE_PRIMITIVES and operation.outputs[0] not in in_memory
    }
    total: collections.Counter[tuple[ModelPart, ShardingKind]] = collections.Counter()
    for value in _find_kept_values(trace.outputs, fusible, propagated.kinds).difference(trace.inputs):
        total[propagated.parts[value], propagated.kinds[value]] += value.bytes
    return total


def count_block_residual_bytes(
    trace: OperationTrace, propagated: PropagatedSharding
) -> Mapping[tuple[ModelPart, ShardingKind], int]:
    """Return the bytes that a pipeline's stages keep for a batch, all layers together.

    Forward and backward of a block are programs of their own, so nothing is fused from one into the other: all that
    JAX keeps is kept, but for what depends on weights alone.

    Args:
        trace: trace of `compute_residuals`.
    """
    total: collections.Counter[tuple[ModelPart, ShardingKind]] = collections.Counter()
    found = {value for value in trace.outputs if value in propagated.kinds}
    for value in found.difference(trace.inputs):
        total[propagated.parts[value], propagated.kinds[value]] += value.bytes
    return total


def _find_kept_values(
    residuals: Iterable[Value],
    fusible: Mapping[Value, Operation],
    kinds: Mapping[Value, ShardingKind],
) -> set[Value]:
    """Return what must be in memory so that all residuals can be recomputed cheaply; only what depends on the batch.

    A value that is made from two large ones is kept itself, unless both can be recomputed anyway.

    Args:
        residuals: values that JAX keeps.
        fusible: maps each value that is cheap to recompute to its operation.
        kinds: kinds of values that depend on the batch.
    """
    operands = {
        value: [operand for operand in operation.inputs if operand in kinds]
        for value, operation in fusible.items()
    }
    kept: set[Value] = set()
    pending = [value for value in residuals if value in kinds]
    seen: set[Value] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        found = operands.get(value, [])
        # A cheap operation on at most one large operand: that operand is kept instead, and the value recomputed from
        # it.
        large = {operand for operand in found if operand.size >= value.size}
        if found and len(large) <= 1:
            pending.extend(found)
        else:
            kept.add(value)
    # What cheap operations compute from other kept values need not be kept.
    return {value for value in kept if not _can_recompute(value, kept - {value}, operands)}


def _can_recompute(value: Value, in_memory: set[Value], operands: Mapping[Value, list[Value]]) -> bool:
    """Return whether cheap operations compute a value from others that are in memory."""
    pending, seen = [value], set(in_memory)
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if not operands.get(value):
            return False
        pending.extend(operands[value])
    return True
