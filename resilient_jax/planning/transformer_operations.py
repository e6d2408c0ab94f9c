"""How much each part of a transformer computes, keeps and moves, in operations and numbers of one sequence and layer.

T tokens, D width, H heads and K key/value heads of h numbers, F feed-forward. What is not a matrix product was counted
in a program of plain JAX and Flax (tests/support/decoder.py): the operations that XLA reports for it, for each number
of an array.
"""

import dataclasses
import enum

from resilient_jax.planning.program_cost import AmountByAxis
from resilient_jax.planning.transformer import TransformerShape


class AttentionKind(enum.StrEnum):
    """How a program computes causal attention; what is counted is what it computes."""

    SQUARE = "square"
    """All T x T scores, masked afterwards, and their softmax kept for backward: XLA's own, without a kernel."""
    BLOCKS = "blocks"
    """In blocks, of which those above the diagonal are skipped: T (T + 1) / 2 pairs. Scores are computed once more
    backward and never kept (FlashAttention, Dao 2023, https://arxiv.org/abs/2307.08691)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseCost:
    """Operations for each number of an array, as XLA counts them; a transcendental function counts for none."""

    forward: float
    backward: float


NORM = {"rms": ElementwiseCost(forward=4, backward=9), "layer": ElementwiseCost(forward=7, backward=13)}
GATED_ACTIVATION = ElementwiseCost(forward=5, backward=8)
PLAIN_ACTIVATION = ElementwiseCost(forward=8, backward=14)  # gelu by tanh
SOFTMAX = ElementwiseCost(forward=6, backward=8)
ROTARY = ElementwiseCost(forward=3, backward=3.5)
CROSS_ENTROPY = ElementwiseCost(forward=3, backward=2)
ADD = ElementwiseCost(forward=1, backward=1)  # a bias, a residual; a lookup in a table
_SUM = ElementwiseCost(forward=0, backward=1)  # of the gradients of an input that several products use


def _pairs(shape: TransformerShape, attention: AttentionKind) -> float:
    """Pairs of tokens of which a head computes the score."""
    tokens = shape.sequence_tokens
    return tokens * tokens if attention is AttentionKind.SQUARE else tokens * (tokens + 1) / 2


def _by_network(shape: TransformerShape, amount: float) -> AmountByAxis:
    """An amount of the feed-forward network, or of all the experts that see a token."""
    if shape.experts == 1:
        return AmountByAxis(tensor=amount)
    return AmountByAxis(expert=amount * shape.experts_per_token)


def count_matmul_flops(shape: TransformerShape, attention: AttentionKind) -> AmountByAxis:
    tokens, width = shape.sequence_tokens, shape.width
    projections = 2 * tokens * width * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    matrices = 3 if shape.gated else 2
    router = 2 * tokens * width * shape.experts if shape.experts > 1 else 0
    return AmountByAxis(
        replicated=router,
        tensor=projections,
        attention=4 * _pairs(shape, attention) * shape.heads * shape.head_dim,
    ) + _by_network(shape, 2 * tokens * width * shape.feed_forward * matrices)


def count_traffic(shape: TransformerShape, attention: AttentionKind) -> AmountByAxis:
    """Numbers read and written forward: each operand and result of a matrix product, each norm, each activation."""
    tokens, inputs = shape.sequence_tokens, 5 if shape.gated else 4
    projected = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim if shape.positions == "rotary" else 0
    scores = 4 * _pairs(shape, attention) * shape.heads if attention is AttentionKind.SQUARE else 0.0
    # Two norms read and write; two results are written and added to what is read.
    whole = tokens * shape.width * (4 + inputs + 4)
    tensor = tokens * (2 * projected + 2 * rotated + 2 * shape.heads * shape.head_dim)
    network = _by_network(shape, tokens * shape.feed_forward * (6 if shape.gated else 4))
    return AmountByAxis(replicated=whole, tensor=tensor, attention=scores) + network


def count_residuals(shape: TransformerShape, attention: AttentionKind) -> AmountByAxis:
    """Numbers that JAX keeps for backward and XLA does not compute again.

    What each norm, matrix product and attention was given; of the softmax its exponentials and its result; of the
    feed-forward network the results of the products up, the logistic function or hyperbolic tangent of one of them,
    and what goes into the product down.
    """
    tokens = shape.sequence_tokens
    scores = 2 * tokens * tokens * shape.heads if attention is AttentionKind.SQUARE else 0
    attended = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    network = _by_network(shape, tokens * shape.feed_forward * (4 if shape.gated else 3))
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
    """Numbers of the gradients that a layer's backward holds at once: of the feed-forward network, or of attention."""
    tokens = shape.sequence_tokens
    gradient = AmountByAxis(replicated=2 * tokens * shape.width)
    network = _by_network(shape, tokens * shape.feed_forward * (3 if shape.gated else 2))
    scores = 2 * tokens * tokens * shape.heads if attention is AttentionKind.SQUARE else 0
    attended = AmountByAxis(
        attention=scores, tensor=tokens * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    )
    return gradient + max(network, attended, key=lambda amounts: amounts.total)


def count_other_flops(shape: TransformerShape, attention: AttentionKind) -> ElementwiseCost:
    """Operations that are no matrix products."""
    tokens, hidden = shape.sequence_tokens, shape.feed_forward * shape.experts_per_token
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = (2 if shape.gated else 1) * hidden
    terms = [
        (2 * shape.width, NORM[shape.norm]),
        (2 * shape.width, ADD),
        ((3 if shape.gated else 2) * shape.width, _SUM),
        (hidden, GATED_ACTIVATION if shape.gated else PLAIN_ACTIVATION),
        (shape.heads * _pairs(shape, attention) / tokens, SOFTMAX),
        (queries + keys if shape.positions == "rotary" else 0, ROTARY),
        (queries + 2 * keys if shape.biases != "none" else 0, ADD),
        (2 * shape.width + inner if shape.biases == "all" else 0, ADD),
    ]
    return ElementwiseCost(
        forward=tokens * sum(numbers * cost.forward for numbers, cost in terms),
        backward=tokens * sum(numbers * cost.backward for numbers, cost in terms),
    )
