"""A tiny job whose state is sharded over all hosts, so that a lost host's shards are restored from snapshots.

Usage: sharded.py WORK_DIR [pace=SECONDS]. The job reads the order `stop` in WORK_DIR as tiny.py does, and writes
`steps-<host>-<pid>.jsonl`: a line per committed step, with the SHA-256 of the complete weights and optimizer state.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from resilient_jax.sharding.placements import fully_sharded
from resilient_jax.step.resharding import replicate_tree, shard_tree

WORK = Path(sys.argv[1])
WORDS = dict(word.split("=") for word in sys.argv[2:] if "=" in word)
SIZE, MICROBATCHES, ROWS = 48, 12, 8
NEVER = 10**9
PACE_S = float(WORDS.get("pace", 0.1))
BRISK_STEPS, REST_S = 10, 0.3
ALL_HOSTS = int(os.environ.get("TINY_JOB_HOSTS", 0))
"""As in tiny.py: what hosts rest while others are away is processor time for those that come back."""
RATE, DECAY, TINY = 0.01, 0.9, 1e-8

State = dict[str, Any]


def stop_at() -> int:
    try:
        return int((WORK / "stop").read_text())
    except (OSError, ValueError):
        return NEVER


def init_state() -> State:
    keys = jax.random.split(jax.random.key(0), 2)
    params = {name: jax.random.normal(key, (SIZE, SIZE)) for name, key in zip("ab", keys, strict=True)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mean": zeros, "square": zeros, "count": 0}


def loss_of(params: Any, rows: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(rows @ params["a"]) @ params["b"] - jnp.roll(rows, 1, axis=1)) ** 2)


@jax.jit
def differentiate(params: Any, rows: jax.Array) -> Any:
    return jax.value_and_grad(loss_of)(params, rows)


@jax.jit
def update(state: State, gradients: Any) -> State:
    """Return the state after a step of RMSProp with momentum: elementwise, so that sharding changes no bit."""
    gradients = jax.tree.map(lambda g: g / MICROBATCHES, gradients)
    mean = jax.tree.map(lambda m, g: DECAY * m + (1 - DECAY) * g, state["mean"], gradients)
    square = jax.tree.map(lambda s, g: DECAY * s + (1 - DECAY) * g * g, state["square"], gradients)
    params = jax.tree.map(lambda p, m, s: p - RATE * m / jnp.sqrt(s + TINY), state["params"], mean, square)
    return {"params": params, "mean": mean, "square": square, "count": state["count"] + 1}


def digest(tree: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def train(world: rj.World) -> None:
    rule = fully_sharded(world.mesh({"hosts": len(world.hosts), "local": -1}))
    whole = NamedSharding(world.local_mesh("data"), P())
    state = world.restore_or_init(init_state, sharding=rule)
    # A Python number that was placed: over all hosts, before step 0 and after each failure.
    assert state["count"].weak_type
    zeros = jax.device_put(
        (jnp.zeros(()), jax.tree.map(jnp.zeros_like, jax.eval_shape(init_state)["params"])), whole
    )
    restored = digest(replicate_tree(state, whole))
    with (WORK / f"steps-{world.host}-{os.getpid()}.jsonl").open("a") as log:

        def say(step: int, digest: str, **more: Any) -> None:
            line = {"step": step, "digest": digest, "generation": world.generation, **more}
            print(json.dumps(line), file=log, flush=True)

        for count, step in enumerate(world.steps(NEVER)):
            if step >= stop_at():
                np.savez(
                    WORK / f"final-{world.host}.npz",
                    *map(np.asarray, jax.tree.leaves(replicate_tree(state, whole))),
                )
                return
            if restored:
                say(step - 1, restored, restored=True)
                restored = ""
            params = replicate_tree(state["params"], whole)

            def compute(microbatch: rj.Microbatch, params: Any = params) -> Any:
                key = (microbatch.step, microbatch.index)
                rows = np.random.default_rng(key).standard_normal((ROWS, SIZE), np.float32)
                replica = microbatch.replica
                return differentiate(replica.to_replica(params), replica.place_batch(rows))

            _, gradients = world.accumulate_microbatches(MICROBATCHES, compute, zeros)
            state = update(state, shard_tree(gradients, rule))
            world.commit(state)
            world.snapshot(state)
            shares = [s.data.nbytes for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards]
            say(step, digest(replicate_tree(state, whole)), restored=False, bytes_here=sum(shares))
            time.sleep(REST_S if count > BRISK_STEPS and len(world.hosts) < ALL_HOSTS else PACE_S)


if __name__ == "__main__":
    rj.run(train)
