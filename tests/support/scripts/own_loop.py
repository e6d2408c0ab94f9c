"""A hand-written loop of a tiny job, which saves checkpoints itself, and goes on from them.

Usage: own_loop.py WORK_DIR CHECKPOINTS_DIR [pace=0]. The job reads the order `stop` in WORK_DIR as tiny.py does, and
writes `steps-<host>-<pid>.jsonl`: a line per committed step, with the SHA-256 of the state.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import resilient_jax as rj

WORK, CHECKPOINTS = Path(sys.argv[1]), Path(sys.argv[2])
PACE_S = 0.0 if "pace=0" in sys.argv else 0.1
NEVER = 10**9
SAVE_STEPS = 5
MICROBATCHES, ROWS, SIZE = 6, 8, 16
OPTIMIZER = optax.adam(0.03)


class State(NamedTuple):
    """The training state."""

    params: optax.Params
    opt_state: optax.OptState


def stop_at() -> int:
    try:
        return int((WORK / "stop").read_text())
    except (OSError, ValueError):
        return NEVER


def init_state() -> State:
    matrix = jnp.zeros((SIZE, SIZE))
    return State(matrix, OPTIMIZER.init(matrix))


def draw(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).normal(size=(ROWS, SIZE)).astype(np.float32)


def compute_loss(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.mean((rows @ matrix - rows[:, ::-1]) ** 2)


@jax.jit
def apply(state: State, gradient: optax.Params) -> State:
    updates, opt_state = OPTIMIZER.update(gradient, state.opt_state)
    return State(optax.apply_updates(state.params, updates), opt_state)


def newest_step() -> int | None:
    return max((int(path.stem) for path in CHECKPOINTS.glob("*.npz")), default=None)


def save(state: State, step: int) -> None:
    """Write the leaves, and give the file its name when it is complete."""
    unfinished = CHECKPOINTS / "unfinished"
    with unfinished.open("wb") as file:
        np.savez(file, *map(np.asarray, jax.tree.leaves(state)))
    unfinished.rename(CHECKPOINTS / f"{step}.npz")


def load(state: State, step: int) -> State:
    with np.load(CHECKPOINTS / f"{step}.npz") as found:
        leaves = [jnp.asarray(found[name]) for name in found.files]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def digest(state: State) -> str:
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))).hexdigest()


def train(world: rj.World) -> None:
    state = world.restore_or_init(init_state)
    if world.is_fresh and (saved := newest_step()) is not None:
        state = load(state, saved)
        world.resume_at(saved)
    value_and_grad = world.value_and_grad(compute_loss, draw, MICROBATCHES)
    for step in world.steps(NEVER):
        if step >= stop_at():
            return
        loss, gradient = value_and_grad(state.params)
        state = apply(state, gradient)
        world.commit(state, loss=loss)
        if world.is_rehearsal:
            continue
        if (world.is_leaving or (step + 1) % SAVE_STEPS == 0) and world.host_index == 0:
            save(state, step + 1)
        line = {"step": step, "digest": digest(state), "generation": world.generation}
        with (WORK / f"steps-{world.host}-{os.getpid()}.jsonl").open("a") as log:
            print(json.dumps(line), file=log, flush=True)
        time.sleep(PACE_S)


if __name__ == "__main__":
    CHECKPOINTS.mkdir(exist_ok=True)
    rj.run(train, find_latest_checkpoint=newest_step)
