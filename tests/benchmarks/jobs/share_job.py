"""The job of the stall benchmark's share: the transformer with a sharded state. Usage: share_job.py STEPS."""

import sys
from typing import Any

import jax
import numpy as np

import resilient_jax as rj
from benchmarks.jobs.transformer import (
    MICROBATCHES,
    OPTIMIZER,
    Params,
    init_params,
    loss_of,
    tokens_of,
)

WIDTH, LAYERS = 160, 2
"""About a million parameters: 3 divides one dim of four in all."""


def draw(step: int, index: int) -> dict[str, np.ndarray]:
    return {"tokens": tokens_of(step, index)}


def loss(params: Params, batch: dict[str, Any]) -> jax.Array:
    return loss_of(params, batch["tokens"])


if __name__ == "__main__":
    rj.Trainer(
        model=lambda key: init_params(WIDTH, LAYERS),
        optimizer=OPTIMIZER,
        loss_fn=loss,
        data=draw,
        batch_size=MICROBATCHES,
        microbatch_size=1,
        parallelism=rj.Parallelism(state="sharded"),
    ).fit(int(sys.argv[1]))
