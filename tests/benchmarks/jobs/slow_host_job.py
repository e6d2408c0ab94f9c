"""A loop whose microbatches sleep: hosts that share a machine do not slow each other.

Usage: slow_host_job.py STEPS FOLDER SECONDS SLOW_HOST even|by_speed. On the slow host a microbatch takes twice as long.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import resilient_jax as rj
from tests.benchmarks.step_times import StepTimeWriter

STEPS, FOLDER, SECONDS, SLOW_HOST = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
OPTIONS = rj.AccumulationOptions(balance_by_speed=sys.argv[5] == "by_speed")
MICROBATCHES = 16


def train(world: rj.World) -> None:
    weights = world.restore_or_init(lambda: jnp.zeros(8))
    zeros = jnp.zeros(8)
    writer = StepTimeWriter(FOLDER)

    def compute(microbatch: rj.Microbatch) -> jax.Array:
        time.sleep(SECONDS * (2 if world.host == SLOW_HOST else 1))
        return jax.device_put(
            np.full(8, microbatch.index + 1, np.float32), microbatch.replica.mesh.devices[0]
        )

    for step in world.steps(STEPS):
        weights = weights + world.accumulate_microbatches(MICROBATCHES, compute, zeros, options=OPTIONS)
        world.commit(weights)
        if not world.is_rehearsal:
            writer.write(step, world.generation)


if __name__ == "__main__":
    rj.run(train)
