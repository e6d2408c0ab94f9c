"""A job of the trainer with all features whose bits might depend on the live hosts.

Usage: trainer_job.py WORK_DIR [nan].
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import resilient_jax as rj

WORK = Path(sys.argv[1])
STEPS = 14
POISONED = (4, 5)
"""(step, microbatch) of the non-finite input."""


class Net(nnx.Module):
    """A network with dropout and batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.output = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.output(self.dropout(self.norm(jnp.tanh(self.hidden(x)))))


def batch(step: int, index: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng((step, index)).normal(size=(4, 4)).astype(np.float32)
    if "nan" in sys.argv and (step, index) == POISONED:
        x[0, 0] = np.nan
    return {"x": x, "y": x.sum(1, keepdims=True)}


def loss(model: Net, rows: dict):
    error = model(rows["x"]) - rows["y"]
    return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}


if __name__ == "__main__":
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.02, 5, STEPS)
    result = rj.Trainer(
        model=Net,
        optimizer=optax.chain(optax.add_noise(0.01, 0.5, 0), optax.adamw(schedule)),
        loss_fn=loss,
        data=batch,
        batch_size=28,
        microbatch_size=4,
        numerics=rj.Numerics(clip_norm=1.0),
        evaluation=rj.Evaluation(data=batch, interval_steps=5, num_microbatches=3),
        early_stopping=rj.EarlyStopping(patience=5),
        checkpoints=rj.Checkpoints(directory=WORK / "checkpoints", save_interval_steps=4),
        log_directory=WORK / "log",
    ).fit(STEPS)
    print(f"step {result.step} digest {rj.digest_tree(result.variables)}", flush=True)
