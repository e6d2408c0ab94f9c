"""The job of the stall benchmark: a transformer of about 10 million float32 parameters with Adam.

The same model, batch and update run in two loops, to measure the overhead of ours:
    stall_job.py ours STEPS OUT      a loop on `world`, started by `resilient-jax launch`
    stall_job.py bare STEPS OUT      a plain multi-process JAX loop: `jax.distributed.initialize`, no framework
At the end each process writes its step times in seconds to OUT-<pid>.json.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from resilient_jax.jax_runtime.gloo import lower_gloo_thread_priority
from resilient_jax.jax_runtime.jaxlib_types import jaxlib_runtime
from tests.benchmarks.jobs.transformer import (
    MICROBATCHES,
    Params,
    accumulate,
    apply,
    differentiate,
    init_state,
    tokens_of,
    zeros_like,
)


def train_ours(world: rj.World, steps: int, times: list[float]) -> None:
    state = world.restore_or_init(init_state)
    zeros = zeros_like(state[0])
    began_s = time.monotonic()
    for _ in world.steps(steps):

        def compute(microbatch: rj.Microbatch, params: Params = state[0]) -> Params:
            return differentiate(params, tokens_of(microbatch.step, microbatch.index))

        loss, gradients = world.accumulate_microbatches(
            MICROBATCHES, compute, zeros, options=rj.AccumulationOptions(reduction="fast")
        )
        state = apply(state, gradients)
        world.commit(state, loss=float(loss) / MICROBATCHES)
        times.append(time.monotonic() - began_s)
        began_s = time.monotonic()


def train_bare(steps: int, times: list[float]) -> None:
    """Train as one would without a framework: the same programs, and one all-reduce of the gradients."""
    count, index = jax.process_count(), jax.process_index()
    mesh = Mesh(np.array(jax.devices()), ("host",))
    stacked, summed = NamedSharding(mesh, P("host")), NamedSharding(mesh, P())

    @functools.partial(jax.jit, out_shardings=summed)
    def add_up(rows: Any) -> Any:
        return jax.tree.map(lambda x: x.sum(axis=0), rows)

    def reduce(tree: Any) -> Any:
        rows = jax.tree.map(
            lambda x: jax.make_array_from_single_device_arrays((count, *x.shape), stacked, [x[None]]), tree
        )
        return jax.tree.map(lambda x: x.addressable_data(0), add_up(rows))

    state = init_state()
    zeros = zeros_like(state[0])
    mine = range(index * MICROBATCHES // count, (index + 1) * MICROBATCHES // count)
    began_s = time.monotonic()
    for step in range(steps):
        total = zeros
        for microbatch in mine:
            total = accumulate(total, state[0], tokens_of(step, microbatch))
        loss, gradients = reduce(total)
        state = apply(state, gradients)
        jax.block_until_ready(state)
        float(loss)
        times.append(time.monotonic() - began_s)
        began_s = time.monotonic()


def connect_bare() -> None:
    """Connect as one does without a framework; gloo's thread gets the priority that ours gets, so that loops differ."""
    make = jaxlib_runtime.make_gloo_tcp_collectives

    def make_alike(**arguments: Any) -> Any:
        with lower_gloo_thread_priority():
            return make(**arguments)

    jaxlib_runtime.make_gloo_tcp_collectives = make_alike
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        os.environ["BARE_COORDINATOR"], int(os.environ["BARE_COUNT"]), int(os.environ["BARE_INDEX"])
    )


def write_times(out: Path, times: list[float]) -> None:
    out.with_name(f"{out.name}-{os.getpid()}.json").write_text(json.dumps(times))


def main() -> None:
    mode, steps, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    times: list[float] = []
    if mode == "ours":
        rj.run(lambda world: train_ours(world, steps, times))
    else:
        connect_bare()
        train_bare(steps, times)
    write_times(out, times)


if __name__ == "__main__":
    main()
