"""The loop of a job with JAX and Orbax alone that a supervisor restarts: `run_restart_job` in a script of its own.

One jitted step over the devices of all hosts with donated state, and an asynchronous Orbax checkpoint every `every`
steps, from which the processes restore after a restart. The variables BARE_* tell the job how to connect; a supervisor
restarts all processes when one dies. The job is tuned in its favor: `share_compilation_cache`, the only part of this
package here, makes JAX's persistent compilation cache hit in every process; otherwise it would hit only in process 0.
With JAX's own defaults (`heartbeat_s` null) that is the only tuning.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from resilient_jax.jax_runtime.compile_cache import share_compilation_cache
from tests.benchmarks.jobs.resilience_record import Faults, Recorder, read_job
from tests.support.null_cache_hooks import NullCacheHooks

CHECKPOINTS_KEPT = 2
CACHE_BYTES = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartTask:
    """What a job trains.

    Attributes:
        init: returns the initial state; traced.
        state_shardings: of its arrays, a tree of them or one for all.
        train_step: returns the next state and the loss of state and batch; it donates the state.
        read_batch: returns the batch of a step, of which this process has its part.
    """

    init: Callable[[], Any]
    state_shardings: Any
    train_step: Callable[[Any, Any], tuple[Any, Any]]
    read_batch: Callable[[int], Any]


def connect(heartbeat_s: int | None) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    more: dict[str, Any] = {} if heartbeat_s is None else {"heartbeat_timeout_seconds": heartbeat_s}
    jax.distributed.initialize(
        os.environ["BARE_COORDINATOR"], int(os.environ["BARE_COUNT"]), int(os.environ["BARE_INDEX"]), **more
    )


def open_checkpoints(folder: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=CHECKPOINTS_KEPT, enable_async_checkpointing=True)
    return ocp.CheckpointManager(folder / "checkpoints", options=options)


def restore_or_init(manager: ocp.CheckpointManager, task: RestartTask) -> tuple[int, Any]:
    newest = manager.latest_step()
    if newest is None:
        return 0, jax.jit(task.init, out_shardings=task.state_shardings)()
    shapes, shardings = jax.eval_shape(task.init), task.state_shardings
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    return newest, manager.restore(newest, args=ocp.args.StandardRestore(abstract))


def train(folder: Path, file: dict[str, Any], task: RestartTask) -> None:
    index, count, attempt = jax.process_index(), jax.process_count(), int(os.environ["BARE_ATTEMPT"])
    host = file["hosts"][index]
    recorder, faults = Recorder(folder, host), Faults(folder, file["faults"], host, file["hosts"])
    manager = open_checkpoints(folder)
    first, state = restore_or_init(manager, task)
    for step in range(first, file["steps"]):
        faults.arm(attempt, step, file["hosts"], recorder.steps_s)
        state, loss = task.train_step(state, task.read_batch(step))
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


def run_restart_job(make_task: Callable[[dict[str, Any]], RestartTask]) -> None:
    """Train what `make_task` returns for the configuration file of the folder in the command line."""
    folder = Path(sys.argv[1])
    file = read_job(folder)
    if (problem := share_compilation_cache(NullCacheHooks(), CACHE_BYTES)) is not None:
        sys.exit(f"{Path(sys.argv[0]).name}: the compilation cache is not shared: {problem}")
    connect(file["heartbeat_s"])
    train(folder, file, make_task(file))
