"""A job of which one host, the last, has another state: differing.py FAULT.

init: from the start. flip: after step 5, in the first process of that host. rate: its updates are larger.
model: its arrays have another shape. data: it reads other data.
"""

import functools
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import resilient_jax as rj

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


rj.run(train)
