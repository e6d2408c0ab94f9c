"""Fits a curve with a small Flax NNX network.

An ordinary script before, one that survives the loss of hosts after:

    diff examples/nnx_before.py examples/nnx_after.py
    resilient-jax launch --hosts 4 --devices-per-host 2 examples/nnx_after.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

STEPS = 100
BATCH = 64


class Net(nnx.Module):
    """Two dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(1, 32, rngs=rngs)
        self.output = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return float32[batch, 1] of float32[batch, 1]."""
        return self.output(jnp.tanh(self.hidden(x)))


def make_examples(count: int) -> list[dict[str, np.ndarray]]:
    """Return points of a sine."""
    x = np.linspace(-3, 3, count, dtype=np.float32)
    return [{"x": x[i : i + 1], "y": np.sin(x[i : i + 1])} for i in range(count)]


def mse(model: Net, batch: dict[str, Any]) -> jax.Array:
    """Return the mean squared error."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer, batch: dict[str, Any]) -> jax.Array:
    """Update the model in place; return the loss before the update."""
    loss, gradients = nnx.value_and_grad(mse)(model, batch)
    optimizer.update(model, gradients)
    return loss


def main() -> None:
    """Train, and print the loss."""
    data = make_examples(1024)
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.01), wrt=nnx.Param)
    for step in range(STEPS):
        rows = np.random.default_rng(step).integers(len(data), size=BATCH)
        batch = {name: np.stack([data[row][name] for row in rows]) for name in ("x", "y")}
        loss = train_step(model, optimizer, batch)
        if step % 25 == 24:
            print(f"loss {loss:.6f} after {step + 1} steps")


if __name__ == "__main__":
    main()
