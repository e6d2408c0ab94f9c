"""Times microbatches of the example's model on packed documents, with attention that skips other documents.

    packed_lm.py STEPS TIMES.json

The lengths of documents vary widely, and attention computes the blocks of keys that a query's document reaches, so what
a microbatch takes does depend on the lengths. Writes a list of `WorkSample`.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from byte_lm.model import Attention, ByteLM
from byte_lm.settings import ModelSettings
from byte_lm.text import read_standard_library
from flax import nnx

import resilient_jax as rj
from resilient_jax.health.duration_model import WorkSample

SETTINGS = ModelSettings(width=64, layers=2, heads=4, context=2048)
BLOCK = 256
"""Queries, and keys, whose products are computed at once, or not at all."""
SHORTEST, LONGEST = 24, SETTINGS.context
NUM_DOCUMENTS = 3000
COMPILING_STEPS = 2
NEVER = -1e30


class DocumentAttention(Attention):
    """Attention of each token to earlier ones of its document."""

    def __call__(self, x: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Return float32[1, T, D] of the same, for one row with int32[T] segments."""
        assert segments is not None, "given by `loss`"
        length, width = x.shape[1:]
        parts = self.query_key_value(x)[0].reshape(length // BLOCK, BLOCK, 3, self.heads, width // self.heads)
        query, key, value = jnp.moveaxis(parts, 2, 0)
        mixed = _attend(query, key, value, segments.reshape(-1, BLOCK))
        return self.output(mixed.reshape(1, length, width))


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
    """Return [blocks, BLOCK, heads, d] of the same; `segments` is int32[blocks, BLOCK]."""
    numbers = jnp.arange(BLOCK)

    def attend_block(place: jax.Array) -> jax.Array:
        own = query[place] / jnp.sqrt(query.shape[-1])

        def add(carry, other):
            def compute(carry):
                largest, total, mixed = carry
                scores = jnp.einsum("qhd,khd->hqk", own, key[other])
                is_past = other * BLOCK + numbers[None] <= place * BLOCK + numbers[:, None]
                is_seen = is_past & (segments[place][:, None] == segments[other][None])
                scores = jnp.where(is_seen[None], scores, NEVER)
                new = jnp.maximum(largest, scores.max(-1))
                weights = jnp.where(is_seen[None], jnp.exp(scores - new[..., None]), 0.0)
                shrunk = jnp.exp(largest - new)
                added = jnp.einsum("hqk,khd->hqd", weights, value[other])
                return new, total * shrunk + weights.sum(-1), mixed * shrunk[..., None] + added

            # Segments are in order: a block reaches back to that of its first token's document.
            is_needed = (other <= place) & (segments[other][-1] >= segments[place][0])
            return jax.lax.cond(is_needed, compute, lambda carry: carry, carry), None

        heads, d = query.shape[2:]
        start = (
            jnp.full((heads, BLOCK), NEVER),
            jnp.zeros((heads, BLOCK)),
            jnp.zeros((heads, BLOCK, d)),
        )
        (_, total, mixed), _ = jax.lax.scan(jax.checkpoint(add), start, jnp.arange(len(query)))
        return jnp.moveaxis(mixed / total[..., None], 0, 1)

    # One after the other: side by side, both branches of `cond` would be computed.
    return jax.lax.map(attend_block, jnp.arange(len(query)))


def loss(model: ByteLM, batch: dict[str, jax.Array]) -> jax.Array:
    """Return the mean cross-entropy of each next byte of the same document, for rows of packed documents."""
    tokens, segments = batch["tokens"][0], batch["segments"][0]
    # Padding reaches no further back than its own block.
    segments = jnp.where(segments, segments, len(tokens) + jnp.arange(len(tokens)) // BLOCK)
    x = (model.bytes(tokens) + model.positions(batch["positions"][0]))[None]
    for block in model.blocks:
        assert isinstance(block.attention, DocumentAttention), "set by `main`"
        x = x + block.attention(block.attention_norm(x), segments)
        x = x + block.contract(jax.nn.gelu(block.expand(block.expand_norm(x))))
    logits = model.bytes.attend(model.norm(x))[0, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:])
    return jnp.mean(losses * ((segments[1:] == segments[:-1]) & (segments[1:] < len(tokens))))


def make_documents() -> rj.data.PackedDocuments:
    """Return documents of a code-like mix: most short, a heavy tail up to the context."""
    text = read_standard_library(2_000_000).astype(np.int32)
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(5.0, 1.4, NUM_DOCUMENTS), SHORTEST, LONGEST).astype(int)
    starts = random.integers(0, len(text) - LONGEST, NUM_DOCUMENTS)
    documents = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return rj.data.PackedDocuments(documents, context_length=SETTINGS.context)


def main(steps: int, path: Path) -> None:
    """Time so many microbatches of one row each."""
    model = ByteLM(SETTINGS, nnx.Rngs(0))
    for block in model.blocks:
        # The same parameters, with other products of them.
        block.attention.__class__ = DocumentAttention
    graph, params = nnx.split(model)

    @jax.jit
    def differentiate(params, batch):
        return jax.value_and_grad(lambda params: loss(nnx.merge(graph, params), batch))(params)

    documents = make_documents()
    samples: list[WorkSample] = []
    for step in range(COMPILING_STEPS + steps):
        row = step % len(documents)
        batch = jax.tree.map(lambda leaf: leaf[None], documents[row])
        lengths = documents.lengths(row).astype(float)
        began_s = time.monotonic()
        jax.block_until_ready(differentiate(params, batch))
        seconds = time.monotonic() - began_s
        if step >= COMPILING_STEPS:
            samples.append(
                WorkSample(tokens=float(lengths.sum()), squares=float((lengths**2).sum()), seconds=seconds)
            )
    path.write_bytes(msgspec.json.encode(samples))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
