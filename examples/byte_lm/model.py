"""A decoder-only transformer over bytes, in Flax NNX.

Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762), with the normalization before each part
(Xiong et al. 2020, https://arxiv.org/abs/2002.04745). D is the width, H the heads, T the context.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from byte_lm.settings import ModelSettings

VOCABULARY = 256
"""One token for each value of a byte: no tokenizer."""

EMBEDDING_STDDEV = 0.02
"""Small, so that the first logits are near zero and the first loss near ln 256 (GPT-2's choice)."""


class Attention(nnx.Module):
    """Causal self-attention with H heads."""

    def __init__(self, settings: ModelSettings, rngs: nnx.Rngs) -> None:
        self.heads = settings.heads
        self.query_key_value = nnx.Linear(settings.width, 3 * settings.width, use_bias=False, rngs=rngs)
        self.output = nnx.Linear(settings.width, settings.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return float32[batch, T, D] of the same: softmax(Q K^T / sqrt(D / H), causal) V."""
        batch, length, width = x.shape
        parts = self.query_key_value(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = jnp.moveaxis(parts, 2, 0)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.reshape(batch, length, width))


class Block(nnx.Module):
    """Attention, then a two-layer network of four times the width; each with a residual connection."""

    def __init__(self, settings: ModelSettings, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(settings.width, rngs=rngs)
        self.attention = Attention(settings, rngs)
        self.expand_norm = nnx.RMSNorm(settings.width, rngs=rngs)
        self.expand = nnx.Linear(settings.width, 4 * settings.width, rngs=rngs)
        self.contract = nnx.Linear(4 * settings.width, settings.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return float32[batch, T, D] of the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(jax.nn.gelu(self.expand(self.expand_norm(x))))


class ByteLM(nnx.Module):
    """Predicts each next byte from the previous ones; input and output share one embedding."""

    def __init__(self, settings: ModelSettings, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(EMBEDDING_STDDEV)
        self.bytes = nnx.Embed(VOCABULARY, settings.width, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(settings.context, settings.width, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(settings, rngs) for _ in range(settings.layers)])
        self.norm = nnx.RMSNorm(settings.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return logits float32[batch, T, 256] of int[batch, T]."""
        x = self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.bytes.attend(self.norm(x))
