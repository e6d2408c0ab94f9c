"""A loop of one's own whose state is in shards on the hosts of each replica. Usage: mesh_loop.py DIR [key=value]...

Keys: hosts (of a replica), axes (such as fsdp:4/tensor:2). With the word `general` sums are made by
`accumulate_microbatches`, else by `value_and_grad`. With the word `snapshots` hosts take some. The harness writes
`stop` to DIR: the step at which all hosts stop, written well ahead. After every step each process appends a line to
`steps-<host>-<pid>.jsonl`: the step, digests of the boxes of the state that are here, and their bytes.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from no_comparisons import refuse_comparisons

import resilient_jax as rj

WORK = Path(sys.argv[1])
OPTIONS = dict(word.split("=") for word in sys.argv[2:] if "=" in word)
HOSTS = int(OPTIONS.get("hosts", "2"))
AXES = tuple(
    (name, int(size)) for name, size in (part.split(":") for part in OPTIONS.get("axes", "fsdp:4").split("/"))
)
MICROBATCHES = 6
NEVER = 10**9
PACE_S = float(OPTIONS.get("pace", 0.1))
"""Pause per step: all hosts of a test share two cores."""
ROWS, WIDTH = 8, 64
RATE = np.float32(0.05)
SHAPE = rj.ReplicaShape(hosts=HOSTS, axes=AXES)
ON_REPLICAS = rj.AccumulationOptions(replica_shape=SHAPE)
NAMES = [name for name, _ in AXES]
SPECS = {
    "first": P(NAMES[0], NAMES[-1] if len(NAMES) > 1 else None),
    "second": P(NAMES[-1], NAMES[0] if len(NAMES) > 1 else None),
    "bias": P(NAMES[0]),
    "scale": P(),
}
SIZES = {"first": (WIDTH, WIDTH), "second": (WIDTH, WIDTH), "bias": (WIDTH,), "scale": ()}


def make_params() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: (random.normal(size=shape) / 8).astype(np.float32) for name, shape in SIZES.items()}


def loss_of(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["first"] + params["bias"])
    return jnp.mean((hidden @ params["second"] * (1 + params["scale"]) - x) ** 2)


def read(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).normal(size=(ROWS, WIDTH)).astype(np.float32)


@jax.jit
def update(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda value, gradient: value - RATE * gradient, params, gradients)


@jax.jit
def divide(sums: Any, count: Any) -> Any:
    return jax.tree.map(lambda total: total / count, sums)


def step_to_stop() -> int:
    try:
        return int((WORK / "stop").read_text())
    except (OSError, ValueError):
        return NEVER


def describe(state: dict[str, jax.Array]) -> dict[str, str]:
    """Return a digest of each box that this host has."""
    return {
        f"{name} {shard.index}": hashlib.blake2b(np.asarray(shard.data).tobytes(), digest_size=8).hexdigest()
        for name, leaf in state.items()
        for shard in leaf.addressable_shards
    }


Gradients = Callable[[dict[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]]
"""From the state to loss and gradients, of which a host that is left over has nothing."""


def sum_generally(world: rj.World, shardings: dict[str, NamedSharding]) -> Gradients:
    """Return the same as `World.value_and_grad`, by what that is made of."""
    zeros = (
        jax.device_put(np.zeros((), np.float32), NamedSharding(world.local_mesh(), P())),
        {name: put(shardings[name], np.zeros(shape, np.float32)) for name, shape in SIZES.items()},
    )
    programs: dict[Any, Any] = {}

    def differentiate(state: dict[str, jax.Array]) -> Any:
        def compute(microbatch: rj.Microbatch) -> Any:
            replica = microbatch.replica
            if replica not in programs:
                where = {name: NamedSharding(replica.mesh, spec) for name, spec in SPECS.items()}
                programs[replica] = jax.jit(
                    jax.value_and_grad(loss_of), out_shardings=(NamedSharding(replica.mesh, P()), where)
                )
            return programs[replica](replica.to_replica(state), replica.place_batch(microbatch.batch))

        total, sums = world.accumulate_microbatches(
            MICROBATCHES, compute, zeros, data=read, options=ON_REPLICAS
        )
        count = np.float32(MICROBATCHES)
        return total / count, divide(sums, count) if sums["first"].addressable_shards else sums

    return differentiate


def put(sharding: NamedSharding, value: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index], dtype=value.dtype)


def train(world: rj.World) -> None:
    mesh = world.mesh(SHAPE)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}

    def place(path: str, leaf: Any) -> NamedSharding:
        return next(sharding for name, sharding in shardings.items() if name in path)

    def init() -> dict[str, jax.Array]:
        return {name: put(shardings[name], value) for name, value in make_params().items()}

    state = world.restore_or_init(init, sharding=place)
    differentiate = (
        sum_generally(world, shardings)
        if "general" in sys.argv
        else world.value_and_grad(loss_of, read, MICROBATCHES, options=ON_REPLICAS)
    )
    for step in world.steps(NEVER):
        if step >= step_to_stop():
            return
        loss, gradients = differentiate(state)
        if mesh.local_devices:  # else this host is left over, and has nothing of the state
            state = update(state, gradients)
        world.commit(state, loss=float(loss))
        if "snapshots" in sys.argv:
            world.snapshot(state)
        whole = sum(leaf.nbytes for leaf in state.values())
        here = sum(shard.data.nbytes for leaf in state.values() for shard in leaf.addressable_shards)
        with (WORK / f"steps-{world.host}-{os.getpid()}.jsonl").open("a") as file:
            row = {"step": step, "digests": describe(state), "bytes": here, "whole_bytes": whole}
            print(json.dumps(row), file=file)
        time.sleep(PACE_S)


if __name__ == "__main__":
    refuse_comparisons()
    rj.run(train)
