"""The same small decoder as NNX, Linen and scanned models: tied embeddings, a mask from the data, dropout."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from resilient_jax.blocks.layer_marks import mark_layers

LAYERS, WIDTH, ROWS, TOKENS, VOCABULARY, DROPOUT = 3, 16, 2, 8, 24, 0.25


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model as `cut_model` takes it: `loss(variables, batch, key)`; `plain` is the same without marks."""

    loss: Callable[..., Any]
    plain: Callable[..., Any]
    variables: Any


def make_batch(seed=0):
    drawn = np.random.default_rng(seed).integers(0, VOCABULARY, (2, ROWS, TOKENS), np.int32)
    return {"x": drawn[0], "y": drawn[1]}


def __getattr__(name: str) -> Any:
    """Make `KEY`, a random key, when a test asks for it: a process that forks others may import this, not have it."""
    if name == "KEY":
        return jax.random.key(7)
    raise AttributeError(name)


def cross_entropy(logits, batch):
    logits = logits.astype(jnp.float32)
    right = jnp.take_along_axis(logits, batch["y"][..., None], -1)[..., 0]
    loss = jnp.mean(jax.nn.logsumexp(logits, -1) - right)
    return loss, {"accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["y"]), "spread": jnp.std(logits)}


def make_mask(tokens):
    return jnp.tril(jnp.ones((TOKENS, TOKENS), bool)) & (tokens != 0)[:, None]


def attend(mask, q, k, v):
    scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", q, k) * WIDTH**-0.5, -1e9)
    return jax.nn.softmax(scores, -1) @ v


class NnxLayer(nnx.Module):
    def __init__(self, dtype, rngs):
        self.norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, dtype=dtype, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.dropout(attend(mask, *jnp.split(self.qkv(self.norm(x)), 3, -1)))
        return x + nnx.gelu(self.mlp(x))


class NnxDecoder(nnx.Module):
    def __init__(self, dtype, rngs):
        self.table = nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([NnxLayer(dtype, rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        mask, x = make_mask(tokens), self.table(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.table.attend(x)


def draw_variables(shapes):
    """Return initial values of variables. They are drawn by numpy: JAX would compile dozens of programs to do it."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if name in ("scale", "bias"):
            return np.full(leaf.shape, name == "scale", leaf.dtype)
        inputs = leaf.shape[-1] if name == "embedding" else leaf.shape[-2]
        return (rng.standard_normal(leaf.shape) * inputs**-0.5).astype(leaf.dtype)

    return jax.device_put(jax.tree_util.tree_map_with_path(draw, shapes))


def make_nnx(dtype=jnp.float32):
    abstract = nnx.eval_shape(lambda: NnxDecoder(dtype, nnx.Rngs(0)))
    graph, params, streams = nnx.split(abstract, nnx.Param, nnx.RngState)

    def rekey(key):
        leaves, treedef = jax.tree.flatten(nnx.to_pure_dict(streams))
        fresh = [
            jax.random.fold_in(key, number)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jnp.zeros(leaf.shape, leaf.dtype)
            for number, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(treedef, fresh)

    def plain(params, batch, key, change=lambda net: net):
        return cross_entropy(change(nnx.merge(graph, params, rekey(key)))(batch["x"]), batch)

    return Decoder(
        lambda p, b, k: plain(p, b, k, mark_layers), plain, draw_variables(nnx.to_pure_dict(params))
    )


class LinenLayer(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x, mask):
        qkv = nn.Dense(3 * WIDTH, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        a = attend(mask, *jnp.split(qkv, 3, -1))
        x = x + nn.Dropout(DROPOUT, deterministic=False)(a)
        return x + nn.gelu(nn.Dense(WIDTH, dtype=self.dtype)(x))


class LinenDecoder(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        table, mask = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype), make_mask(tokens)
        x = table(tokens)
        for number in range(LAYERS):
            x = LinenLayer(self.dtype, name=f"layer_{number}")(x, mask)
        return table.attend(x)


class ScannedDecoder(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        table, mask = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype), make_mask(tokens)
        layers = nn.scan(
            lambda layer, x, mask: (layer(x, mask), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType] - as Flax documents it
            length=LAYERS,
        )
        x, _ = layers(LinenLayer(self.dtype, name="layers"), table(tokens), mask)
        return table.attend(x)


def make_linen(dtype=jnp.float32, kind: type[Any] = LinenDecoder):
    model = kind(dtype)
    shapes = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)), make_batch()["x"])
    variables = draw_variables(shapes)

    def plain(variables, batch, key):
        return cross_entropy(model.apply(variables, batch["x"], rngs={"dropout": key}), batch)

    return Decoder(plain, plain, variables)


def make_scanned(dtype=jnp.float32):
    return make_linen(dtype, ScannedDecoder)


MAKERS = {"nnx": make_nnx, "linen": make_linen, "scan": make_scanned}
