"""A loop of its own with a state in flat ranges. Usage: flat_state_job.py WORK_DIR [pace=SECONDS].

The job reads the order `stop` in WORK_DIR as tiny.py does. After every step each process appends a line to
`steps-<host>-<pid>.jsonl`: the step, the number of hosts, the bytes of the state on this host, those of the complete
state, and the SHA-256 of the complete state.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import resilient_jax as rj

WORK = Path(sys.argv[1])
PACE_S = next((float(word[5:]) for word in sys.argv[2:] if word.startswith("pace=")), 0.0)
NEVER, MICROBATCHES = 10**9, 8
WIDTH = 193
"""A prime: no number of devices divides a dim."""
OPTIMIZERS = {"adamw": optax.adamw(0.01), "lamb": optax.lamb(0.01)}
"""One that treats all arrays element by element, and one that needs their norms."""


def stop_at() -> int:
    try:
        return int((WORK / "stop").read_text())
    except (OSError, ValueError):
        return NEVER


class State(NamedTuple):
    params: Any
    opt_states: Any


def init_state() -> State:
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        name: {"kernel": jax.random.normal(key, (7, WIDTH)) / 3, "bias": jnp.zeros(WIDTH)}
        for name, key in zip(OPTIMIZERS, keys, strict=True)
    }
    return State(params, {name: OPTIMIZERS[name].init(leaves) for name, leaves in params.items()})


def update(state: State, gradients: Any) -> State:
    params, opt_states = {}, {}
    for name, optimizer in OPTIMIZERS.items():
        own = state.params[name]
        updates, opt_states[name] = optimizer.update(gradients[name], state.opt_states[name], own)
        params[name] = optax.apply_updates(own, updates)
    return State(params, opt_states)


def draw(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).standard_normal((4, 7), np.float32)


def loss_of(params: Any, rows: jax.Array) -> jax.Array:
    found = [jnp.tanh(rows @ own["kernel"] + own["bias"]) for own in params.values()]
    return jnp.stack([jnp.mean((one - rows.sum(1, keepdims=True)) ** 2) for one in found]).sum()


def digest(tree: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def count_bytes(state: Any) -> tuple[int, int]:
    """Return the bytes on this host, and of the complete state."""
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, rj.RaveledArray))
    arrays = [leaf.vector if isinstance(leaf, rj.RaveledArray) else leaf for leaf in leaves]
    here = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    return here, sum(leaf.nbytes for leaf in leaves)


def train(world: rj.World) -> None:
    sharded = rj.ShardedState(world, init_state)
    state = sharded.restore_or_init()
    value_and_grad = world.value_and_grad(loss_of, draw, MICROBATCHES)
    for step in world.steps(NEVER):
        if step >= stop_at():
            return
        _, gradients = value_and_grad(sharded.gather(state.params))
        state = sharded.update(update, state, gradients)
        world.commit(state)
        world.snapshot(state)
        here, whole = count_bytes(state)
        line = {"step": step, "generation": world.generation, "hosts": len(world.hosts), "here": here}
        line |= {"whole": whole, "digest": digest(sharded.gather(state))}
        with (WORK / f"steps-{world.host}-{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
        time.sleep(PACE_S)


if __name__ == "__main__":
    rj.run(train)
