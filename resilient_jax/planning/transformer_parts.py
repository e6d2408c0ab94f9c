"""What each part of a transformer does for one sequence, in FLOPs and bytes: before the layers, in one, after them."""

import dataclasses
from typing import Final

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.program_cost import Amounts, Exchange, ExchangeKind, Part, Work
from resilient_jax.planning.transformer import TransformerShape
from resilient_jax.planning.transformer_operations import (
    ADD,
    CROSS_ENTROPY,
    NORM,
    AttentionKind,
    count_kept,
    count_moved,
    count_others,
    count_products,
    count_working,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes of one number, by what it is.

    Attributes:
        parameter_bytes: between steps.
        compute_bytes: in matrix products, and of activations.
        gradient_bytes: in the sum of a step's gradients.
        optimizer_bytes: of each number that the optimizer keeps for a parameter; AdamW: two.
        logits_bytes: of the head's result, from which the loss is computed.
    """

    parameter_bytes: int = 4
    compute_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: tuple[int, ...] = (4, 4)
    logits_bytes: int = 4


MIXED: Final = Precision()
"""Parameters, gradients and AdamW's moments in float32, all else in bfloat16; the logits in float32 again."""

SINGLE: Final = Precision(compute_bytes=4)
"""All in float32."""


def embedding_work(shape: TransformerShape, precision: Precision) -> Work:
    numbers = shape.sequence_tokens * shape.width
    tables = 2 if shape.positions == "table" else 1
    moved = Amounts(whole=2 * tables * numbers * precision.compute_bytes)
    return Work(
        part=Part.EMBEDDING,
        copies=1,
        forward_flops=Amounts(),
        backward_flops=Amounts(),
        recomputed_flops=Amounts(),
        forward_other_flops=tables * numbers * ADD.forward,
        backward_other_flops=tables * numbers * ADD.backward,
        forward_bytes=moved,
        backward_bytes=moved,
        input_bytes=0.0,
        kept_bytes=Amounts(),
        rematerialised_bytes=Amounts(),
        working_bytes=Amounts(whole=numbers * precision.compute_bytes),
        exchanges=(_reduced(numbers * precision.compute_bytes, 1, 0, "vocab"),),
    )


def _reduced(message_bytes: float, forward: int, backward: int, dim: str | None = None) -> Exchange:
    return Exchange(
        axis=Axis.TENSOR,
        kind=ExchangeKind.ALL_REDUCE,
        message_bytes=message_bytes,
        forward=forward,
        backward=backward,
        dim=dim,
    )


def head_work(shape: TransformerShape, precision: Precision) -> Work:
    """The last norm, the logits and the loss."""
    width, logits = shape.sequence_tokens * shape.width, shape.sequence_tokens * shape.vocabulary_tokens
    product = Amounts(vocabulary=2 * width * shape.vocabulary_tokens)
    norm = NORM[shape.norm]
    moved = Amounts(whole=3 * width * precision.compute_bytes, vocabulary=2 * logits * precision.logits_bytes)
    return Work(
        part=Part.HEAD,
        copies=1,
        forward_flops=product,
        backward_flops=product.scaled(2),
        recomputed_flops=product,
        forward_other_flops=width * norm.forward + logits * CROSS_ENTROPY.forward,
        backward_other_flops=width * norm.backward + logits * CROSS_ENTROPY.backward,
        forward_bytes=moved,
        backward_bytes=moved.scaled(2),
        input_bytes=width * precision.compute_bytes,
        rematerialised_bytes=Amounts(whole=width * precision.compute_bytes),
        kept_bytes=Amounts(
            whole=2 * width * precision.compute_bytes, vocabulary=logits * precision.logits_bytes
        ),
        working_bytes=Amounts(
            whole=width * precision.compute_bytes, vocabulary=logits * precision.logits_bytes
        ),
        exchanges=(_reduced(width * precision.compute_bytes, 0, 1, "vocab"),),
    )


def layer_work(shape: TransformerShape, precision: Precision, attention: AttentionKind) -> Work:
    forward = count_products(shape, attention)
    again = forward.attention / 2 if attention is AttentionKind.BLOCKS else 0.0
    width_bytes = shape.sequence_tokens * shape.width * precision.compute_bytes
    moved = count_moved(shape, attention).scaled(precision.compute_bytes)
    others = count_others(shape, attention)
    return Work(
        part=Part.LAYER,
        copies=shape.layers,
        forward_flops=forward,
        backward_flops=forward.scaled(2) + Amounts(attention=again),
        recomputed_flops=forward,
        forward_other_flops=others.forward,
        backward_other_flops=others.backward,
        forward_bytes=moved,
        backward_bytes=moved.scaled(2),
        input_bytes=width_bytes,
        rematerialised_bytes=Amounts(whole=width_bytes),
        kept_bytes=count_kept(shape, attention).scaled(precision.compute_bytes),
        working_bytes=count_working(shape, attention).scaled(precision.compute_bytes),
        exchanges=_layer_exchanges(shape, precision, width_bytes),
    )


def _layer_exchanges(
    shape: TransformerShape, precision: Precision, width_bytes: float
) -> tuple[Exchange, ...]:
    keys_and_values = 2 * shape.sequence_tokens * shape.kv_heads * shape.head_dim * precision.compute_bytes
    reduced = _reduced(width_bytes, 2, 2)
    gathered = Exchange(
        axis=Axis.SEQUENCE,
        kind=ExchangeKind.ALL_GATHER,
        message_bytes=keys_and_values,
        forward=1,
        backward=1,
    )
    scattered = Exchange(
        axis=Axis.SEQUENCE,
        kind=ExchangeKind.REDUCE_SCATTER,
        message_bytes=keys_and_values,
        forward=0,
        backward=1,
    )
    if shape.experts == 1:
        return reduced, gathered, scattered
    sent = Exchange(
        axis=Axis.EXPERT,
        kind=ExchangeKind.ALL_TO_ALL,
        message_bytes=width_bytes * shape.experts_per_token,
        forward=2,
        backward=2,
    )
    return reduced, gathered, scattered, sent
