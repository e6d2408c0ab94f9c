"""The trainer's jobs of the benchmarks: a transformer. Usage: trainer_job.py KIND STEPS.

replicated: its state is whole on each host. sharded: its state is sharded over all hosts. planned: its plans are
searched, for hosts with two devices.
"""

import sys
from typing import Any

import jax
import numpy as np

import resilient_jax as rj
from tests.benchmarks.jobs.transformer import (
    MICROBATCHES,
    OPTIMIZER,
    Params,
    init_params,
    loss_of,
    tokens_of,
)
from tests.benchmarks.paths import REPOSITORY

WIDTH, LAYERS = 160, 2
"""About a million parameters: 3 divides one dim of four in all."""
TOPOLOGY = REPOSITORY / "meshes/local_4x2.toml"


def draw(step: int, index: int) -> dict[str, np.ndarray]:
    return {"tokens": tokens_of(step, index)}


def loss(params: Params, batch: dict[str, Any]) -> jax.Array:
    return loss_of(params, batch["tokens"])


if __name__ == "__main__":
    kind, steps = sys.argv[1], int(sys.argv[2])
    rj.Trainer(
        model=lambda key: init_params(WIDTH, LAYERS),
        optimizer=OPTIMIZER,
        loss_fn=loss,
        data=draw,
        batch_size=MICROBATCHES,
        microbatch_size=1,
        parallelism=rj.Parallelism(state="sharded" if kind == "sharded" else "replicated"),
        planner=rj.Planner(topology=str(TOPOLOGY)) if kind == "planned" else None,
    ).fit(steps)
