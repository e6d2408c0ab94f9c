"""A tiny job whose trainer searches its plans: 12 microbatches of 2 rows, on hosts with two devices."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import resilient_jax as rj

WIDTH = 256


def make(key):
    keys = jax.random.split(key, 2)
    return {
        "up": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 16,
        "down": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 16,
    }


def loss(params, batch):
    # A bare PartitionSpec, as models on one mesh have them: here it is over the axes of the plan.
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(batch @ params["up"]), PartitionSpec(None, "tensor"))
    return jnp.mean((hidden @ params["down"] - batch) ** 2)


def draw(step, index):
    return np.random.default_rng((step, index)).normal(size=(2, WIDTH)).astype(np.float32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("topology")
    parser.add_argument("steps", type=int)
    parser.add_argument(
        "--named", action="store_true", help="the dims of parameters have names: tensor can cut them"
    )
    parser.add_argument("--checkpoints", help="folder for them; one every 5 steps")
    asked = parser.parse_args()
    rules = [("up", ("embed", "mlp")), ("down", ("mlp", "embed"))] if asked.named else []
    result = rj.Trainer(
        model=make,
        optimizer=optax.adam(1e-2),
        loss_fn=loss,
        data=draw,
        batch_size=24,
        microbatch_size=2,
        planner=rj.Planner(
            topology=asked.topology, logical_axis_rules=rj.LogicalAxisRules(names_by_path=rules)
        ),
        checkpoints=rj.Checkpoints(directory=asked.checkpoints, save_interval_steps=5)
        if asked.checkpoints
        else None,
    ).fit(asked.steps)
    if result.host_index == 0:
        print(f"sha256 {result.params_sha256} loss {result.metrics['loss']:.6f}")
