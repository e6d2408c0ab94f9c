"""A job of which one host, the last, has another state: differing.py FAULT.

init: from the start. flip: after step 5, in the first process of that host. rate: its updates are larger.
model: its arrays have another shape. data: it reads other data. drawn: its compute function does.
constant, path, direct: its loss has another constant, another operation; its compute function has another.
alike: it has not; that host dies and comes back. optimizer: the trainer's has another learning rate.
shards: the state is sharded over pairs of hosts, and the last flips a bit of its shard.
"""

import functools
import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from resilient_jax.protocol.worker_messages import WORKER_SETTINGS_VARIABLE

FAULT = sys.argv[1]
STEPS = 80
FLIP_STEP = 5
MARK = Path(os.environ["FLIPPED"])
"""Exists where this host has flipped its bit."""


def read(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).random(3)


def read_anything(step: int, index: int) -> np.ndarray:
    return np.random.default_rng().random(3)


def compute(size: int, microbatch: rj.Microbatch) -> jax.Array:
    return jnp.full(size, 0.1 * microbatch.index + microbatch.step)


def train_by_function(world: rj.World) -> None:
    """Train by a compute function that reads its data itself."""
    is_odd = world.host == f"host-{os.environ['ODD_HOST']}"
    draw = read_anything if is_odd and FAULT == "drawn" else read
    activation = jnp.sin if is_odd and FAULT == "direct" else jnp.tanh

    @jax.jit
    def add(w: jax.Array, rows: jax.Array) -> jax.Array:
        return w + activation(rows).sum(0)

    w = world.restore_or_init(lambda: jnp.zeros(3))
    zeros = jax.device_put(jnp.zeros(3), world.local_devices[0])
    for _ in world.steps(STEPS):

        def compute_rows(microbatch: rj.Microbatch, w: jax.Array = w) -> jax.Array:
            rows = np.stack([draw(microbatch.step, microbatch.index)] * 2)
            return add(microbatch.replica.to_replica(w), microbatch.replica.place_batch(rows))

        w = w - 0.01 * world.accumulate_microbatches(4, compute_rows, zeros)
        world.commit(w)
    print(f"{world.host} ended with {np.asarray(w).tobytes().hex()} after {STEPS}")


def train_by_loss(world: rj.World) -> None:
    is_odd = world.host == f"host-{os.environ['ODD_HOST']}"
    factor = 0.1 * (world.host_index if is_odd and FAULT == "constant" else 1)
    activation = jnp.sin if is_odd and FAULT == "path" else jnp.tanh

    def loss(params: dict[str, jax.Array], rows: jax.Array, key: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, jnp.int32(world.host_index))
        noise = jax.random.uniform(key)
        return factor * jnp.mean(activation(rows * params["w"] + noise) ** 2)

    params = world.restore_or_init(lambda: {"w": jnp.ones(3)})
    value_and_grad = world.value_and_grad(loss, lambda step, index: np.stack([read(step, index)] * 2), 4)
    steps = 0
    for step in world.steps(STEPS if FAULT != "alike" else 10**9):
        _, gradients = value_and_grad(params)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
        if FAULT == "alike" and is_odd and step == FLIP_STEP and not MARK.exists():
            MARK.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        world.commit(params)
        steps = step + 1
        if FAULT == "alike" and world.generation > 1 and len(world.hosts) == 3:
            break
    print(f"{world.host} ended with {np.asarray(params['w']).tobytes().hex()} after {steps}")


def train_with_trainer() -> None:
    host = json.loads(os.environ[WORKER_SETTINGS_VARIABLE])["host"]
    rate = 0.2 if host == f"host-{os.environ['ODD_HOST']}" else 0.1
    rj.Trainer(
        model=lambda key: {"w": jnp.ones(3)},
        optimizer=optax.sgd(rate),
        loss_fn=lambda params, rows: jnp.mean((rows @ params["w"]) ** 2),
        data=lambda step, index: np.stack([read(step, index)] * 2),
        batch_size=8,
        microbatch_size=2,
    ).fit(STEPS)


def train_shards(world: rj.World) -> None:
    """Train a state that is sharded over two halves of the hosts, of which each shard has two copies."""
    rule = NamedSharding(world.mesh({"copies": len(world.hosts) // 2, "shards": 2, "local": -1}), P("shards"))
    whole = NamedSharding(world.local_mesh("data"), P())
    w = world.restore_or_init(lambda: jnp.zeros(4), sharding=rule)
    zeros = jax.device_put(jnp.zeros(4), whole)
    for step in world.steps(STEPS):
        total = np.asarray(world.accumulate_microbatches(4, functools.partial(compute, 4), zeros))
        w = w + jax.make_array_from_callback((4,), rule, total.__getitem__)
        if step == FLIP_STEP and world.host == f"host-{os.environ['ODD_HOST']}":
            parts = [shard.data * 2.0 for shard in w.addressable_shards]
            w = jax.make_array_from_single_device_arrays(w.shape, rule, parts)
        world.commit(w)


def train(world: rj.World) -> None:
    is_odd = world.host == f"host-{os.environ['ODD_HOST']}"

    size = 4 if is_odd and FAULT == "model" else 3

    def init() -> dict[str, jax.Array]:
        return {"w": jnp.full(size, 1.0 if is_odd and FAULT == "init" else 0.0), "steps": jnp.int32(0)}

    state = world.restore_or_init(init)
    zeros = jax.device_put(jnp.zeros(size), world.local_devices[0])
    for step in world.steps(STEPS):
        rate = 0.02 if is_odd and FAULT == "rate" else 0.01
        w = state["w"] - rate * world.accumulate_microbatches(
            4,
            functools.partial(compute, size),
            zeros,
            data=read_anything if is_odd and FAULT == "data" else read,
        )
        if is_odd and FAULT == "flip" and step == FLIP_STEP and not MARK.exists():
            MARK.touch()
            w = w.at[1].multiply(2.0)  # a bit of the exponent
        state = {"w": w, "steps": state["steps"] + 1}
        world.commit(state)
    print(f"{world.host} ended with {np.asarray(state['w']).tobytes().hex()} after {state['steps']}")


FUNCTIONS = {
    **dict.fromkeys(("constant", "path", "alike"), train_by_loss),
    **dict.fromkeys(("drawn", "direct"), train_by_function),
    "shards": train_shards,
}
if FAULT == "optimizer":
    train_with_trainer()
else:
    rj.run(FUNCTIONS.get(FAULT, train))
