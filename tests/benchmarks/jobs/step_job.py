"""The job of the step benchmark: the stall benchmark's transformer, in the trainer or in a plain loop.

    step_job.py trainer STEPS OUT [fast | exact_wide] [microbatch=N] [log]      `rj.Trainer`
    step_job.py bare STEPS OUT       a data-parallel `jax.jit` loop over all hosts' devices, without a framework
    step_job.py curve STEPS OUT      `rj.Trainer` with a small model on real text, whose loss falls

A step is 16 sequences for any `microbatch` (sequences per microbatch, by default 1) and any number of hosts. In the
folder of OUT each process writes:
- `OUT-<pid>.json`: step times in seconds, from the end of a step to the end of the next;
- `usage-<pid>.json`: peak resident memory, and what all processes together sent in a step;
- `digest-<pid>.txt`: from the trainer, the SHA-256 of the final weights;
- `computed-<pid>.jsonl`: with `log`, a line for each microbatch, written by the program that computes it.
With `log` all processes stop after the step whose number is in the file `stop`, which must be written ahead of time.
"""

import functools
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from byte_lm.text import draw_microbatch, read_standard_library
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from tests.benchmarks.jobs.stall_job import connect_bare, write_times
from tests.benchmarks.jobs.transformer import (
    CONTEXT,
    OPTIMIZER,
    Params,
    init_params,
    init_state,
    loss_of,
    tokens_of,
)
from tests.benchmarks.run_end import read_stop, write_digest
from tests.benchmarks.runs import COMPILING_STEPS

SEQUENCES = 16
SMALL_WIDTH, SMALL_LAYERS = 96, 3
SMALL_OPTIMIZER = optax.adam(3e-3)
TEXT_BYTES = 2_000_000


def draw(step: int, index: int, size: int) -> np.ndarray:
    """Return int32[size, CONTEXT + 1], microbatch `index`; a step has the same sequences for every `size`."""
    return np.concatenate([tokens_of(step, index * size + row) for row in range(size)])


class Clock:
    """Measures the times between the ends of steps, and what is sent meanwhile."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._last_s = time.monotonic()
        self._sent_bytes: list[int] = []

    def tick(self) -> None:
        now_s = time.monotonic()
        self.times.append(now_s - self._last_s)
        self._last_s = now_s
        self._sent_bytes.append(read_loopback_bytes())

    def find_sent_bytes(self) -> float:
        """Return the bytes that were sent in a step, without the first steps, in which programs are exchanged."""
        steady = self._sent_bytes[COMPILING_STEPS - 1 :]
        return (steady[-1] - steady[0]) / (len(steady) - 1) if len(steady) > 1 else 0.0


def read_loopback_bytes() -> int:
    """Return the bytes that all processes of this machine have sent to each other."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0


class ComputedLog:
    """Logs each microbatch as soon as it is computed, so that the log of a killed process is complete."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(
            folder / f"computed-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )

    def write(self, _: np.ndarray, where: np.ndarray) -> None:
        step, index = where.tolist()
        os.write(self._descriptor, (json.dumps({"step": step, "index": index}) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


def reduction_of(words: list[str]) -> Literal["exact", "exact_wide", "fast"]:
    for reduction in ("fast", "exact_wide"):
        if reduction in words:
            return reduction
    return "exact"


def fit_trainer(steps: int, folder: Path, words: list[str], clock: Clock) -> rj.FitResult:
    sizes = {name: int(number) for name, _, number in (w.partition("=") for w in words) if number}
    size = sizes.get("microbatch", 1)
    log = ComputedLog(folder) if "log" in words else None

    def loss(params: Params, batch: dict[str, Any]) -> jax.Array:
        found = loss_of(params, batch["tokens"])
        if log is not None:
            # The loss is an operand, so the callback runs after the loss has been computed.
            jax.debug.callback(log.write, found, batch["where"][0])
        return found

    def batch(step: int, index: int) -> dict[str, np.ndarray]:
        return {"tokens": draw(step, index, size), "where": np.full((size, 2), [step, index], np.int32)}

    def after_step(report: rj.StepReport) -> bool:
        clock.tick()
        return log is not None and report.step >= read_stop(folder)

    try:
        return rj.Trainer(
            model=lambda key: init_params(),
            optimizer=OPTIMIZER,
            loss_fn=loss,
            data=batch,
            batch_size=SEQUENCES,
            microbatch_size=size,
            parallelism=rj.Parallelism(reduction=reduction_of(words)),
            callbacks=[after_step],
        ).fit(steps)
    finally:
        if log is not None:
            log.close()


def fit_curve(steps: int, folder: Path) -> rj.FitResult:
    text = read_standard_library(TEXT_BYTES)
    return rj.Trainer(
        model=lambda key: init_params(SMALL_WIDTH, SMALL_LAYERS),
        optimizer=SMALL_OPTIMIZER,
        loss_fn=lambda params, tokens: loss_of(params, tokens.astype(jnp.int32)),
        data=lambda step, index: draw_microbatch(text, (0, step, index), sequences=1, context=CONTEXT),
        batch_size=SEQUENCES,
        microbatch_size=1,
        log_directory=folder / "log",
    ).fit(steps)


def train_bare(steps: int, clock: Clock) -> None:
    """Train as one would without a framework: one program, batch sharded over the devices, donated state."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    cut, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    size = SEQUENCES // jax.process_count()

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=whole)
    def train_step(state: tuple[Params, optax.OptState], tokens: jax.Array) -> Any:
        params, optimizer = state
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, optimizer = OPTIMIZER.update(gradients, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), loss

    state = jax.jit(init_state, out_shardings=whole)()
    for step in range(steps):
        tokens = jax.make_array_from_process_local_data(cut, draw(step, jax.process_index(), size))
        state, loss = train_step(state, tokens)
        float(loss)
        clock.tick()


def write_usage(folder: Path, clock: Clock) -> None:
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"peak_rss_mib": peak_kib / 1024, "sent_bytes": clock.find_sent_bytes()}
    (folder / f"usage-{os.getpid()}.json").write_text(json.dumps(found))


def main() -> None:
    mode, steps, out, words = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    folder, clock = out.parent, Clock()
    if mode == "bare":
        connect_bare()
        train_bare(steps, clock)
    else:
        result = fit_curve(steps, folder) if mode == "curve" else fit_trainer(steps, folder, words, clock)
        write_digest(folder, result.params_sha256)
    write_usage(folder, clock)
    write_times(out, clock.times)


if __name__ == "__main__":
    main()
