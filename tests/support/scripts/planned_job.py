"""A tiny job whose trainer searches its plans: a few microbatches of a few rows."""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import resilient_jax as rj

WIDTH = 256


def make(key, width=WIDTH):
    keys = jax.random.split(key, 2)
    return {
        "up": jax.random.normal(keys[0], (width, width)) / 16,
        "down": jax.random.normal(keys[1], (width, width)) / 16,
    }


def loss(params, batch, trace_s=0.0):
    time.sleep(trace_s)  # while it is traced, as a large model takes long to compile
    # A bare PartitionSpec, as models on one mesh have them: here it is over the axes of the plan.
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(batch @ params["up"]), PartitionSpec(None, "tensor"))
    return jnp.mean((hidden @ params["down"] - batch) ** 2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("topology")
    parser.add_argument("steps", type=int)
    parser.add_argument(
        "--named", action="store_true", help="the dims of parameters have names: tensor can cut them"
    )
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--rows", type=int, default=2, help="examples of a microbatch")
    parser.add_argument(
        "--clip", action="store_true", help="the optimizer clips by the norm of all gradients"
    )
    parser.add_argument("--axes-by-host", action="store_true", help="hosts may have replicas with other axes")
    parser.add_argument("--spans-hosts", action="store_true", help="a replica is whole hosts, one or several")
    parser.add_argument("--trace-s", type=float, default=0.0, help="how long each trace of the loss takes")
    parser.add_argument("--no-compile-ahead", action="store_true")
    parser.add_argument("--calibrate", action="store_true", help="plans depend on how fast this machine is")
    parser.add_argument("--own-loop", action="store_true", help="make the steps in a loop of the script's")
    parser.add_argument("--checkpoints", help="folder for them; one every 5 steps")
    asked = parser.parse_args()
    rules = [("up", ("embed", "mlp")), ("down", ("mlp", "embed"))] if asked.named else []

    def draw(step, index):
        return np.random.default_rng((step, index)).normal(size=(asked.rows, asked.width)).astype(np.float32)

    adam = optax.adam(1e-2)
    trainer = rj.Trainer(
        model=functools.partial(make, width=asked.width),
        optimizer=optax.chain(optax.clip_by_global_norm(1e-4), adam) if asked.clip else adam,
        loss_fn=functools.partial(loss, trace_s=asked.trace_s) if asked.trace_s else loss,
        data=draw,
        batch_size=asked.microbatches * asked.rows,
        microbatch_size=asked.rows,
        planner=rj.Planner(
            topology=asked.topology,
            logical_axis_rules=rj.LogicalAxisRules(names_by_path=rules),
            # None: as the topology says.
            axes_by_host=asked.axes_by_host or None,
            spans_hosts=asked.spans_hosts or None,
            compile_ahead=not asked.no_compile_ahead,
            calibrate=asked.calibrate,
        ),
        checkpoints=rj.Checkpoints(directory=asked.checkpoints, interval_steps=5)
        if asked.checkpoints
        else None,
    )

    found: list[rj.FitResult] = []

    def train(world: rj.World, train_step: rj.TrainerStep) -> None:
        state = train_step.restore_or_init()
        for step in world.steps(asked.steps):
            state, metrics = train_step(state, step)
            world.commit(state, **metrics)
        found.append(train_step.finish(state))

    if asked.own_loop:
        trainer.run(train)
    else:
        found.append(trainer.fit(asked.steps))
    result = found[-1]
    # Where replicas span hosts, no host has all parameters.
    digest = "in-shards" if result.trained.variables is None else result.params_sha256
    print(f"host {result.host_index} ended with {digest}", flush=True)
    if result.host_index == 0:
        print(f"sha256 {digest} loss {result.metrics['loss']:.6f}")
