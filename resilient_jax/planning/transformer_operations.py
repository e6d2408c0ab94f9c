"""How much a transformer layer computes, keeps and moves for one sequence, in operations and elements.

T tokens, D width, H heads and K key/value heads of h elements, F feed-forward, P pairs of tokens. Matrix products
forward (Kaplan et al. 2020, https://arxiv.org/abs/2001.08361, table 1, with key/value heads and gates; 2 FLOPs per
multiply-add):

    projections   2 T D h (2 H + 2 K)
    attention     4 P H h                    scores and their product with the values
    feed-forward  2 T D F m                  m = 3 matrices if gated, else 2; times the experts of a token

Backward takes twice that; blockwise attention computes its scores once more (2.5 times). Everything else was counted
in a program of plain JAX and Flax (tests/support/decoder.py): the operations that XLA reports, per element of an
array.
"""

import dataclasses
import enum

from resilient_jax.planning.program_cost import AmountByAxis
from resilient_jax.planning.transformer import TransformerShape


class AttentionKind(enum.StrEnum):
    """How a program computes causal attention; the cost counts what it computes."""

    SQUARE = "square"
    """All T x T scores, masked afterwards, and their softmax kept for backward: XLA's own, without a kernel."""
    BLOCKS = "blocks"
    """Blockwise, without the blocks above the diagonal: T (T + 1) / 2 pairs; scores are recomputed, never kept.

    FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691.
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseCost:
    """Operations per element of an array, as XLA counts them; a transcendental function counts as none."""

    forward: float
    backward: float


NORM = {"rms": ElementwiseCost(forward=4, backward=9), "layer": ElementwiseCost(forward=7, backward=13)}
GATED_ACTIVATION = ElementwiseCost(forward=5, backward=8)
# GELU in its tanh form.
PLAIN_ACTIVATION = ElementwiseCost(forward=8, backward=14)
SOFTMAX = ElementwiseCost(forward=6, backward=8)
ROTARY = ElementwiseCost(forward=3, backward=3.5)
CROSS_ENTROPY = ElementwiseCost(forward=3, backward=2)
# A bias, a residual, a lookup in a table.
ADD = ElementwiseCost(forward=1, backward=1)
# The sum of the gradients of an input that several products use.
GRADIENT_SUM = ElementwiseCost(forward=0, backward=1)


def _count_pairs(shape: TransformerShape, attention: AttentionKind) -> float:
    """Return the pairs of tokens whose score a head computes."""
    # T^2 pairs, or those with i <= j: T (T + 1) / 2.
    tokens = shape.sequence_tokens
    return tokens * tokens if attention is AttentionKind.SQUARE else tokens * (tokens + 1) / 2


def _split_feed_forward(shape: TransformerShape, amount: float) -> AmountByAxis:
    """Return an amount of the feed-forward network, or of all the experts that process a token."""
    if shape.experts == 1:
        return AmountByAxis(tensor=amount)
    return AmountByAxis(expert=amount * shape.experts_per_token)


def count_matmul_flops(shape: TransformerShape, attention: AttentionKind) -> AmountByAxis:
    """Return the FLOPs of a layer's matrix products forward."""
    tokens, width = shape.sequence_tokens, shape.width
    projections = 2 * tokens * width * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    matrices = 3 if shape.gated else 2
    router = 2 * tokens * width * shape.experts if shape.experts > 1 else 0
    return AmountByAxis(
        replicated=router,
        tensor=projections,
        attention=4 * _count_pairs(shape, attention) * shape.heads * shape.head_dim,
    ) + _split_feed_forward(shape, 2 * tokens * width * shape.feed_forward * matrices)


def count_traffic(shape: TransformerShape, attention: AttentionKind) -> AmountByAxis:
    """Return the elements read and written forward.

    Each operand and result of a matrix product, each norm, each activation function.
    """
    tokens, inputs = shape.sequence_tokens, 5 if shape.gated else 4
    projected = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim if shape.positions == "rotary" else 0
    scores = 4 * _count_pairs(shape, attention) * shape.heads if attention is AttentionKind.SQUARE else 0.0
    # 4 T D: two norms read and write. Then the products read their inputs, and two residual additions read and write.
    replicated = tokens * shape.width * (4 + inputs + 4)
    tensor = tokens * (2 * projected + 2 * rotated + 2 * shape.heads * shape.head_dim)
    network = _split_feed_forward(shape, tokens * shape.feed_forward * (6 if shape.gated else 4))
    return AmountByAxis(replicated=replicated, tensor=tensor, attention=scores) + network


def count_residuals(shape: TransformerShape, attention: AttentionKind) -> AmountByAxis:
    """Return the elements that JAX keeps for backward and XLA does not recompute.

    The inputs of each norm, matrix product and attention; of the softmax its exponentials and its result; of the
    feed-forward network the results of the products up, the logistic function or hyperbolic tangent of one of them,
    and the input of the product down.
    """
    # 4 T D + T h (2 H + 2 K) + T F (4 if gated, else 3), and 2 T^2 H where scores are kept; with experts T D for each
    # of a token, and F of all of these.
    tokens = shape.sequence_tokens
    scores = 2 * tokens * tokens * shape.heads if attention is AttentionKind.SQUARE else 0
    attended = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    network = _split_feed_forward(shape, tokens * shape.feed_forward * (4 if shape.gated else 3))
    dispatched = tokens * shape.width * shape.experts_per_token if shape.experts > 1 else 0
    return (
        AmountByAxis(
            replicated=4 * tokens * shape.width,
            tensor=tokens * attended,
            attention=scores,
            expert=dispatched,
        )
        + network
    )


def count_working_set(shape: TransformerShape, attention: AttentionKind) -> AmountByAxis:
    """Return the elements of gradients that a layer's backward holds at once: feed-forward network or attention."""
    # 2 T D + max(T F (3 if gated, else 2), T h (2 H + 2 K) + 2 T^2 H where scores are kept): gradients of the width,
    # and of the larger of both halves of a layer.
    tokens = shape.sequence_tokens
    gradient = AmountByAxis(replicated=2 * tokens * shape.width)
    network = _split_feed_forward(shape, tokens * shape.feed_forward * (3 if shape.gated else 2))
    scores = 2 * tokens * tokens * shape.heads if attention is AttentionKind.SQUARE else 0
    attended = AmountByAxis(
        attention=scores, tensor=tokens * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    )
    return gradient + max(network, attended, key=lambda amounts: amounts.total)


def count_other_flops(shape: TransformerShape, attention: AttentionKind) -> ElementwiseCost:
    """Return the operations other than matrix products."""
    tokens, hidden = shape.sequence_tokens, shape.feed_forward * shape.experts_per_token
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = (2 if shape.gated else 1) * hidden
    # sum over (elements per token, operations per element), times T.
    terms = [
        (2 * shape.width, NORM[shape.norm]),
        (2 * shape.width, ADD),
        ((3 if shape.gated else 2) * shape.width, GRADIENT_SUM),
        (hidden, GATED_ACTIVATION if shape.gated else PLAIN_ACTIVATION),
        (shape.heads * _count_pairs(shape, attention) / tokens, SOFTMAX),
        (queries + keys if shape.positions == "rotary" else 0, ROTARY),
        (queries + 2 * keys if shape.biases != "none" else 0, ADD),
        (2 * shape.width + inner if shape.biases == "all" else 0, ADD),
    ]
    return ElementwiseCost(
        forward=tokens * sum(elements * cost.forward for elements, cost in terms),
        backward=tokens * sum(elements * cost.backward for elements, cost in terms),
    )
