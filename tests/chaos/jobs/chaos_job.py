"""A tiny job for campaigns of `python tests/chaos`: starts in seconds, with bit-identical weights under failures.

    python tests/chaos --campaign process -- tests/chaos/jobs/chaos_job.py
    python tests/chaos --campaign snapshots -- tests/chaos/jobs/chaos_job.py --state sharded

The job trains up to the step in the file that RESILIENT_JAX_CHAOS_STOP_STEP names; without that file for `--steps`.
"""

import argparse
import functools
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj

SIZE, MICROBATCHES = 48, 12
RATE, DECAY, TINY = 0.01, 0.9, 1e-8
STOP_STEP_VARIABLE = "RESILIENT_JAX_CHAOS_STOP_STEP"
NEVER = 10**9
BRISK_STEPS, REST_S = 10, 0.3
"""While a host is away, the others rest so long after each step, but not after a generation's first ones: the hosts of
a campaign share a machine, and steps that nothing waits for would take most of it from the workers that come back."""

Arrays = dict[str, jax.Array]
State = dict[str, Any]
Total = tuple[jax.Array, Arrays]


def read_end(default: int) -> int:
    """Return the step at which to stop; the file is written many steps ahead, so all hosts stop at the same step."""
    path = os.environ.get(STOP_STEP_VARIABLE)
    if path is None:
        return default
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return default


def init_state() -> State:
    """Return the initial parameters and optimizer state."""
    random = np.random.default_rng(0)
    params = {name: jnp.asarray(random.standard_normal((SIZE, SIZE), np.float32)) for name in "ab"}
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mean": zeros, "square": zeros, "count": jnp.zeros((), jnp.int32)}


def draw(num_rows: int, step: int, index: int) -> np.ndarray:
    """Return the rows of a microbatch."""
    return np.random.default_rng((step, index)).standard_normal((num_rows, SIZE), np.float32)


def loss_of(params: Arrays, rows: jax.Array) -> jax.Array:
    """Return the loss of a microbatch, whose target is each row shifted by one."""
    return jnp.mean((jnp.tanh(rows @ params["a"]) @ params["b"] - jnp.roll(rows, 1, axis=1)) ** 2)


@jax.jit
def differentiate(params: Arrays, rows: jax.Array) -> Total:
    """Return the loss and the gradient of one microbatch."""
    return jax.value_and_grad(loss_of)(params, rows)


@jax.jit
def update(state: State, gradients: Arrays) -> State:
    """Return the next state, by RMSProp with momentum: element-wise, so the result does not depend on the sharding."""
    gradients = jax.tree.map(lambda g: g / MICROBATCHES, gradients)
    mean = jax.tree.map(lambda m, g: DECAY * m + (1 - DECAY) * g, state["mean"], gradients)
    square = jax.tree.map(lambda s, g: DECAY * s + (1 - DECAY) * g * g, state["square"], gradients)
    params = jax.tree.map(lambda p, m, s: p - RATE * m / jnp.sqrt(s + TINY), state["params"], mean, square)
    return {"params": params, "mean": mean, "square": square, "count": state["count"] + 1}


def train(world: rj.World, options: argparse.Namespace) -> None:
    """Train until the stop step or the end of this generation."""
    replicated = NamedSharding(world.local_mesh("data"), P())
    sharded = rj.ShardedState(world, init_state) if options.state == "sharded" else None
    state = sharded.restore_or_init() if sharded else world.restore_or_init(init_state, sharding=replicated)
    zeros = jax.device_put(
        (jnp.zeros(()), jax.tree.map(jnp.zeros_like, jax.eval_shape(init_state)["params"])), replicated
    )
    is_watched = world.host != "localhost"
    options.most_hosts = max(options.most_hosts, len(world.hosts))
    for count, step in enumerate(world.steps(options.steps)):
        if step >= read_end(options.steps):
            return
        params = sharded.gather(state["params"]) if sharded else state["params"]

        def compute(microbatch: rj.Microbatch, params: Arrays = params) -> Total:
            replica = microbatch.replica
            return differentiate(replica.to_replica(params), replica.place_batch(microbatch.batch))

        loss, gradients = world.accumulate_microbatches(
            MICROBATCHES,
            compute,
            zeros,
            data=options.draw,
            options=rj.AccumulationOptions(
                replica_shape=rj.ReplicaShape(per_host="devices" if options.each_device else 1)
            ),
        )
        state = sharded.update(update, state, gradients) if sharded else update(state, gradients)
        world.commit(state, loss=float(loss) / MICROBATCHES)
        if sharded or options.snapshots:
            world.snapshot(state)
        if is_watched:
            is_away = len(world.hosts) < options.most_hosts
            time.sleep(REST_S if is_away and count > BRISK_STEPS else options.pace)


def main() -> None:
    """Parse the command line and run the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=NEVER)
    parser.add_argument("--state", choices=("replicated", "sharded"), default="replicated")
    parser.add_argument("--snapshots", action="store_true", help="take snapshots of a replicated state, too")
    parser.add_argument(
        "--each-device", action="store_true", help="each device computes microbatches of its own"
    )
    parser.add_argument("--rows", type=int, default=8, help="examples of a microbatch")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of rest after each step")
    options = parser.parse_args(namespace=argparse.Namespace(most_hosts=0))
    options.draw = functools.partial(draw, options.rows)
    rj.run(lambda world: train(world, options))


if __name__ == "__main__":
    main()
