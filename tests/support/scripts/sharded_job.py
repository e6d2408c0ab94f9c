"""A job of the trainer with a replicated or sharded state. Usage: sharded_job.py WORK_DIR replicated|sharded
[each] [slow]. With `each` every device computes microbatches of its own; with `slow` there are pauses between steps.

After every step each host appends a line to `shares.<host index>`: the step, the bytes of the state on this host, those
of the complete state, and how many complete nonzero arrays of a parameter's shape the process has in all.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import resilient_jax as rj

WORK = Path(sys.argv[1])
STATE = sys.argv[2]
STEPS = 9
WIDTH = 97
"""A prime: no number of devices divides a dim of the large leaves."""


class Net(nnx.Module):
    """A network with batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(11, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 13, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.second(jnp.tanh(self.norm(self.first(x))))))


def batch(step: int, index: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng((step, index)).normal(size=(4, 11)).astype(np.float32)
    return {"x": x, "y": x.sum(1, keepdims=True)}


def loss(model: Net, rows: dict):
    return jnp.mean((model(rows["x"]) - rows["y"]) ** 2)


def bytes_here(leaf: jax.Array | rj.RaveledArray) -> int:
    """Return the bytes of the distinct shards in this process."""
    array = leaf.vector if isinstance(leaf, rj.RaveledArray) else leaf
    return sum({str(shard.index): shard.data.nbytes for shard in array.addressable_shards}.values())


def say_shares(report: rj.StepReport) -> None:
    state = report.state
    leaves = jax.tree.leaves(
        (state.variables, state.opt_state), is_leaf=lambda node: isinstance(node, rj.RaveledArray)
    )
    here, everything = sum(map(bytes_here, leaves)), sum(leaf.nbytes for leaf in leaves)
    alike = [array for array in jax.live_arrays() if array.shape == (WIDTH, WIDTH)]
    complete = [array for array in alike if bytes_here(array) == array.nbytes and np.any(array)]
    with (WORK / f"shares.{report.host_index}").open("a") as file:
        print(report.step, here, everything, len(complete), file=file)
    print(f"step {report.step} {sorted(report.metrics.items())}", flush=True)
    if "slow" in sys.argv:
        time.sleep(0.2)


if __name__ == "__main__":
    result = rj.Trainer(
        model=Net,
        optimizer=optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.02, 5, STEPS)),
        loss_fn=loss,
        data=batch,
        batch_size=24,
        microbatch_size=4,
        numerics=rj.Numerics(clip_norm=0.5),
        parallelism=rj.Parallelism(
            state=STATE, replica_shape=rj.ReplicaShape(per_host="devices" if "each" in sys.argv else 1)
        ),
        evaluation=rj.Evaluation(data=batch, interval_steps=4, num_microbatches=3),
        early_stopping=rj.EarlyStopping(patience=50),
        checkpoints=rj.Checkpoints(directory=WORK / "checkpoints", interval_steps=5),
        callbacks=[say_shares],
    ).fit(STEPS)
    print(f"step {result.step} digest {rj.digest_tree(result.variables)}", flush=True)
