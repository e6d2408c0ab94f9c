"""A tiny trainer whose replicas span hosts, with the state in shards, for campaigns of `python tests/chaos`.

    python tests/chaos --campaign mesh -- tests/chaos/jobs/mesh_job.py
    python tests/chaos --campaign mesh_planned -- tests/chaos/jobs/mesh_job.py --planned

It trains up to the step in the file that RESILIENT_JAX_CHAOS_STOP_STEP names. With `--planned` the axes are searched,
and change with the hosts.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from chaos_job import NEVER, read_end  # pyright: ignore[reportMissingImports] - beside this script
from flax import nnx

import resilient_jax as rj
from tests.chaos.paths import REPOSITORY

WIDTH, ROWS, MICROBATCHES = 96, 24, 6
"""Rows that four, six and eight devices can share."""


class Net(nnx.Module):
    """Two layers with named dims."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(
            WIDTH, WIDTH, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs
        )
        self.down = nnx.Linear(
            WIDTH, WIDTH, kernel_init=nnx.with_partitioning(init, ("mlp", "embed")), rngs=rngs
        )

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Return float32[rows, WIDTH] of the same."""
        return self.down(jnp.tanh(self.up(rows)))


def loss_of(model: Net, rows: jax.Array) -> jax.Array:
    return jnp.mean((model(rows) - jnp.roll(rows, 1, axis=1)) ** 2)


def draw(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).standard_normal((ROWS, WIDTH), np.float32)


def main() -> None:
    """Parse the command line and run the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planned", action="store_true", help="axes and hosts of a replica are searched")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of rest after each step")
    options = parser.parse_args()

    def rest(report: rj.StepReport) -> bool:
        time.sleep(options.pace)
        return report.step >= read_end(NEVER)

    planner = rj.Planner(
        topology=REPOSITORY / "meshes" / "local_4x2.toml",
        axis_sizes={"tensor": 1},
        calibrate=False,
        spans_hosts=True,
    )
    rj.Trainer(
        model=Net,
        optimizer=optax.adam(1e-3),
        loss_fn=loss_of,
        data=draw,
        batch_size=MICROBATCHES * ROWS,
        microbatch_size=ROWS,
        numerics=rj.Numerics(clip_norm=0.5),
        parallelism=rj.Parallelism() if options.planned else rj.Parallelism(axes={"fsdp": 4}),
        planner=planner if options.planned else None,
        callbacks=[rest],
    ).fit(NEVER)


if __name__ == "__main__":
    main()
