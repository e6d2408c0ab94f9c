"""The cost of each part of a transformer for one sequence: before the layers, one layer, after the layers.

With T tokens, D width and V vocabulary, each axis adds collectives (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053, for tensor; sequence and expert likewise):

    embedding   tensor: all-reduce of T D forward, where tensor shards the vocabulary
    layer       tensor: all-reduce of T D, twice forward, twice backward
                sequence: all-gather of keys and values forward and backward, reduce-scatter of their gradients
                expert: all-to-all of T D per chosen expert, twice forward, twice backward
    head        2 T D V FLOPs forward; tensor: all-reduce of T D backward
"""

import dataclasses
from typing import Final

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.program_cost import (
    ActivationCollective,
    AmountByAxis,
    CollectiveKind,
    ModelPart,
    PartCost,
)
from resilient_jax.planning.transformer import TransformerShape
from resilient_jax.planning.transformer_operations import (
    ADD,
    CROSS_ENTROPY,
    NORM,
    AttentionKind,
    count_matmul_flops,
    count_other_flops,
    count_residuals,
    count_traffic,
    count_working_set,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes of an element, by what it is.

    Attributes:
        parameter_bytes: parameters between steps.
        compute_bytes: operands of matrix products, and activations.
        gradient_bytes: the sum of a step's gradients.
        optimizer_bytes: each element that the optimizer keeps for a parameter; AdamW: two.
        logits_bytes: the head's result, from which the loss is computed.
    """

    parameter_bytes: int = 4
    compute_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: tuple[int, ...] = (4, 4)
    logits_bytes: int = 4


MIXED_PRECISION: Final = Precision()
"""Parameters, gradients, AdamW's moments and logits in float32, all else in bfloat16."""

LAYER_KERNELS: Final = 12
"""Of a layer's forward pass: products of queries, keys, values, outputs, and two or three of the feed-forward network;
attention, two norms, rotation, activation function, and residual sums that the compiler does not fuse into others."""


def analyze_embedding(shape: TransformerShape, precision: Precision) -> PartCost:
    """Return the cost of the embedding: lookups, which move data and compute nothing but the sum with positions."""
    # Each table: T D elements read and written, forward and again backward; a lookup is one operation per element.
    elements = shape.sequence_tokens * shape.width
    tables = 2 if shape.positions == "table" else 1
    moved = AmountByAxis(replicated=2 * tables * elements * precision.compute_bytes)
    return PartCost(
        part=ModelPart.EMBEDDING,
        copies=1,
        forward_flops=AmountByAxis(),
        backward_flops=AmountByAxis(),
        remat_flops=AmountByAxis(),
        forward_other_flops=tables * elements * ADD.forward,
        backward_other_flops=tables * elements * ADD.backward,
        forward_bytes=moved,
        backward_bytes=moved,
        input_bytes=0.0,
        residual_bytes=AmountByAxis(),
        remat_residual_bytes=AmountByAxis(),
        working_bytes=AmountByAxis(replicated=elements * precision.compute_bytes),
        collectives=(_make_all_reduce(elements * precision.compute_bytes, 1, 0, "vocab"),),
    )


def _make_all_reduce(
    message_bytes: float, forward: int, backward: int, dim: str | None = None
) -> ActivationCollective:
    return ActivationCollective(
        axis=Axis.TENSOR,
        kind=CollectiveKind.ALL_REDUCE,
        message_bytes=message_bytes,
        forward_count=forward,
        backward_count=backward,
        logical_name=dim,
    )


def analyze_head(shape: TransformerShape, precision: Precision) -> PartCost:
    """Return the cost of the last norm, the logits and the loss."""
    width, logits = shape.sequence_tokens * shape.width, shape.sequence_tokens * shape.vocabulary_tokens
    # Logits: 2 T D V FLOPs, twice that backward. Kept: the norm's input and result (2 T D), and the softmax (T V).
    # Read and written: T D three times around the norm and as operand, T V twice.
    product = AmountByAxis(vocabulary=2 * width * shape.vocabulary_tokens)
    norm = NORM[shape.norm]
    moved = AmountByAxis(
        replicated=3 * width * precision.compute_bytes, vocabulary=2 * logits * precision.logits_bytes
    )
    return PartCost(
        part=ModelPart.HEAD,
        copies=1,
        forward_flops=product,
        backward_flops=product.scaled(2),
        remat_flops=product,
        forward_other_flops=width * norm.forward + logits * CROSS_ENTROPY.forward,
        backward_other_flops=width * norm.backward + logits * CROSS_ENTROPY.backward,
        forward_bytes=moved,
        backward_bytes=moved.scaled(2),
        input_bytes=width * precision.compute_bytes,
        remat_residual_bytes=AmountByAxis(replicated=width * precision.compute_bytes),
        residual_bytes=AmountByAxis(
            replicated=2 * width * precision.compute_bytes, vocabulary=logits * precision.logits_bytes
        ),
        working_bytes=AmountByAxis(
            replicated=width * precision.compute_bytes, vocabulary=logits * precision.logits_bytes
        ),
        collectives=(_make_all_reduce(width * precision.compute_bytes, 0, 1, "vocab"),),
    )


def analyze_layer(shape: TransformerShape, precision: Precision, attention: AttentionKind) -> PartCost:
    """Return the cost of one layer."""
    # Backward has two products for each product forward; blockwise attention computes its scores, half of its
    # products, once more. Under remat the layer's input is kept instead of its residuals.
    forward = count_matmul_flops(shape, attention)
    again = forward.attention / 2 if attention is AttentionKind.BLOCKS else 0.0
    width_bytes = shape.sequence_tokens * shape.width * precision.compute_bytes
    moved = count_traffic(shape, attention).scaled(precision.compute_bytes)
    others = count_other_flops(shape, attention)
    return PartCost(
        part=ModelPart.LAYER,
        copies=shape.layers,
        forward_flops=forward,
        backward_flops=forward.scaled(2) + AmountByAxis(attention=again),
        remat_flops=forward,
        forward_other_flops=others.forward,
        backward_other_flops=others.backward,
        forward_bytes=moved,
        backward_bytes=moved.scaled(2),
        input_bytes=width_bytes,
        remat_residual_bytes=AmountByAxis(replicated=width_bytes),
        residual_bytes=count_residuals(shape, attention).scaled(precision.compute_bytes),
        working_bytes=count_working_set(shape, attention).scaled(precision.compute_bytes),
        collectives=_list_layer_collectives(shape, precision, width_bytes),
        kernels=LAYER_KERNELS,
    )


def _list_layer_collectives(
    shape: TransformerShape, precision: Precision, width_bytes: float
) -> tuple[ActivationCollective, ...]:
    # Bytes of a message: T D c for tensor, twice in each direction (attention and feed-forward network, Shoeybi et
    # al.); 2 T K h c of keys and values for sequence; T D c (experts of a token) for expert, to the experts and back.
    # K key/value heads of h elements, c bytes of an activation.
    keys_and_values = 2 * shape.sequence_tokens * shape.kv_heads * shape.head_dim * precision.compute_bytes
    reduced = _make_all_reduce(width_bytes, 2, 2)
    gathered = ActivationCollective(
        axis=Axis.SEQUENCE,
        kind=CollectiveKind.ALL_GATHER,
        message_bytes=keys_and_values,
        forward_count=1,
        backward_count=1,
    )
    scattered = ActivationCollective(
        axis=Axis.SEQUENCE,
        kind=CollectiveKind.REDUCE_SCATTER,
        message_bytes=keys_and_values,
        forward_count=0,
        backward_count=1,
    )
    if shape.experts == 1:
        return reduced, gathered, scattered
    sent = ActivationCollective(
        axis=Axis.EXPERT,
        kind=CollectiveKind.ALL_TO_ALL,
        message_bytes=width_bytes * shape.experts_per_token,
        forward_count=2,
        backward_count=2,
    )
    return reduced, gathered, scattered, sent
