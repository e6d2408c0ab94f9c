"""Tells circles from squares with a small Flax Linen network.

An ordinary script before, one that survives the loss of hosts after:

    diff examples/linen_before.py examples/linen_after.py
    resilient-jax launch --hosts 4 --devices-per-host 2 examples/linen_after.py
"""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

import resilient_jax as rj

STEPS = 60
BATCH = 64
SIDE = 12


class Net(nn.Module):
    """A convolution and a dense layer."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Return logits float32[batch, 2] of float32[batch, SIDE, SIDE, 1]."""
        x = nn.relu(nn.Conv(8, (3, 3))(images))
        return nn.Dense(2)(x.reshape(len(x), -1))


def make_examples(count: int) -> list[dict[str, np.ndarray]]:
    """Return filled circles (0) and squares (1) of random size and position, with noise."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    examples = []
    for label in np.arange(count, dtype=np.int32) % 2:
        row, column, radius = random.uniform((4, 4, 2), (8, 8, 4))
        down, across = abs(rows - row), abs(columns - column)
        shape = np.maximum(down, across) < radius if label else np.hypot(down, across) < radius
        image = (shape + random.normal(0, 0.1, shape.shape)).astype(np.float32)
        examples.append({"image": image[..., None], "label": label})
    return examples


def cost(model: nn.Module, batch: dict[str, Any]) -> jax.Array:
    """Return the mean cross-entropy."""
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def main() -> None:
    """Train, and print the loss."""
    data = make_examples(512)
    trainer = rj.Trainer(
        model=Net(), optimizer=optax.adam(0.01), loss_fn=cost, data=data, batch_size=BATCH, microbatch_size=8
    )
    result = trainer.fit(STEPS)
    if result.host_index == 0:
        print(f"loss {result.metrics['loss']:.6f} after {STEPS} steps")


if __name__ == "__main__":
    main()
