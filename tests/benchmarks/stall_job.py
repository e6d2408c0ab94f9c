"""The job of the stall benchmark: a transformer of about 10 million float32 parameters with Adam.

The same model, batch and update in two loops, so that the overhead of ours can be told:
    stall_job.py ours STEPS OUT      a loop on `world`, started by `resilient-jax launch`
    stall_job.py bare STEPS OUT      a plain multi-process JAX loop: `jax.distributed.initialize`, no framework
Each process writes its step times in seconds to OUT-<process>.json at the end, and OUT may hold `stop`.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj

WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY = 320, 8, 8, 64, 256
MICROBATCHES = 16
"""Of one sequence each, shared by the hosts: 16 sequences of 64 bytes a step, whoever is alive."""
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
def apply(state: tuple[Params, optax.OptState], gradients: Params) -> tuple[Params, optax.OptState]:
    params, optimizer = state
    updates, optimizer = OPTIMIZER.update(jax.tree.map(lambda g: g / MICROBATCHES, gradients), optimizer)
    return optax.apply_updates(params, updates), optimizer


def tokens_of(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).integers(0, VOCABULARY, (1, CONTEXT + 1), np.int32)


def zeros_like(params: Params) -> tuple[jax.Array, Params]:
    """Committed to the device, like the sums that follow: else `accumulate` is compiled twice."""
    return jax.device_put((jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), jax.local_devices()[0])


def train_ours(world: rj.World, steps: int, times: list[float]) -> None:
    state = world.restore_or_init(init_state)
    zeros = zeros_like(state[0])
    began_s = time.monotonic()
    for _ in world.steps(steps):

        def add(total: Params, microbatch: rj.Microbatch, params: Params = state[0]) -> Params:
            return accumulate(total, params, tokens_of(microbatch.step, microbatch.index))

        loss, gradients = world.sum_microbatches(MICROBATCHES, add, zeros, reproducible=False)
        state = apply(state, gradients)
        world.commit(state, loss=float(loss) / MICROBATCHES)
        times.append(time.monotonic() - began_s)
        began_s = time.monotonic()


def train_bare(steps: int, times: list[float]) -> None:
    """What one writes without a framework: the same programs, one all-reduce of the gradients."""
    count, index = jax.process_count(), jax.process_index()
    mesh = Mesh(np.array(jax.devices()), ("host",))
    stacked, summed = NamedSharding(mesh, P("host")), NamedSharding(mesh, P())

    @functools.partial(jax.jit, out_shardings=summed)
    def add_up(rows: Any) -> Any:
        return jax.tree.map(lambda x: x.sum(axis=0), rows)

    def reduce(tree: Any) -> Any:
        rows = jax.tree.map(
            lambda x: jax.make_array_from_single_device_arrays((count, *x.shape), stacked, [x[None]]), tree
        )
        return jax.tree.map(lambda x: x.addressable_data(0), add_up(rows))

    state = init_state()
    zeros = zeros_like(state[0])
    mine = range(index * MICROBATCHES // count, (index + 1) * MICROBATCHES // count)
    began_s = time.monotonic()
    for step in range(steps):
        total = zeros
        for microbatch in mine:
            total = accumulate(total, state[0], tokens_of(step, microbatch))
        loss, gradients = reduce(total)
        state = apply(state, gradients)
        jax.block_until_ready(state)
        float(loss)
        times.append(time.monotonic() - began_s)
        began_s = time.monotonic()


def connect_bare() -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        os.environ["BARE_COORDINATOR"], int(os.environ["BARE_COUNT"]), int(os.environ["BARE_INDEX"])
    )


def write_times(out: Path, times: list[float]) -> None:
    out.with_name(f"{out.name}-{os.getpid()}.json").write_text(json.dumps(times))


def main() -> None:
    mode, steps, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    times: list[float] = []
    if mode == "ours":
        rj.run(lambda world: train_ours(world, steps, times))
    else:
        connect_bare()
        train_bare(steps, times)
    write_times(out, times)


if __name__ == "__main__":
    main()
