"""Fits a matrix with a hand-written training loop, in microbatches.

An ordinary script before, one that survives the loss of hosts after:

    diff examples/own_loop_before.py examples/own_loop_after.py
    resilient-jax launch --hosts 4 --devices-per-host 2 examples/own_loop_after.py
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS = 100
MICROBATCHES = 8
ROWS = 16
SIZE = 12
OPTIMIZER = optax.adam(0.03)


class State(NamedTuple):
    """The training state."""

    params: optax.Params
    opt_state: optax.OptState


def init_state() -> State:
    """Return the state before step 0."""
    matrix = jnp.zeros((SIZE, SIZE))
    return State(matrix, OPTIMIZER.init(matrix))


def draw(step: int, index: int) -> np.ndarray:
    """Return float32[ROWS, SIZE]: microbatch `index` of a step, the same on every host."""
    return np.random.default_rng((step, index)).normal(size=(ROWS, SIZE)).astype(np.float32)


def compute_loss(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    """Return how far the matrix is from one that reverses rows."""
    return jnp.mean((rows @ matrix - rows[:, ::-1]) ** 2)


@jax.jit
def apply(state: State, gradient: optax.Params) -> State:
    """Return the next state."""
    updates, opt_state = OPTIMIZER.update(gradient, state.opt_state)
    return State(optax.apply_updates(state.params, updates), opt_state)


def train() -> None:
    """Train, and print the loss."""
    state = init_state()
    value_and_grad = jax.jit(jax.value_and_grad(compute_loss))
    for step in range(STEPS):
        found = [value_and_grad(state.params, draw(step, index)) for index in range(MICROBATCHES)]
        loss, gradient = jax.tree.map(lambda *parts: sum(parts) / MICROBATCHES, *found)
        state = apply(state, gradient)
        if step % 25 == 24:
            print(f"loss {loss:.6f} after {step + 1} steps")


if __name__ == "__main__":
    train()
