"""A tiny job whose weights have the same bits whichever hosts die; the harness decides how long it trains.

Usage: tiny.py WORK_DIR [fast] [keep] [lock] [hosts=N | per_host=N|devices] [pace=SECONDS] [rows=N] [slow=HOST]. With a
slow host microbatches are assigned by speed. With `keep` an array of every world is kept, which no script should do.
With `lock` only one process of a host gets beyond the top of the script at a time; others fail there. The harness
writes orders to WORK_DIR:
- `stop`: the step at which all hosts stop; written well ahead;
- `late`: as long as it is there, no worker that starts asks to join;
- `hang`: a host, a place (`input`, `user`, or `interpreter`: without letting other threads run) and a step, where the
  host's worker hangs once;
- `compile`: a step in which all hosts compile for about a second; a host that begins to compile writes
  `compiling-<host>-<step>`.
Each process logs what it did:
- `steps-<host>-<pid>.jsonl`: a line per committed step, with the SHA-256 of weights and optimizer state, and the owners
  of the committed microbatches;
- `microbatches-<host>-<pid>.jsonl`: a line for each microbatch that the process began to compute;
- `reads-<host>-<pid>.jsonl`: a line for each microbatch that the process read;
- `final-<host>.npz`: the state at the end.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from resilient_jax.data.prefetcher import Prefetcher
from resilient_jax.protocol.worker_messages import WORKER_SETTINGS_VARIABLE

WORK = Path(sys.argv[1])
WORDS = dict(word.split("=") for word in sys.argv[2:] if "=" in word)
REDUCTION = "fast" if "fast" in sys.argv else "exact"
PER_HOST = WORDS.get("per_host", "1")
REPLICAS = rj.ReplicaShape(
    hosts=int(WORDS.get("hosts", 1)), per_host="devices" if PER_HOST == "devices" else int(PER_HOST)
)
SIZE, MICROBATCHES = 32, 14  # 32 x 32: a leaf that is summed in fixed point
ROWS = int(WORDS.get("rows", 8))
NEVER = 10**9
PACE_S = float(WORDS.get("pace", 0.1))
"""Pause per step: without one a job of four takes all of a core or more, and those that come back wait for it."""
BRISK_STEPS = 10
REST_S = 0.3
"""Pause per step after BRISK_STEPS of a generation with fewer hosts than TINY_JOB_HOSTS: it leaves processor time to
the workers that come back. All hosts of a test share two cores, and steps that no test waits for would take most of
it."""
ALL_HOSTS = int(os.environ.get("TINY_JOB_HOSTS", 0))
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
HOST = json.loads(os.environ.get(WORKER_SETTINGS_VARIABLE, "{}")).get("host")
LOCK = open(WORK / f"lock-{HOST}", "w")  # noqa: SIM115 - until the process ends
if "lock" in sys.argv:
    fcntl.flock(LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
traces = 0
kept: list[jax.Array] = []

SLOW_S = 0.06
"""Added to each microbatch, which takes some milliseconds, or more on a busy machine."""


def step_in(name: str) -> int:
    """Return the step that the harness wrote into a file; without the file, NEVER."""
    try:
        return int((WORK / name).read_text())
    except (OSError, ValueError):
        return NEVER


def hang_if_ordered(place: str, step: int) -> None:
    """Hang for good if the harness has ordered it; the worker that comes after this one does not."""
    with contextlib.suppress(OSError):
        if (WORK / "hang").read_text().split() == [HOST, place, str(step)]:
            (WORK / "hang").unlink()
            sleep = ctypes.PyDLL(None).sleep if place == "interpreter" else time.sleep
            sleep(600)


def init_state() -> tuple[dict[str, jax.Array], optax.OptState]:
    random = np.random.default_rng(0)  # compiling the programs of jax.random would take each job a second
    params = {name: jnp.asarray(random.standard_normal((SIZE, SIZE), np.float32)) for name in "ab"}
    return params, OPTIMIZER.init(params)


def loss_of(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(rows @ params["a"]) @ params["b"] - jnp.roll(rows, 1, axis=1)) ** 2)


@jax.jit
def differentiate(params: dict[str, jax.Array], rows: jax.Array) -> tuple:
    global traces
    traces += 1  # runs only while `differentiate` is traced
    return jax.value_and_grad(loss_of)(params, rows)


@jax.jit
def apply(state: tuple, gradients: dict[str, jax.Array]) -> tuple:
    params, optimizer = state
    mean = jax.tree.map(lambda g: g / MICROBATCHES, gradients)
    updates, optimizer = OPTIMIZER.update(mean, optimizer, params)
    return optax.apply_updates(params, updates), optimizer


def digest(state: tuple) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def compile_for_long(step: int, host: str) -> None:
    """Compile a program that no cache has, for about a second."""
    (WORK / f"compiling-{host}-{step}").touch()

    def long(x: jax.Array) -> jax.Array:
        for turn in range(50):
            x = jnp.sin(x @ x.T + turn + step) @ x
        return x

    jax.jit(long).lower(jax.ShapeDtypeStruct((16, 16), jnp.float32)).compile()


def program_count(jitted: Any) -> int:
    """Return how many programs a jitted function has compiled; JAX has no public API for it."""
    return jitted._cache_size()


class Rows:
    """A source of random batches that logs each read."""

    def __init__(self, log: TextIO) -> None:
        self._log = log

    def batch(self, step: int, index: int, part: tuple[int, int] = (0, 1)) -> np.ndarray:
        hang_if_ordered("input", step)
        print(json.dumps({"step": step, "index": index}), file=self._log, flush=True)
        rows = np.random.default_rng((step, index)).standard_normal((ROWS, SIZE), np.float32)
        k, n = part
        return rows[k * ROWS // n : (k + 1) * ROWS // n]

    def lengths(self, step: int, index: int) -> None:
        """Return None: the data is not packed."""


def open_log(kind: str, host: str) -> TextIO:
    return (WORK / f"{kind}-{host}-{os.getpid()}.jsonl").open("a")


@functools.cache
def open_data(host: str, prefix: str) -> Prefetcher:
    return Prefetcher(Rows(open_log(f"{prefix}reads", host)))


def train(world: rj.World) -> None:
    whole = NamedSharding(world.local_mesh("data"), P())
    state = world.restore_or_init(init_state, sharding=whole)
    zeros = jax.device_put((jnp.zeros(()), jax.tree.map(jnp.zeros_like, state[0])), whole)
    # What a rehearsal computes is no part of the job.
    prefix = "rehearsed-" if world.is_rehearsal else ""
    with (
        open_log(f"{prefix}steps", world.host) as steps,
        open_log(f"{prefix}microbatches", world.host) as log,
    ):
        for count, step in enumerate(world.steps(NEVER)):
            if step >= step_in("stop"):
                np.savez(WORK / f"final-{world.host}.npz", *map(np.asarray, jax.tree.leaves(state)))
                return
            if step == step_in("compile"):
                compile_for_long(step, world.host)
            hang_if_ordered("user", step)
            hang_if_ordered("interpreter", step)

            def compute(microbatch: rj.Microbatch, params: dict = state[0]) -> tuple:
                print(json.dumps({"step": microbatch.step, "index": microbatch.index}), file=log, flush=True)
                time.sleep(SLOW_S if WORDS.get("slow") == world.host else 0)
                replica = microbatch.replica
                return differentiate(replica.to_replica(params), replica.place_batch(microbatch.batch))

            loss, gradients = world.accumulate_microbatches(
                MICROBATCHES,
                compute,
                zeros,
                data=open_data(world.host, prefix),
                options=rj.AccumulationOptions(
                    reduction=REDUCTION,
                    replica_shape=REPLICAS,
                    # Else tests could not tell which host computes which microbatch.
                    balance_by_speed="slow" in WORDS,
                ),
            )
            state = apply(state, gradients)
            if "keep" in sys.argv and count == 0:
                kept.append(loss)
            world.commit(state, loss=float(loss) / MICROBATCHES)
            line = {
                "step": step,
                "loss": float(loss) / MICROBATCHES,
                "digest": digest(state),
                "generation": world.generation,
                "traced": traces,
                "programs": program_count(differentiate),
                "devices": len(world.local_devices),
                "hosts": len(world.hosts),
                "processes": jax.process_count(),
                "owners": [world.host_of_microbatch(index) for index in range(MICROBATCHES)],
            }
            print(json.dumps(line), file=steps, flush=True)
            time.sleep(REST_S if count > BRISK_STEPS and len(world.hosts) < ALL_HOSTS else PACE_S)


if __name__ == "__main__":
    while (WORK / "late").exists():
        time.sleep(0.02)
    rj.run(train)
