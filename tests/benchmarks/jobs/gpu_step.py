"""Times steps of a bfloat16 transformer on one GPU, in a process of its own: `gpu_step.py RESULT`.

Without this package: only the flags of XLA matter.
"""

import functools
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, LAYERS, HEADS, CONTEXT, BATCH, VOCABULARY = 1024, 12, 16, 1024, 16, 32_000
WARM_STEPS, WINDOWS, STEPS = 4, 4, 5
OPTIMIZER = optax.adamw(1e-4)


def init_params(key: jax.Array) -> Any:
    keys = iter(jax.random.split(key, 4 * LAYERS + 1))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * 0.02

    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    layers = [{name: matrix(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    return {"embedding": matrix(VOCABULARY, WIDTH), "layers": layers}


def normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6).astype(x.dtype)


def compute_loss(params: Any, tokens: jax.Array) -> jax.Array:
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    x = params["embedding"][tokens[:, :-1]]
    for layer in params["layers"]:
        q, k, v = (
            part.reshape(*x.shape[:2], HEADS, -1) for part in jnp.split(normalize(x) @ layer["qkv"], 3, -1)
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]
    logits = (normalize(x) @ params["embedding"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any]:
    updates, state = OPTIMIZER.update(jax.grad(compute_loss)(params, tokens), state, params)
    return optax.apply_updates(params, updates), state


def main() -> None:
    params = jax.jit(init_params)(jax.random.key(0))
    state = jax.jit(OPTIMIZER.init)(params)
    tokens = jax.random.randint(jax.random.key(1), (BATCH, CONTEXT + 1), 0, VOCABULARY)
    for _ in range(WARM_STEPS):
        params, state = step(params, state, tokens)
    steps_s: list[float] = []
    for _ in range(WINDOWS):
        jax.block_until_ready(params)
        began_s = time.perf_counter()
        for _ in range(STEPS):
            params, state = step(params, state, tokens)
        jax.block_until_ready(params)
        steps_s.append((time.perf_counter() - began_s) / STEPS)
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
    digest = hashlib.sha256(b"".join(leaves)).hexdigest()
    Path(sys.argv[1]).write_text(json.dumps({"steps_s": steps_s, "digest": digest}))


if __name__ == "__main__":
    main()
