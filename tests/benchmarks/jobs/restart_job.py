"""The job of the resilience benchmark with JAX and Orbax alone: `restart_job.py FOLDER`, under a supervisor.

A data-parallel `jax.jit` step over all hosts' devices with donated state, and an asynchronous Orbax checkpoint every
`every` steps, from which the processes restore after a restart. The variables BARE_* tell the job how to connect; a
supervisor restarts all processes when one dies. The job is tuned in its favor: `share_compilation_cache`, the only part
of this package here, makes JAX's persistent compilation cache hit in every process; otherwise it would hit only in
process 0. With JAX's own defaults (`heartbeat_s` null) that is the only tuning.
"""

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.jobs.resilience_record import Faults, Recorder, read_job
from benchmarks.jobs.transformer import MICROBATCHES, OPTIMIZER, Params, init_params, loss_of, tokens_of
from resilient_jax.jax_runtime.compile_cache import NullCacheHooks, share_compilation_cache

CHECKPOINTS_KEPT = 2
CACHE_BYTES = 2**32


def connect(heartbeat_s: int | None) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    more: dict[str, Any] = {} if heartbeat_s is None else {"heartbeat_timeout_seconds": heartbeat_s}
    jax.distributed.initialize(
        os.environ["BARE_COORDINATOR"], int(os.environ["BARE_COUNT"]), int(os.environ["BARE_INDEX"]), **more
    )


def open_checkpoints(folder: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=CHECKPOINTS_KEPT, enable_async_checkpointing=True)
    return ocp.CheckpointManager(folder / "checkpoints", options=options)


def init_state(width: int, layers: int) -> tuple[Params, optax.OptState]:
    params = init_params(width, layers)
    return params, OPTIMIZER.init(params)


def restore_or_init(manager: ocp.CheckpointManager, init: Any, whole: NamedSharding) -> tuple[int, Any]:
    newest = manager.latest_step()
    if newest is None:
        return 0, jax.jit(init, out_shardings=whole)()
    shapes = jax.eval_shape(init)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), shapes)
    return newest, manager.restore(newest, args=ocp.args.StandardRestore(abstract))


def train(folder: Path, file: dict[str, Any]) -> None:
    index, count, attempt = jax.process_index(), jax.process_count(), int(os.environ["BARE_ATTEMPT"])
    host = file["hosts"][index]
    recorder, faults = Recorder(folder, host), Faults(folder, file["faults"], host, file["hosts"])
    mesh = Mesh(np.array(jax.devices()), ("data",))
    cut, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    size = MICROBATCHES // count
    manager = open_checkpoints(folder)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=whole)
    def train_step(state: tuple[Params, optax.OptState], tokens: jax.Array) -> Any:
        params, optimizer = state
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, optimizer = OPTIMIZER.update(gradients, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), loss

    first, state = restore_or_init(
        manager, functools.partial(init_state, file["width"], file["layers"]), whole
    )
    for step in range(first, file["steps"]):
        faults.arm(attempt, step, file["hosts"], recorder.steps_s)
        own = [tokens_of(step, index * size + row) for row in range(size)]
        state, loss = train_step(state, jax.make_array_from_process_local_data(cut, np.concatenate(own)))
        jax.block_until_ready(state)
        float(loss)
        recorder.commit(attempt, step, count)
        if file["every"] and (step + 1) % file["every"] == file["phase"]:
            began_s = time.monotonic()
            manager.save(step + 1, args=ocp.args.StandardSave(state))
            recorder.write("saved", attempt, seconds=time.monotonic() - began_s)
        if step + 1 in file["digest_after"]:
            recorder.digest(
                step + 1, (np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(state))
            )
    manager.close()


def main() -> None:
    folder = Path(sys.argv[1])
    file = read_job(folder)
    if (problem := share_compilation_cache(NullCacheHooks(), CACHE_BYTES)) is not None:
        sys.exit(f"restart_job: the compilation cache is not shared: {problem}")
    connect(file["heartbeat_s"])
    train(folder, file)


if __name__ == "__main__":
    main()
