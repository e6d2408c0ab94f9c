"""The job of the mesh benchmark: a small network with named dims and Adam, its state in shards on replicas of hosts.

    mesh_job.py ours FOLDER STEPS ROOT FSDP [digests] [save] [large]   `rj.Trainer`
    mesh_job.py ours FOLDER STEPS ROOT 0 [planned]                     the same, with axes that a planner searches
    mesh_job.py bare FOLDER STEPS ROOT [large]                         plain multi-process JAX: two replicas of fsdp 4
    mesh_job.py FOLDER                                                 the same with Orbax, under a supervisor

A step is the same microbatches in all of them, and a bare replica adds up as many as one of ours, by `lax.scan`. FOLDER
gets of each process `times-<pid>.json`, its step times in seconds; `times-<pid>.jsonl`, when each step ended; with
`digests` `boxes-<pid>.jsonl`, a `BoxRow` for each step. The first host writes `usage.json`: the processor seconds of a
step, of all processes that descend from the process ROOT.
"""

import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from tests.benchmarks.jobs.restart_loop import RestartTask, run_restart_job
from tests.benchmarks.jobs.stall_job import connect_bare, write_times
from tests.benchmarks.paths import REPOSITORY
from tests.benchmarks.run_end import read_stop
from tests.benchmarks.step_times import StepTimeWriter

WIDTH, HIDDEN, ROWS = (512, 2048, 256) if "large" in sys.argv else (192, 384, 128)
LAYERS, MICROBATCHES = 3, 4
PLANNED_ROWS = 192
"""They can be divided among the devices of three hosts, too."""
DEVICES_OF_HOST, REPLICAS = 2, 2
"""Of the bare job."""
WARM_STEPS = 12
"""Steps before processor time counts: others compile programs ahead meanwhile."""
SAVE_INTERVAL_STEPS = 3
OPTIMIZER = optax.adam(1e-3)


class Net(nnx.Module):
    """A few residual layers with names of their dims."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def make(rows: int, columns: int, names: tuple[str, str]) -> nnx.Linear:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
            return nnx.Linear(rows, columns, use_bias=False, kernel_init=init, rngs=rngs)

        self.up = nnx.List([make(WIDTH, HIDDEN, ("embed", "mlp")) for _ in range(LAYERS)])
        self.down = nnx.List([make(HIDDEN, WIDTH, ("mlp", "embed")) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return float32[rows, WIDTH] of the same."""
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(jnp.tanh(up(x)))
        return x


def loss_of(model: Net, rows: jax.Array) -> jax.Array:
    return jnp.mean((model(rows) - jnp.roll(rows, 1, axis=1)) ** 2)


