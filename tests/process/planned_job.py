"""A tiny job whose trainer searches its plans: 12 microbatches of 2 rows, on hosts with two devices.

Arguments: the topology's file, steps, and "named" if the dims of parameters have names, so that tensor can cut them.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import resilient_jax as rj

WIDTH = 256


def make(key):
    keys = jax.random.split(key, 2)
    return {
        "up": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 16,
        "down": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 16,
    }


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] - batch) ** 2)


def draw(step, index):
    return np.random.default_rng((step, index)).normal(size=(2, WIDTH)).astype(np.float32)


if __name__ == "__main__":
    topology, steps, is_named = sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["named"]
    rules = [("up", ("embed", "mlp")), ("down", ("mlp", "embed"))] if is_named else []
    result = rj.Trainer(
        model=make,
        optimizer=optax.adam(1e-2),
        loss=loss,
        data=draw,
        batch_size=24,
        microbatch_size=2,
        planning=rj.Planning(topology=topology, naming=rj.Naming(rules=rules)),
    ).fit(steps)
    if result.host_index == 0:
        print(f"sha256 {result.sha256} loss {result.metrics['loss']:.6f}")
