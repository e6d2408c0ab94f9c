"""A trainer whose state no process may have whole. Usage: large_mesh.py DIR AXES, with axes such as fsdp:4.

The layers are stacked and computed by a scan, so that XLA gathers one at a time. The optimizer keeps many values for
each weight, because a worker also has several arrays as large as its weights, for gradients and their sums. There is a
checkpoint every `SAVE_INTERVAL_STEPS` steps. The harness writes `stop` to DIR: the step at which training ends. After
each step each process appends a line to `steps-<host index>-<pid>.jsonl`: the step, the bytes of the whole state, and
the most private memory that the process has had beyond what its libraries take.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import resilient_jax as rj

WORK, AXIS, SIZE = Path(sys.argv[1]), *sys.argv[2].split(":")
WIDTH, HIDDEN, LAYERS = 768, 2048, 4
ROWS = 16
NEVER = 10**6
SAVE_INTERVAL_STEPS = 3
LOOK_INTERVAL_S = 0.02
MOMENTS = 9
OPTIMIZER = optax.chain(*[optax.trace(0.5) for _ in range(MOMENTS)], optax.adam(1e-4))


class PrivateMemory(threading.Thread):
    """Looks again and again at the private memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._base = self.most = read_private_bytes()

    @property
    def growth(self) -> int:
        """The most so far, in bytes, less what there was at first."""
        return self.most - self._base

    def run(self) -> None:
        """Look for as long as the process lives."""
        while True:
            self.most = max(self.most, read_private_bytes())
            time.sleep(LOOK_INTERVAL_S)


def read_private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Net(nnx.Module):
    """Stacked layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def make(rows: int, columns: int, names: tuple[str, str]) -> nnx.Param:
            init = nnx.with_partitioning(nnx.initializers.normal(0.02), (None, *names))
            return nnx.Param(init(rngs.params(), (LAYERS, rows, columns)))

        self.up = make(WIDTH, HIDDEN, ("embed", "mlp"))
        self.down = make(HIDDEN, WIDTH, ("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return float32[rows, WIDTH] of the same."""

        def add(x: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            up, down = layer
            return x + jnp.tanh(x @ up) @ down, None

        return jax.lax.scan(jax.checkpoint(add), x, (self.up[...], self.down[...]))[0]


def read(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).normal(size=(ROWS, WIDTH)).astype(np.float32)


def loss(model: Net, rows: jax.Array) -> jax.Array:
    return jnp.mean((model(rows) - jnp.roll(rows, 1, axis=1)) ** 2)


def step_to_stop() -> int:
    try:
        return int((WORK / "stop").read_text())
    except (OSError, ValueError):
        return NEVER


if __name__ == "__main__":
    memory = PrivateMemory()
    memory.start()

    def log(report: rj.StepReport) -> bool:
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(report.state))
        row = {"step": report.step - 1, "whole_bytes": whole, "growth_bytes": memory.growth}
        with (WORK / f"steps-{report.host_index}-{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps(row), file=file)
        return report.step >= step_to_stop()

    rj.Trainer(
        model=Net,
        optimizer=OPTIMIZER,
        loss_fn=loss,
        data=read,
        batch_size=2 * ROWS,
        microbatch_size=ROWS,
        parallelism=rj.Parallelism(axes={AXIS: int(SIZE)}),
        checkpoints=rj.Checkpoints(directory=WORK / "checkpoints", interval_steps=SAVE_INTERVAL_STEPS),
        callbacks=[log],
    ).fit(NEVER)
