"""A tiny job: it trains a small model on made-up data, for as long as the harness wants.

Usage: tiny.py WORK_DIR. In WORK_DIR it reads orders and writes what it did:
- `steps-<host>-<pid>.jsonl`: one line a committed step;
- `stop`: the number of the step at which everybody stops; written well ahead;
- `compile`: the number of a step in which everybody compiles something that takes a while; a host that begins
  to writes `compiling-<host>`.
"""

import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj

WORK = Path(sys.argv[1])
SIZE, MICROBATCHES, ROWS = 32, 12, 8
NEVER = 10**9
PACE_S = 0.02
"""Leaves processor time to workers that come back: all hosts of the test share two cores."""


def step_in(name: str) -> int:
    """The step that the harness wrote into a file; one that never comes if there is none."""
    try:
        return int((WORK / name).read_text())
    except (OSError, ValueError):
        return NEVER


def init_state() -> dict[str, jax.Array]:
    return {"weights": jnp.full((SIZE, SIZE), 0.01), "steps": jnp.zeros((), jnp.int32)}


def loss_of(weights: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(rows @ weights) - jnp.roll(rows, 1, axis=1)) ** 2)


def microbatch(step: int, index: int) -> jax.Array:
    return jax.random.normal(jax.random.key(step * MICROBATCHES + index), (ROWS, SIZE))


@jax.jit
def apply(state: dict[str, jax.Array], gradients: jax.Array) -> dict[str, jax.Array]:
    return {"weights": state["weights"] - 0.5 * gradients / MICROBATCHES, "steps": state["steps"] + 1}


def compile_for_long(step: int, host: str) -> None:
    """Compiles something that no cache has, for about two seconds."""
    (WORK / f"compiling-{host}").touch()

    def long(x: jax.Array) -> jax.Array:
        for turn in range(120):
            x = jnp.sin(x @ x.T + turn + step) @ x
        return x

    jax.jit(long).lower(jax.ShapeDtypeStruct((16, 16), jnp.float32)).compile()


def train(world: rj.World) -> None:
    local = world.local_mesh("data")
    cut = NamedSharding(local, P("data"))
    whole = NamedSharding(local, P())
    accumulate = jax.jit(jax.value_and_grad(loss_of), out_shardings=(whole, whole))
    state = world.restore_or_init(init_state, sharding=whole)
    log = (WORK / f"steps-{world.host}-{os.getpid()}.jsonl").open("a", buffering=1)
    for step in world.steps(NEVER):
        if step >= step_in("stop"):
            return
        if step == step_in("compile"):
            compile_for_long(step, world.host)
        total, gradients = jnp.zeros(()), jnp.zeros((SIZE, SIZE))
        for index in world.share(MICROBATCHES):
            loss, gradient = accumulate(state["weights"], jax.device_put(microbatch(step, index), cut))
            total, gradients = total + loss, gradients + gradient
        total, gradients = world.sum((total, gradients))
        state = apply(state, gradients)
        loss = float(total) / MICROBATCHES
        world.commit(state, loss=loss)
        time.sleep(PACE_S)
        log.write(json.dumps({"step": step, "loss": loss, "generation": world.generation}) + "\n")


if __name__ == "__main__":
    rj.run(train)
