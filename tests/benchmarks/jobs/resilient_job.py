"""The job of the resilience benchmark as a loop on `world`: `resilient_job.py FOLDER`, under `launch`.

It has the model, batch and update of `restart_job.py`. With exact sums, the weights after any failures can be
compared bit for bit with those of an undisturbed run.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import resilient_jax as rj
from tests.benchmarks.jobs.resilience_record import Faults, Recorder, read_job
from tests.benchmarks.jobs.transformer import (
    MICROBATCHES,
    OPTIMIZER,
    Params,
    differentiate,
    init_params,
    tokens_of,
    zeros_like,
)

SEQUENCES = MICROBATCHES
"""Sequences per step, for any size of microbatch."""


class Job:
    """State that survives a generation: the recorder, and the failures that are still due."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.file = folder, read_job(folder)
        self._recorder: Recorder | None = None
        self._faults: Faults | None = None

    def train(self, world: rj.World) -> None:
        file, attempt = self.file, int(world.generation)
        recorder, faults = self._begin(world.host)
        recorder.write("began", attempt)
        state = world.restore_or_init(functools.partial(init_state, file["width"], file["layers"]))
        zeros = zeros_like(state[0])
        size = file["microbatch"]
        for step in world.steps(file["steps"]):
            faults.arm(attempt, step, world.hosts, recorder.steps_s)

            def compute(microbatch: rj.Microbatch, params: Params = state[0]) -> Params:
                first = microbatch.index * size
                rows = [tokens_of(microbatch.step, first + row) for row in range(size)]
                return differentiate(params, np.concatenate(rows))

            loss, gradients = world.accumulate_microbatches(
                SEQUENCES // size,
                compute,
                zeros,
                options=rj.AccumulationOptions(reduction=file["reduction"]),
            )
            state = apply(state, gradients, SEQUENCES // size)
            world.commit(state, loss=float(loss) * size / SEQUENCES)
            recorder.commit(attempt, step, len(world.hosts))
            world.snapshot(state)
            if step + 1 in file["digest_after"]:
                recorder.digest(step + 1, map(np.asarray, jax.tree.leaves(state)))

    def _begin(self, host: str) -> tuple[Recorder, Faults]:
        if self._recorder is None or self._faults is None:
            self._recorder = Recorder(self._folder, host)
            self._faults = Faults(self._folder, self.file["faults"], host, self.file["hosts"])
        return self._recorder, self._faults


def init_state(width: int, layers: int) -> tuple[Params, optax.OptState]:
    params = init_params(width, layers)
    return params, OPTIMIZER.init(params)


@functools.partial(jax.jit, static_argnums=2)
def apply(state: Any, gradients: Params, count: int) -> Any:
    params, optimizer = state
    updates, optimizer = OPTIMIZER.update(jax.tree.map(lambda g: g / count, gradients), optimizer)
    return optax.apply_updates(params, updates), optimizer


def main() -> None:
    rj.run(Job(Path(sys.argv[1])).train)


if __name__ == "__main__":
    main()
