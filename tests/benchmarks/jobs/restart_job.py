"""The job of the resilience benchmark with JAX and Orbax alone: `restart_job.py FOLDER`, under a supervisor.

A data-parallel `jax.jit` step over all hosts' devices; see `restart_loop` for all else.
"""

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.benchmarks.jobs.restart_loop import RestartTask, run_restart_job
from tests.benchmarks.jobs.transformer import MICROBATCHES, OPTIMIZER, Params, init_params, loss_of, tokens_of


def init_state(width: int, layers: int) -> tuple[Params, optax.OptState]:
    params = init_params(width, layers)
    return params, OPTIMIZER.init(params)


def make_task(file: dict[str, Any]) -> RestartTask:
    index, count = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    cut, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    size = MICROBATCHES // count

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=whole)
    def train_step(state: tuple[Params, optax.OptState], tokens: jax.Array) -> Any:
        params, optimizer = state
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, optimizer = OPTIMIZER.update(gradients, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), loss

    def read_batch(step: int) -> jax.Array:
        own = [tokens_of(step, index * size + row) for row in range(size)]
        return jax.make_array_from_process_local_data(cut, np.concatenate(own))

    return RestartTask(
        init=functools.partial(init_state, file["width"], file["layers"]),
        state_shardings=whole,
        train_step=train_step,
        read_batch=read_batch,
    )


if __name__ == "__main__":
    run_restart_job(make_task)
