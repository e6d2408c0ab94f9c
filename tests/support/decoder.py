"""Decoder-only transformers of any `TransformerShape` (without experts): in NNX layer by layer, in Linen as a loop.

Plain JAX and Flax, written as users would; the planner's cost of a shape is compared with XLA's analysis of these.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.transformer import TransformerShape
from resilient_jax.planning.transformer_cost import analyze_transformer
from resilient_jax.planning.transformer_operations import AttentionKind
from resilient_jax.planning.transformer_parts import Precision

LLAMA = TransformerShape(
    layers=3,
    width=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    feed_forward=160,
    vocabulary_tokens=128,
    sequence_tokens=32,
)
"""The small shape that most tests use."""
EXAMPLES = 4

KERNEL = nnx.initializers.lecun_normal()
SMALL = nnx.initializers.normal(0.02)
LINEN_KERNEL = nn.initializers.lecun_normal()


def loss_of(model: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of each next token, the first being the next of the last."""
    logits = model(tokens).astype(jnp.float32)
    labels = jnp.roll(tokens, -1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def tokens(shape: TransformerShape, examples: int = EXAMPLES) -> jax.ShapeDtypeStruct:
    """Return an abstract batch of token sequences."""
    return jax.ShapeDtypeStruct((examples, shape.sequence_tokens), jnp.int32)


def closed_form(shape: TransformerShape) -> ProgramCost:
    """Return the closed-form cost of the decoder, in float32 and with the full square of attention."""
    return analyze_transformer(shape, precision=Precision(compute_bytes=4), attention=AttentionKind.SQUARE)


def rotate(x: jax.Array) -> jax.Array:
    """Apply rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864) of [batch, T, heads, head_dim]."""
    _, length, _, head_dim = x.shape
    frequencies = 10_000.0 ** (-jnp.arange(0, head_dim, 2) / head_dim)
    angles = jnp.arange(length)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, shape: TransformerShape, rngs: nnx.Rngs, dtype: Any):
        def linear(sizes_in, sizes_out, bias, *names):
            axis = (-2, -1) if isinstance(sizes_in, tuple) else -1
            init = nnx.with_partitioning(KERNEL, names)
            return nnx.LinearGeneral(
                sizes_in, sizes_out, axis=axis, use_bias=bias, dtype=dtype, kernel_init=init, rngs=rngs
            )

        heads, kv_heads = (shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim)
        bias = shape.biases != "none"
        self.query = linear(shape.width, heads, bias, "embed", "heads", "head_dim")
        self.key = linear(shape.width, kv_heads, bias, "embed", "kv_heads", "head_dim")
        self.value = linear(shape.width, kv_heads, bias, "embed", "kv_heads", "head_dim")
        self.output = linear(heads, shape.width, shape.biases == "all", "heads", "head_dim", "embed")
        self.rotary = shape.positions == "rotary"

    def __call__(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.rotary:
            query, key = rotate(query), rotate(key)
        return self.output(jax.nn.dot_product_attention(query, key, value, is_causal=True))


class FeedForward(nnx.Module):
    def __init__(self, shape: TransformerShape, rngs: nnx.Rngs, dtype: Any):
        def linear(size_in, size_out, *names):
            init = nnx.with_partitioning(KERNEL, names)
            bias = shape.biases == "all"
            return nnx.Linear(size_in, size_out, use_bias=bias, dtype=dtype, kernel_init=init, rngs=rngs)

        self.gate = linear(shape.width, shape.feed_forward, "embed", "mlp") if shape.gated else None
        self.up = linear(shape.width, shape.feed_forward, "embed", "mlp")
        self.down = linear(shape.feed_forward, shape.width, "mlp", "embed")

    def __call__(self, x):
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x)))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def make_norm(shape: TransformerShape, rngs: nnx.Rngs, dtype: Any):
    kind = nnx.RMSNorm if shape.norm == "rms" else nnx.LayerNorm
    init = nnx.with_partitioning(nnx.initializers.ones, ("embed",))
    return kind(shape.width, dtype=dtype, scale_init=init, rngs=rngs)


