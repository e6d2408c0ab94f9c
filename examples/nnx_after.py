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

import resilient_jax as rj

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


def main() -> None:
    """Train, and print the loss."""
    data = make_examples(1024)
    trainer = rj.Trainer(
        model=Net, optimizer=optax.adamw(0.01), loss_fn=mse, data=data, batch_size=BATCH, microbatch_size=8
    )
    result = trainer.fit(STEPS)
    if result.host_index == 0:
        print(f"loss {result.metrics['loss']:.6f} after {STEPS} steps")


if __name__ == "__main__":
    main()
