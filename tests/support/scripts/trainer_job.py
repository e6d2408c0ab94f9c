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


class Count(nnx.Variable):
    """The examples that were seen."""


class Peak(nnx.Variable):
    """The largest activation of each unit, over some steps."""


class Net(nnx.Module):
    """A network with dropout, batch statistics, and variables with rules of their own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.output = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.seen, self.peak = Count(jnp.int32(0)), Peak(jnp.zeros(8))

    def __call__(self, x):
        hidden = self.norm(jnp.tanh(self.hidden(x)))
        self.seen[...] += len(x)
        self.peak[...] = hidden.max(0)
        return self.output(self.dropout(hidden))


def batch(step: int, index: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng((step, index)).normal(size=(4, 4)).astype(np.float32)
    if "nan" in sys.argv and (step, index) == POISONED:
        x[0, 0] = np.nan
    # From none to all of the rows are real ones.
    return {"x": x, "y": x.sum(1, keepdims=True), "mask": np.arange(len(x)) < (step + index) % (len(x) + 1)}


def loss(model: Net, rows: dict):
    error, mask = (model(rows["x"]) - rows["y"])[:, 0], rows["mask"]
    mae = rj.WeightedMean(jnp.sum(jnp.abs(error) * mask), jnp.sum(mask))
    return rj.WeightedMean(jnp.sum(error**2 * mask), jnp.sum(mask)), {"mae": mae, "largest": jnp.max(error)}


if __name__ == "__main__":
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.02, 5, STEPS)
    result = rj.Trainer(
        model=Net,
        optimizer=optax.chain(optax.add_noise(0.01, 0.5, 0), optax.adamw(schedule)),
        loss_fn=loss,
        data=batch,
        batch_size=28,
        microbatch_size=4,
        initial_variables=lambda: {"output": {"bias": np.ones(1, np.float32)}},
        variable_reductions={Count: "sum", "Peak": lambda old, mean: 0.5 * (old + mean)},
        numerics=rj.Numerics(clip_norm=1.0, ema_decay=0.9),
        evaluation=rj.Evaluation(data=batch, interval_steps=5, num_microbatches=3),
        early_stopping=rj.EarlyStopping(patience=5),
        checkpoints=rj.Checkpoints(directory=WORK / "checkpoints", interval_steps=4),
        log_directory=WORK / "log",
    ).fit(STEPS)
    assert int(result.model.seen[...]) == 28 * result.step, "each microbatch of each step once"
    digest = rj.digest_tree((result.variables, result.ema_params))
    print(f"step {result.step} digest {digest}", flush=True)
