"""What a program keeps from its forward pass for the backward one, by part and by what cuts it.

`jax.vjp` says what it keeps: its result is a tree of it. XLA keeps less: what is cheap to compute again from one other
thing is fused into where it is used, and the other thing is kept. Not so what a matrix product reads: that is in memory
already.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import Any, Final

import jax

from resilient_jax.planning.program_cost import ModelPart
from resilient_jax.program_cost.operations import Operation, OperationTrace, Value
from resilient_jax.program_cost.sharding_propagation import PropagatedSharding, ShardingKind
from resilient_jax.sharding.logical_axes import Tree

FUSIBLE_PRIMITIVES: Final = frozenset(
    {
        "abs",
        "add",
        "add_any",
        "and",
        "broadcast_in_dim",
        "clamp",
        "convert_element_type",
        "copy",
        "eq",
        "expand_dims",
        "ge",
        "gt",
        "integer_pow",
        "le",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "one_minus_square",
        "or",
        "reshape",
        "select_n",
        "sign",
        "slice",
        "square",
        "squeeze",
        "stop_gradient",
        "sub",
        "transpose",
    }
)
"""What XLA rather does again in every fusion than write to memory."""

UNFUSED_PRIMITIVES: Final = frozenset(
    {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"}
)
"""What reads its operands from memory, and is fused with nothing."""


def compute_residuals(loss_fn: Any, params: Tree, others: Tree, batch: Tree) -> list[jax.Array]:  # noqa: ANN401 - a function
    """Gives what the loss's backward needs, as arrays; a function to be traced."""
    _, backward = jax.vjp(lambda tree: loss_fn(tree, others, batch), params)
    return jax.tree.leaves(backward)


def count_residual_bytes(
    operations: OperationTrace, propagated: PropagatedSharding
) -> Mapping[tuple[ModelPart, ShardingKind], int]:
    """Gives the bytes kept of a whole batch, all layers together.

    Args:
        operations: of `compute_residuals`.
        attribution: of the same.
    """
    read = {
        value for step in operations.operations if step.name in UNFUSED_PRIMITIVES for value in step.inputs
    }
    cheap = {step.outputs[0]: step for step in operations.operations if step.name in FUSIBLE_PRIMITIVES}
    makers = {value: step for value, step in cheap.items() if value not in read}
    kept: collections.Counter[tuple[ModelPart, ShardingKind]] = collections.Counter()
    for value in _find_roots(operations.outputs, makers, propagated.kinds).difference(operations.inputs):
        kept[propagated.parts[value], propagated.kinds[value]] += value.bytes
    return kept


def _find_roots(
    kept: Iterable[Value | None], makers: Mapping[Value, Operation], kinds: Mapping[Value, ShardingKind]
) -> set[Value]:
    """What has to be in memory so that all that is kept can be had cheaply; only what depends on the batch.

    What is made from two large things stays itself, unless both can be had anyway.

    Args:
        kept: by JAX.
        makers: of values that are cheap to compute.
        kinds: of values that depend on the batch.
    """
    sources = {
        value: [operand for operand in maker.inputs if operand is not None and operand in kinds]
        for value, maker in makers.items()
    }
    roots: set[Value] = set()
    pending = [value for value in kept if value is not None and value in kinds]
    seen: set[Value] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        found = sources.get(value, [])
        large = {source for source in found if source.size >= value.size}
        if found and len(large) <= 1:
            pending.extend(found)
        else:
            roots.add(value)
    return {value for value in roots if not _can_be_had(value, roots - {value}, sources)}


def _can_be_had(value: Value, roots: set[Value], sources: Mapping[Value, list[Value]]) -> bool:
    """Whether cheap operations lead to a value from others that are in memory."""
    pending, seen = [value], set(roots)
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if not sources.get(value):
            return False
        pending.extend(sources[value])
    return True