class Layer(nnx.Module):
    def __init__(self, shape: TransformerShape, rngs: nnx.Rngs, dtype: Any):
        self.attention_norm = make_norm(shape, rngs, dtype)
        self.attention = Attention(shape, rngs, dtype)
        self.feed_forward_norm = make_norm(shape, rngs, dtype)
        self.feed_forward = FeedForward(shape, rngs, dtype)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nnx.Module):
    """A decoder whose layers are modules of their own; parameters are named by `nnx.with_partitioning`."""

    def __init__(self, shape: TransformerShape, rngs: nnx.Rngs, dtype: Any = None, remat: bool = False):
        def embedding(rows, *names):
            init = nnx.with_partitioning(SMALL, names)
            return nnx.Embed(rows, shape.width, dtype=dtype, embedding_init=init, rngs=rngs)

        self.tokens = embedding(shape.vocabulary_tokens, "vocab", "embed")
        has_table = shape.positions == "table"
        self.positions = embedding(shape.sequence_tokens, "positions", "embed") if has_table else None
        self.layers = nnx.List([Layer(shape, rngs, dtype) for _ in range(shape.layers)])
        self.norm = make_norm(shape, rngs, dtype)
        init = nnx.with_partitioning(KERNEL, ("embed", "vocab"))
        self.head = (
            None
            if shape.tied_embedding
            else nnx.Linear(
                shape.width, shape.vocabulary_tokens, use_bias=False, dtype=dtype, kernel_init=init, rngs=rngs
            )
        )
        self.remat = remat

    def __call__(self, tokens):
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(jnp.arange(tokens.shape[1]))
        for layer in self.layers:
            x = nnx.remat(Layer.__call__)(layer, x) if self.remat else layer(x)
        x = self.norm(x)
        return self.tokens.attend(x) if self.head is None else self.head(x)


class LinenLayer(nn.Module):
    """The Linen layer of a gated, rotary shape without biases and with RMS norms."""

    shape: TransformerShape

    @nn.compact
    def __call__(self, x, _):
        def linear(name, size, axis, *names):
            init = nn.with_logical_partitioning(LINEN_KERNEL, names)
            return nn.DenseGeneral(size, axis=axis, use_bias=False, kernel_init=init, name=name)

        def norm(name):
            init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
            return nn.RMSNorm(scale_init=init, name=name)

        s = self.shape
        y = norm("attention_norm")(x)
        query = rotate(linear("query", (s.heads, s.head_dim), -1, "embed", "heads", "head_dim")(y))
        key = rotate(linear("key", (s.kv_heads, s.head_dim), -1, "embed", "kv_heads", "head_dim")(y))
        value = linear("value", (s.kv_heads, s.head_dim), -1, "embed", "kv_heads", "head_dim")(y)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + linear("output", s.width, (-2, -1), "heads", "head_dim", "embed")(mixed)
        y = norm("feed_forward_norm")(x)
        gate = linear("gate", s.feed_forward, -1, "embed", "mlp")(y)
        up = linear("up", s.feed_forward, -1, "embed", "mlp")(y)
        return x + linear("down", s.width, -1, "mlp", "embed")(jax.nn.silu(gate) * up), None


class LoopedDecoder(nn.Module):
    """A decoder as one loop over stacked parameters, which are named by `nn.with_logical_partitioning`."""

    shape: TransformerShape
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        s = self.shape
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        x = nn.Embed(s.vocabulary_tokens, s.width, embedding_init=init)(tokens)
        layer = nn.remat(LinenLayer, prevent_cse=False) if self.remat else LinenLayer
        stack = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=s.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = stack(s, name="layers")(x, None)
        init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        x = nn.RMSNorm(scale_init=init)(x)
        init = nn.with_logical_partitioning(LINEN_KERNEL, ("embed", "vocab"))
        return nn.Dense(s.vocabulary_tokens, use_bias=False, kernel_init=init)(x)