@functools.lru_cache(2 * MICROBATCHES)
def read(step: int, index: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng((step, index)).normal(size=(rows, WIDTH)).astype(np.float32)


class Clock:
    """Measures steps: their times, and the processor time of the whole job from `WARM_STEPS` on."""

    def __init__(self, folder: Path, root: int, is_first: bool) -> None:
        self._folder, self._root, self._is_first = folder, root, is_first
        self.times: list[float] = []
        self._last_s = time.monotonic()
        self._used_s: float | None = None

    def tick(self, steps: int) -> None:
        """Note the end of a step, after which so many are made."""
        now_s = time.monotonic()
        self.times.append(now_s - self._last_s)
        if self._is_first and steps >= WARM_STEPS:
            used_s = read_processor_s(self._root)
            if self._used_s is None:
                self._used_s = used_s
            else:
                usage = {"processor_s": (used_s - self._used_s) / (steps - WARM_STEPS)}
                (self._folder / "usage.json").write_text(json.dumps(usage))
        self._last_s = time.monotonic()


def read_processor_s(root: int) -> float:
    """Return the processor seconds of all live descendants of a process, and of their children that have ended."""
    total = 0.0
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def write_boxes(folder: Path, report: rj.StepReport) -> None:
    """Append the digests of the boxes of the state that are on this host, and their bytes."""
    here: dict[str, np.ndarray] = {}
    whole = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(report.state):
        whole += leaf.nbytes
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            name = jax.tree_util.keystr(path)
            here |= {f"{name} {box.index}": np.asarray(box.data) for box in leaf.addressable_shards}
    row = {
        "step": report.step - 1,
        "boxes": {
            name: hashlib.blake2b(box.tobytes(), digest_size=8).hexdigest() for name, box in here.items()
        },
        "bytes": sum(box.nbytes for box in here.values()),
        "whole_bytes": whole,
    }
    with (folder / f"boxes-{os.getpid()}.jsonl").open("a") as file:
        print(json.dumps(row), file=file)


def fit(folder: Path, steps: int, root: int, fsdp: int, words: list[str]) -> None:
    clock: Clock | None = None
    writer = StepTimeWriter(folder)

    def after_step(report: rj.StepReport) -> bool:
        nonlocal clock
        clock = clock or Clock(folder, root, report.host_index == 0)
        writer(report)
        if "digests" in words:
            write_boxes(folder, report)
        clock.tick(report.step)
        return report.step >= read_stop(folder)

    is_planned = "planned" in words
    rows = PLANNED_ROWS if is_planned else ROWS
    planner = rj.Planner(
        topology=REPOSITORY / "meshes" / "local_4x2.toml",
        axis_sizes={"tensor": 1},
        calibrate=False,
        spans_hosts=True,
    )
    rj.Trainer(
        model=Net,
        optimizer=OPTIMIZER,
        loss_fn=loss_of,
        data=functools.partial(read, rows=rows),
        batch_size=MICROBATCHES * rows,
        microbatch_size=rows,
        parallelism=rj.Parallelism() if is_planned else rj.Parallelism(axes={"fsdp": fsdp}),
        planner=planner if is_planned else None,
        checkpoints=rj.Checkpoints(directory=folder / "checkpoints", interval_steps=SAVE_INTERVAL_STEPS)
        if "save" in words
        else None,
        callbacks=[after_step],
    ).fit(steps)
    if clock is not None:
        write_times(folder / "times", clock.times)


def make_task() -> RestartTask:
    """Return the plain loop: parameters and Adam's state in shards over a replica, rows over all devices."""
    nnx.use_eager_sharding(False)  # names of dims are for the trainer
    mesh = Mesh(np.array(jax.devices()).reshape(REPLICAS, -1), ("replica", "fsdp"))
    graph = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))[0]

    def init() -> Any:
        params = nnx.to_pure_dict(nnx.split(Net(nnx.Rngs(0)))[1])
        return params, OPTIMIZER.init(params)

    def place(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*("fsdp" if size == WIDTH else None for size in leaf.shape)))

    shardings = jax.tree.map(place, jax.eval_shape(init))
    places = NamedSharding(mesh, P(None, ("replica", "fsdp")))

    def train_step(state: Any, rows: jax.Array) -> Any:
        params, opt_state = state

        def add(total: Any, part: jax.Array) -> Any:
            found = jax.value_and_grad(lambda params: loss_of(nnx.merge(graph, params), part))(params)
            return jax.tree.map(jnp.add, total, found), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (loss, gradients), _ = jax.lax.scan(add, zeros, rows)
        gradients = jax.tree.map(lambda sum_: sum_ / len(rows), gradients)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss / len(rows)

    def read_batch(step: int) -> jax.Array:
        def slice_rows(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "rows are sharded"
            replica, first = divmod(index[1].start or 0, ROWS)
            last = first + ROWS * REPLICAS // len(jax.devices())
            return np.stack(
                [read(step, part + replica)[first:last] for part in range(0, MICROBATCHES, REPLICAS)]
            )

        shape = MICROBATCHES // REPLICAS, REPLICAS * ROWS, WIDTH
        return jax.make_array_from_callback(shape, places, slice_rows, dtype=np.float32)

    return RestartTask(
        init=init,
        state_shardings=shardings,
        train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P()))),
        read_batch=read_batch,
    )


def train_bare(folder: Path, steps: int, root: int) -> None:
    connect_bare()
    task = make_task()
    clock = Clock(folder, root, jax.process_index() == 0)
    state = jax.jit(task.init, out_shardings=task.state_shardings)()
    for step in range(steps):
        state, loss = task.train_step(state, task.read_batch(step))
        float(loss)
        clock.tick(step + 1)
    write_times(folder / "times", clock.times)


def main() -> None:
    if sys.argv[1] == "ours":
        steps, root, fsdp = map(int, sys.argv[3:6])
        fit(Path(sys.argv[2]), steps, root, fsdp, sys.argv[6:])
        return
    jax.config.update("jax_num_cpu_devices", DEVICES_OF_HOST)
    if sys.argv[1] == "bare":
        train_bare(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        run_restart_job(lambda file: make_task())


if __name__ == "__main__":
    main()
