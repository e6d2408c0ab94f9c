"""A trainer whose state is in shards on the hosts of each replica. Usage: mesh_trainer.py DIR [axes=fsdp:4/tensor:2].

The harness writes `stop` to DIR: the step at which training ends, written well ahead. After every step each process
appends a line to `steps-<host index>-<pid>.jsonl`: the step, digests of the boxes of the state that are here, and their
bytes. With the word `evaluate` there are evaluations and early stopping, which never stops, with `save` checkpoints;
with `freeze` the second layer is frozen, with `experts` the model is a mixture of experts.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from experts import Experts, compute_experts_loss  # pyright: ignore[reportMissingImports] - beside this script
from flax import nnx
from no_comparisons import refuse_comparisons

import resilient_jax as rj

WORK = Path(sys.argv[1])
OPTIONS = dict(word.split("=") for word in sys.argv[2:] if "=" in word)
AXES = {
    name: int(size) for name, size in (part.split(":") for part in OPTIONS.get("axes", "fsdp:4").split("/"))
}
NEVER = 10**6
PACE_S = float(OPTIONS.get("pace", 0.1))
"""Pause per step: all hosts of a test share two cores."""
WIDTH, EXPERTS = 64, 4


def make_linear(first: str, second: str, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (first, second))
    return nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)


class Net(nnx.Module):
    """A network with named dims, and with batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = make_linear("embed", "mlp", rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.down = make_linear("mlp", "embed", rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.norm(self.up(x))))


def read(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).normal(size=(8, WIDTH)).astype(np.float32)


def loss(model: Net, rows: jax.Array) -> jax.Array:
    return jnp.mean((model(rows) - jnp.roll(rows, 1, axis=1)) ** 2)


def step_to_stop() -> int:
    try:
        return int((WORK / "stop").read_text())
    except (OSError, ValueError):
        return NEVER


def log(report: rj.StepReport) -> bool:
    if report.is_evaluation:
        return False
    leaves = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(report.state)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    digests = {
        f"{path} {shard.index}": hashlib.blake2b(np.asarray(shard.data).tobytes(), digest_size=8).hexdigest()
        for path, leaf in leaves
        for shard in leaf.addressable_shards
    }
    here = sum(
        sum({str(s.index): s.data.nbytes for s in leaf.addressable_shards}.values()) for _, leaf in leaves
    )
    whole = sum(leaf.nbytes for _, leaf in leaves)
    row = {"step": report.step - 1, "digests": digests, "bytes": here, "whole_bytes": whole}
    with (WORK / f"steps-{report.host_index}-{os.getpid()}.jsonl").open("a") as file:
        print(json.dumps(row), file=file)
    time.sleep(PACE_S)
    return report.step >= step_to_stop()


if __name__ == "__main__":
    refuse_comparisons()
    trainer = rj.Trainer(
        model=(lambda rngs: Experts(WIDTH, WIDTH, EXPERTS, rngs)) if "experts" in sys.argv else Net,
        optimizer=optax.adamw(0.01),
        wrt=nnx.All(nnx.Param, nnx.Not(nnx.PathContains("down"))) if "freeze" in sys.argv else nnx.Param,
        loss_fn=compute_experts_loss if "experts" in sys.argv else loss,
        data=read,
        batch_size=48,
        microbatch_size=8,
        numerics=rj.Numerics(clip_norm=0.5),
        parallelism=rj.Parallelism(axes=AXES),
        evaluation=rj.Evaluation(data=read, interval_steps=3, num_microbatches=4)
        if "evaluate" in sys.argv
        else None,
        early_stopping=rj.EarlyStopping(patience=NEVER) if "evaluate" in sys.argv else None,
        checkpoints=rj.Checkpoints(directory=WORK / "checkpoints", interval_steps=4)
        if "save" in sys.argv
        else None,
        callbacks=[log],
    )
    result = trainer.fit(NEVER)
    print(f"ended after step {result.step}: {sorted(result.metrics)}", flush=True)
