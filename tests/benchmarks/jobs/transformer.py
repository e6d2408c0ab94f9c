"""The model that the benchmarks train: a transformer of about 10 million float32 parameters with Adam.

The module imports nothing of this package, so that a bare JAX program has no cost of ours.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY = 320, 8, 8, 64, 256
MICROBATCHES = 16
"""Microbatches of one sequence each, over all hosts: 16 sequences of 64 bytes per step on any number of hosts."""
OPTIMIZER = optax.adam(1e-4)

Params: TypeAlias = Any  # a tree of arrays


def init_params(width: int = WIDTH, layers: int = LAYERS) -> Params:
    keys = iter(jax.random.split(jax.random.key(0), 6 * layers + 2))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    blocks = [
        {
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width),
        }
        for _ in range(layers)
    ]
    return {"embedding": matrix(VOCABULARY, width), "layers": blocks, "head": matrix(width, VOCABULARY)}


def init_state() -> tuple[Params, optax.OptState]:
    params = init_params()
    return params, OPTIMIZER.init(params)


def normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def attend(x: jax.Array, layer: Params) -> jax.Array:
    batch, length, width = x.shape
    q, k, v = jnp.split((x @ layer["qkv"]).reshape(batch, length, HEADS, -1), 3, axis=-1)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(batch, length, width) @ layer["out"]


def loss_of(params: Params, tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens[:, :-1]]
    for layer in params["layers"]:
        x = x + attend(normalize(x), layer)
        x = x + jax.nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]
    logits = normalize(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@jax.jit
def accumulate(
    total: tuple[jax.Array, Params], params: Params, tokens: jax.Array
) -> tuple[jax.Array, Params]:
    return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, tokens))


@jax.jit
def differentiate(params: Params, tokens: jax.Array) -> tuple[jax.Array, Params]:
    return jax.value_and_grad(loss_of)(params, tokens)


@jax.jit
def apply(state: tuple[Params, optax.OptState], gradients: Params) -> tuple[Params, optax.OptState]:
    params, optimizer = state
    updates, optimizer = OPTIMIZER.update(jax.tree.map(lambda g: g / MICROBATCHES, gradients), optimizer)
    return optax.apply_updates(params, updates), optimizer


def tokens_of(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).integers(0, VOCABULARY, (1, CONTEXT + 1), np.int32)


def zeros_like(params: Params) -> tuple[jax.Array, Params]:
    """Return zeros committed to the device, as later sums are; otherwise `accumulate` would compile twice."""
    return jax.device_put((jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), jax.local_devices()[0])
