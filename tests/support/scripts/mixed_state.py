"""A hand-written loop whose state has leaves of many kinds, on whose types the bits of each step depend.

Usage: mixed_state.py WORK_DIR [pace=0]. The job reads the order `stop` in WORK_DIR as tiny.py does, and writes
`steps-<host>-<pid>.jsonl`: a line per committed step, with the kinds of all leaves and a digest of their bits; and
`restored-<host>-<pid>.jsonl`: the same of what a generation begins with, by the number of steps in it.
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

import resilient_jax as rj

WORK = Path(sys.argv[1])
PACE_S = 0.0 if "pace=0" in sys.argv else 0.1
NEVER = 10**9
MICROBATCHES, ROWS, SIZE = 6, 8, 16


def stop_at() -> int:
    try:
        return int((WORK / "stop").read_text())
    except (OSError, ValueError):
        return NEVER


def init_state() -> dict[str, Any]:
    return {
        "w": jnp.zeros((SIZE, SIZE), jnp.bfloat16),
        "step": 0,  # as flax's TrainState: a number, and an array after the first jitted step
        "scale": jnp.asarray(1.0),  # weakly typed, before and after each step
        "rate": 0.1,
        "best": np.float64(np.inf),
        "seen": np.zeros(SIZE, np.int64),
        "rounds": 2**40,
        "is_warm": False,
        "key": jax.random.key(0),
        "name": "sgd",
    }


def draw(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).normal(size=(ROWS, SIZE)).astype(np.float32)


def compute_loss(w: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.mean((rows @ w - rows[:, ::-1]) ** 2)


@jax.jit
def apply(w: jax.Array, gradient: jax.Array, key: jax.Array, step: Any, scale: Any, rate: Any) -> tuple:
    """Return the next (w, key, step, scale): of bfloat16, if and only if rate and scale are weakly typed."""
    key, now = jax.random.split(key)
    noise = jax.random.normal(now, w.shape, w.dtype)
    return w - rate * scale * (gradient + noise / 64), key, step + 1, jnp.where(step % 3 == 0, 0.5, 1.0)


def update(state: dict[str, Any], loss: float, gradient: jax.Array) -> dict[str, Any]:
    names = ("w", "key", "step", "scale")
    found = apply(state["w"], gradient, state["key"], state["step"], state["scale"], state["rate"])
    state["seen"][int(found[2]) % SIZE] += 2**33  # in place: what was committed must not change
    return state | dict(zip(names, found, strict=True)) | {
        "rate": state["rate"] * 0.999,
        "best": np.minimum(state["best"], np.float64(loss)),
        "rounds": state["rounds"] + 1,
        "is_warm": state["rounds"] % 2 == 0,
    }  # fmt: skip


def describe(state: dict[str, Any]) -> dict[str, Any]:
    kinds, digest = {}, hashlib.sha256()
    for name, leaf in sorted(state.items()):
        weak = " weak" if getattr(leaf, "weak_type", False) else ""
        kinds[name] = f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}{weak}"
        data = jax.random.key_data(leaf) if name == "key" else leaf
        digest.update(np.asarray(data).tobytes())
    return {"kinds": kinds, "digest": digest.hexdigest()}


def write(world: rj.World, name: str, line: dict[str, Any]) -> None:
    with (WORK / f"{name}-{world.host}-{os.getpid()}.jsonl").open("a") as log:
        print(json.dumps(line), file=log, flush=True)


def train(world: rj.World) -> None:
    state = world.restore_or_init(init_state)
    value_and_grad = world.value_and_grad(compute_loss, draw, MICROBATCHES)
    is_begun = world.is_rehearsal
    for step in world.steps(NEVER):
        if not is_begun:
            is_begun = True
            write(world, "restored", {"step": step, "generation": world.generation, **describe(state)})
        if step >= stop_at():
            return
        loss, gradient = value_and_grad(state["w"])
        state = update(state, float(loss), gradient)
        world.commit(state, loss=loss)
        if world.is_rehearsal:
            continue
        write(world, "steps", {"step": step, "generation": world.generation, **describe(state)})
        time.sleep(PACE_S)


if __name__ == "__main__":
    rj.run(train)
