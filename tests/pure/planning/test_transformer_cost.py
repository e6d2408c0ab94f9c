"""Transformers in closed form: exact numbers of parameters, FLOPs by the formulas, and the chosen conventions."""

import doctest

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.planning import tensor_partition, transformer, transformer_cost
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.program_cost import CollectiveKind, ModelPart, TensorRole
from resilient_jax.planning.transformer import TransformerShape, count_parameters
from resilient_jax.planning.transformer_cost import analyze_transformer
from resilient_jax.planning.transformer_operations import AttentionKind
from resilient_jax.planning.transformer_parts import MIXED_PRECISION, Precision

LLAMA2_7B = TransformerShape(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    feed_forward=11008,
    vocabulary_tokens=32000,
    sequence_tokens=4096,
)
SMALL = TransformerShape(
    layers=3,
    width=48,
    heads=6,
    kv_heads=2,
    head_dim=8,
    feed_forward=96,
    vocabulary_tokens=100,
    sequence_tokens=32,
)
MIXTURE = msgspec.structs.replace(SMALL, experts=8, experts_per_token=2)


@st.composite
def shapes(draw):
    def size(most):
        return draw(st.integers(1, most))

    kv_heads, experts = size(4), size(4)
    return TransformerShape(
        layers=size(5),
        width=8 * size(8),
        heads=kv_heads * size(4),
        kv_heads=kv_heads,
        head_dim=2 * size(8),
        feed_forward=size(100),
        vocabulary_tokens=size(500),
        sequence_tokens=size(64),
        gated=draw(st.booleans()),
        norm=draw(st.sampled_from(["rms", "layer"])),
        biases=draw(st.sampled_from(["none", "qkv", "all"])),
        positions=draw(st.sampled_from(["rotary", "table"])),
        tied_embedding=draw(st.booleans()),
        experts=experts,
        experts_per_token=draw(st.integers(1, experts)),
    )


@given(shapes())
def test_the_program_cost_has_all_parameters(shape):
    profile = analyze_transformer(shape)
    assert profile.parameter_count == count_parameters(shape)
    assert profile.parameter_bytes == 4 * profile.parameter_count
    assert profile.optimizer_bytes == 8 * profile.parameter_count


@given(shapes(), st.sampled_from(AttentionKind))
def test_backward_is_twice_forward_but_for_recomputed_scores(shape, attention):
    profile = analyze_transformer(shape, attention=attention)
    forward, backward = profile.forward_flops, profile.backward_flops
    again = 0.5 if attention is AttentionKind.BLOCKS else 0.0
    assert backward.attention == pytest.approx((2 + again) * forward.attention)
    assert backward.total - backward.attention == pytest.approx(2 * (forward.total - forward.attention))


@given(shapes())
def test_a_second_layer_costs_what_the_first_does(shape):
    one, two = (
        analyze_transformer(msgspec.structs.replace(shape, layers=n)).forward_flops.total for n in (1, 2)
    )
    three = analyze_transformer(msgspec.structs.replace(shape, layers=3)).forward_flops.total
    assert three - two == pytest.approx(two - one)


def test_flops_forward_are_two_for_each_parameter_and_token_and_those_of_attention():
    profile = analyze_transformer(LLAMA2_7B, attention=AttentionKind.SQUARE)
    tokens, table = 4096, 32000 * 4096
    norms = 65 * 4096
    assert profile.forward_flops.total == 2 * tokens * (count_parameters(LLAMA2_7B) - table - norms) + (
        32 * 4 * tokens**2 * 4096
    )


def test_blockwise_attention_counts_the_pairs_on_and_below_the_diagonal():
    square, blocks = (
        analyze_transformer(SMALL, attention=kind).forward_flops.attention
        for kind in (AttentionKind.SQUARE, AttentionKind.BLOCKS)
    )
    assert blocks / square == pytest.approx((32 + 1) / (2 * 32))


def test_residuals_grow_faster_than_the_sequence_only_where_attention_keeps_its_scores():
    def kept(sequence_tokens, attention):
        shape = msgspec.structs.replace(SMALL, sequence_tokens=sequence_tokens)
        (layer,) = (
            w for w in analyze_transformer(shape, attention=attention).parts if w.part is ModelPart.LAYER
        )
        return layer.residual_bytes.total

    assert kept(64, AttentionKind.BLOCKS) == 2 * kept(32, AttentionKind.BLOCKS)
    assert kept(64, AttentionKind.SQUARE) > 2 * kept(32, AttentionKind.SQUARE)


def test_each_expert_has_parameters_and_only_chosen_experts_compute():
    one, many = analyze_transformer(SMALL), analyze_transformer(MIXTURE)
    network = 3 * 48 * 96 * 3  # matrices, width, feed-forward, layers
    assert many.parameter_count - one.parameter_count == 7 * network + 3 * 48 * 8
    assert many.forward_flops.expert == 2 * 2 * 32 * network
    assert many.forward_flops.tensor == one.forward_flops.tensor - 2 * 32 * network


def test_tokens_are_sent_to_their_experts_and_back():
    (layer,) = (work for work in analyze_transformer(MIXTURE).parts if work.part is ModelPart.LAYER)
    (sent,) = (exchange for exchange in layer.collectives if exchange.axis is Axis.EXPERT)
    assert (sent.kind, sent.forward_count, sent.backward_count) == (CollectiveKind.ALL_TO_ALL, 2, 2)
    assert sent.message_bytes == 32 * 48 * 2 * MIXED_PRECISION.compute_bytes


def test_a_tied_embedding_is_on_the_first_stage_and_on_the_last():
    tied = analyze_transformer(msgspec.structs.replace(SMALL, tied_embedding=True))
    parts = {t.path: t.parts for t in tied.tensors if t.role is TensorRole.PARAMETER}
    assert parts["embedding/tokens"] == (ModelPart.EMBEDDING, ModelPart.HEAD)
    assert "head/kernel" not in parts


def test_half_the_bytes_of_an_element_are_half_the_bytes_of_activations():
    half, single = (
        analyze_transformer(SMALL, precision=MIXED_PRECISION),
        analyze_transformer(SMALL, precision=Precision(compute_bytes=4)),
    )
    for one, other in zip(half.parts, single.parts, strict=True):
        assert 2 * one.input_bytes == other.input_bytes
        assert 2 * one.residual_bytes.tensor == other.residual_bytes.tensor
    assert half.parameter_bytes == single.parameter_bytes


@pytest.mark.parametrize(
    "module", [tensor_partition, transformer, transformer_cost], ids=lambda module: module.__name__
)
def test_the_examples_in_the_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
