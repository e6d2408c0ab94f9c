"""The model of `examples/train_lm.py` with JAX and Orbax alone: `restart_lm.py FOLDER`, under a supervisor.

What a user would write for a model that does not fit one host: weights and optimizer state are sharded over the devices
of all hosts (FSDP by GSPMD), and so are the sequences of a step. One `jax.jit` step with donated state; each weight is
gathered once. See `restart_loop` for all else.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from byte_lm.model import ByteLM
from byte_lm.objective import loss as loss_of
from byte_lm.objective import make_optimizer
from byte_lm.settings import Settings
from byte_lm.text import draw_microbatch, read_standard_library
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.config import load_toml
from tests.benchmarks.jobs.restart_loop import RestartTask, run_restart_job


def make_task(file: dict[str, Any]) -> RestartTask:
    settings = load_toml(Path(file["settings"]), Settings)
    text = read_standard_library(settings.text.max_bytes)
    index, count = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    clip = optax.clip_by_global_norm(settings.optimizer.clip_norm)
    optimizer = optax.chain(clip, make_optimizer(settings.optimizer))
    abstract = nnx.eval_shape(lambda: ByteLM(settings.model, nnx.Rngs(settings.seed)))
    graph = nnx.split(abstract)[0]

    def init() -> Any:
        params = nnx.split(ByteLM(settings.model, nnx.Rngs(settings.seed)))[1]
        params = nnx.to_pure_dict(params)
        return params, optimizer.init(params)

    def compute_loss(params: Any, batch: jax.Array) -> jax.Array:
        return loss_of(nnx.merge(graph, params), batch)

    shardings = jax.tree.map(
        lambda leaf: NamedSharding(mesh, shard_largest(leaf.shape, count)), jax.eval_shape(init)
    )

    def train_step(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state
        whole = jax.lax.with_sharding_constraint(params, NamedSharding(mesh, P()))
        loss, gradients = jax.value_and_grad(compute_loss)(whole, batch)
        gradients = jax.lax.with_sharding_constraint(gradients, shardings[0])
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def read_batch(step: int) -> jax.Array:
        own = [
            draw_microbatch(
                text,
                (settings.seed, step, number),
                sequences=settings.sequences,
                context=settings.model.context,
            )
            for number in range(index, settings.microbatches, count)
        ]
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P("fsdp")), np.concatenate(own))

    return RestartTask(
        init=init,
        state_shardings=shardings,
        train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P()))),
        read_batch=read_batch,
    )


def shard_largest(shape: tuple[int, ...], count: int) -> P:
    """Return the spec that shards the largest dim which `count` devices divide; a replicated one if none does."""
    fitting = [(size, dim) for dim, size in enumerate(shape) if size % count == 0]
    if not fitting:
        return P()
    _, largest = max(fitting)
    return P(*("fsdp" if dim == largest else None for dim in range(len(shape))))


if __name__ == "__main__":
    run_restart_job(make_task)
